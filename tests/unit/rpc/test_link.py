"""Who reads a connection, and that nothing that came is left lying."""

from __future__ import annotations

import functools
import queue
import socket
import threading
import time
from collections.abc import Container
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from gradwire.rpc._future import Outcome
from gradwire.rpc._link import Link
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._spin import SpinGauge
from gradwire.rpc._turn import (
    Turn,
    about_to_block,
    current_turn,
    set_turn,
    this_thread,
)
from gradwire.transport import Frame, Limits
from gradwire.transport._stream import StreamConnection

LIMIT_S = 10.0


class Owner:
    """Takes down what comes."""

    request_kinds: Container[int] = range(256)
    watch = SimpleNamespace(settled_until=0.0)

    def __init__(self) -> None:
        self.heads: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def accept(self, link: Link, frame: Frame) -> Any:
        self.heads.put(bytes(frame.head))
        self.threads.put(threading.current_thread())

    def serve(self, link: Link, request: Any) -> None:
        raise AssertionError("there are no requests")

    def turn_begins(self, now: float) -> None:
        pass

    def link_ended(self, link: Link, reason: str) -> None:
        pass


def test_frames_that_came_with_the_handshake_are_read_at_once():
    """They are in memory already, so the poller never tells of them."""
    sender, receiver = socket.socketpair()
    peer = StreamConnection("test", sender, Limits())
    peer.send(b"early")
    leftover = receiver.recv(1 << 16)
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    owner = Owner()
    link = Link(StreamConnection("test", receiver, Limits(), leftover), pool, owner)
    try:
        link.start()

        assert owner.heads.get(timeout=LIMIT_S) == b"early"
        peer.send(b"later")
        assert owner.heads.get(timeout=LIMIT_S) == b"later"
    finally:
        link.close()
        peer.close()
        pool.close(LIMIT_S)


def test_caller_leaves_the_reading_to_those_who_serve():
    """A request now and then is passed on; with more of them it is only in the way."""
    sender, receiver = socket.socketpair()
    peer = StreamConnection("test", sender, Limits())
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    owner = Owner()
    link = Link(StreamConnection("test", receiver, Limits()), pool, owner)
    never = Outcome()
    deadline = time.monotonic() + LIMIT_S
    try:
        for number in range(20):
            peer.send(b"request %d" % number)

        link.read_as_caller(never, deadline, [never], "never")

        assert time.monotonic() < deadline, "it did not stop"
        link.waits_elsewhere(+1)
        peer.send(b"another")
        heads = {owner.heads.get(timeout=LIMIT_S) for _ in range(21)}
        assert b"another" in heads
        me = threading.current_thread()
        assert all(owner.threads.get(timeout=LIMIT_S) is not me for _ in range(21))
    finally:
        link.close()
        peer.close()
        pool.close(LIMIT_S)


@pytest.mark.parametrize(
    ("is_here", "looks_first", "num_waits"),
    [(True, False, 1), (True, True, 0), (False, True, 1)],
)
def test_caller_may_look_before_it_waits(is_here, looks_first, num_waits):
    sender, receiver = socket.socketpair()
    peer = StreamConnection("test", sender, Limits())
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    answer = Outcome()

    class Asker(Owner):
        request_kinds: Container[int] = ()

        def accept(self, link: Link, frame: Frame) -> Any:
            answer.finish(frame.head, None)

    link = Link(StreamConnection("test", receiver, Limits()), pool, Asker())
    wait = link._wait

    def send_and_wait(*args: Any) -> Any:
        if not is_here:
            peer.send(b"it")
        return wait(*args)

    try:
        if is_here:
            peer.send(b"it")
        limit = time.monotonic() + LIMIT_S
        with patch.object(link, "_wait", side_effect=send_and_wait) as waited:
            link.read_as_caller(answer, limit, [answer], "it", looks_first=looks_first)

        assert answer.value == b"it"
        assert waited.call_count == num_waits
    finally:
        link.close()
        peer.close()
        pool.close(LIMIT_S)


def _call_rapidly(link: Link, peer: StreamConnection, owner: Any) -> None:
    """As a thread does that will be back very soon: nobody else reads meanwhile."""
    for _ in range(3):
        answer = Outcome()
        peer.send(b"answer")
        owner.on_next = functools.partial(answer.finish, None, None)
        link.read_as_caller(answer, time.monotonic() + LIMIT_S, [answer], "answers")
        assert answer.done
    assert not link._reading_wanted


class Answered(Owner):
    """What comes is an answer, until somebody sleeps."""

    request_kinds: Container[int] = b"r"

    def __init__(self) -> None:
        super().__init__()
        self.on_next: Any = None

    def accept(self, link: Link, frame: Frame) -> Any:
        super().accept(link, frame)
        if frame.head == b"answer":
            self.on_next()


@pytest.mark.parametrize("sleeps_at", ["outcome", "connection"])
def test_thread_that_sleeps_leaves_connections_to_others(sleeps_at, monkeypatch):
    """There is nobody here who looks for connections that nobody reads."""
    monkeypatch.setattr(SpinGauge, "spin", lambda *_: None)
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    owner = Answered()
    pairs = [socket.socketpair() for _ in range(2)]
    links = [Link(StreamConnection("test", p[0], Limits()), pool, owner) for p in pairs]
    peers = [StreamConnection("test", p[1], Limits()) for p in pairs]
    try:
        _call_rapidly(links[0], peers[0], owner)
        while not owner.heads.empty():
            owner.heads.get()

        never = Outcome()

        def sleep() -> None:
            if sleeps_at == "outcome":
                never.block(LIMIT_S)
            else:
                links[1].read_as_caller(
                    never, time.monotonic() + LIMIT_S, [never], "never"
                )

        peers[0].send(b"request")
        ender = threading.Thread(target=_end_when_served, args=(owner, never))
        ender.start()
        sleep()
        ender.join()

        assert never.value == b"request"
    finally:
        for link, peer in zip(links, peers, strict=True):
            link.close()
            peer.close()
        pool.close(LIMIT_S)


def _end_when_served(owner: Owner, outcome: Outcome) -> None:
    try:
        outcome.finish(owner.heads.get(timeout=LIMIT_S / 2), None)
    except queue.Empty:
        outcome.finish(None, None)


@pytest.fixture
def answered():
    """A connection with its pool, whose owner takes answers, and the other end."""
    ends = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    owner = Answered()
    link = Link(StreamConnection("test", ends[0], Limits()), pool, owner)
    peer = StreamConnection("test", ends[1], Limits())
    yield link, peer, owner, pool
    link.close()
    peer.close()
    pool.close(LIMIT_S)


def _run_on(pool: WorkerPool, work: Any) -> Any:
    """What work on a thread of the pool returns."""
    outcome = Outcome()

    def run() -> None:
        try:
            outcome.finish(work(), None)
        except BaseException as error:
            outcome.finish(None, error)

    pool.submit(run)
    assert outcome.block(LIMIT_S)
    return outcome.result()


def test_connection_is_unread_between_the_calls_of_a_handler_only(answered):
    link, peer, owner, pool = answered
    _run_on(pool, lambda: _call_rapidly(link, peer, owner))

    # No look comes: whoever ran the handler has to see to it.
    peer.send(b"request")
    heads = [owner.heads.get(timeout=LIMIT_S) for _ in range(4)]
    assert heads == [b"answer"] * 3 + [b"request"]


def test_handler_that_did_not_come_back_leaves_nothing_unread_for_a_while(answered):
    link, peer, owner, pool = answered

    def call_and_stay_away() -> bool:
        _call_rapidly(link, peer, owner)
        link._last_called -= 1.0
        link.check_turn(time.monotonic() + 1.0)
        return link._reading_wanted

    def call() -> bool:
        answer = Outcome()
        owner.on_next = functools.partial(answer.finish, None, None)
        turn = link.take_callers_turn()
        peer.send(b"answer")
        link._read_until(
            *(turn, answer, time.monotonic() + LIMIT_S, link.gauge, True, link._wait)
        )
        with link._lock:  # the poller may tell of nothing: all was read
            link._last_called = time.perf_counter()
        link.leave_callers_turn(turn, [])
        return link._reading_wanted

    assert _run_on(pool, call_and_stay_away), "the look has not armed it"
    assert _run_on(pool, call), "it was left unread again at once"
    link._num_not_left = 0
    assert not _run_on(pool, call), "it is never left unread again"


def test_waits_for_slow_things_do_not_end_the_spinning_for_quick_ones():
    ours, theirs = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    link = Link(StreamConnection("test", ours, Limits()), pool, Owner())
    try:
        for _ in range(50):
            link.gauge_of("training").note(10.0)
            link.gauge_of("gradients").note(20e-6)

        assert not link.gauge_of("training").spin(lambda _: True)
        assert link.gauge_of("gradients").spin(lambda _: True)
    finally:
        link.close()
        theirs.close()
        pool.close(LIMIT_S)


def test_gauges_of_very_many_kinds_of_waits_are_bounded():
    ours, theirs = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    link = Link(StreamConnection("test", ours, Limits()), pool, Owner())
    try:
        known = link.gauge_of("known")
        for number in range(10_000):
            link.gauge_of(f"a function of its own, {number}")

        assert len(link._gauges) < 100
        assert link.gauge_of("known") is known
        assert link.gauge_of("one more") is link.gauge_of("and another")
    finally:
        link.close()
        theirs.close()
        pool.close(LIMIT_S)


def test_end_is_not_reported_before_an_answer_that_came_with_a_request():
    class Watcher(Owner):
        request_kinds: Container[int] = b"r"

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def accept(self, link: Link, frame: Frame) -> Any:
            self.seen.append(frame.head.decode())

        def link_ended(self, link: Link, reason: str) -> None:
            self.seen.append("end")

    sender, receiver = socket.socketpair()
    peer = StreamConnection("test", sender, Limits())
    pool = WorkerPool("test", 1, lambda: None)
    # As if its threads were always faster than the one that reads.
    pool.submit = lambda *work: [piece() for piece in work]  # type: ignore[method-assign, assignment, func-returns-value]
    owner = Watcher()
    link = Link(StreamConnection("test", receiver, Limits()), pool, owner)
    never = Outcome()
    try:
        peer.send(b"request")
        peer.send(b"answer")
        link.connection.end = "it closed the connection"

        link.read_as_caller(never, time.monotonic() + 0.05, [never], "never")

        assert sorted(owner.seen[:2]) == ["answer", "request"]
        assert owner.seen[2:] == ["end"]
    finally:
        link.close()
        peer.close()
        pool.close(LIMIT_S)


class Worker(Owner):
    """Every frame sets off some work."""

    request_kinds: Container[int] = ()

    def accept(self, link: Link, frame: Frame) -> Any:
        return bytes(frame.head)

    def serve(self, link: Link, request: Any) -> None:
        self.threads.put(threading.current_thread())


def test_thread_that_waits_leaves_work_that_it_has_read_to_the_pool():
    sender, receiver = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    owner = Worker()
    link = Link(StreamConnection("test", receiver, Limits()), pool, owner)
    turn = Turn(link, is_callers=True)
    turn.rest.append(Frame(b"answer", []))
    link._under_way += [None]
    try:
        link._handle_rest(turn)

        assert owner.threads.get(timeout=LIMIT_S) is not threading.current_thread()
    finally:
        link.close()
        sender.close()
        assert pool.close(LIMIT_S) == []


def test_goodbye_is_not_taken_for_the_end_before_what_came_earlier():
    class Watcher(Owner):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def accept(self, link: Link, frame: Frame) -> Any:
            self.seen.append(frame.head.decode())
            if frame.head == b"goodbye":
                link.end_with("it shut down")

        def link_ended(self, link: Link, reason: str) -> None:
            self.seen.append(reason)

    sender, receiver = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    owner = Watcher()
    link = Link(StreamConnection("test", receiver, Limits()), pool, owner)
    link._under_way += [None] * 2  # both were read, and by different threads
    try:
        link._handle([Frame(b"goodbye", [])], None)
        assert owner.seen == ["goodbye"]

        link._handle([Frame(b"answer", [])], None)
        assert owner.seen == ["goodbye", "answer", "it shut down"]
    finally:
        link.close()
        sender.close()
        pool.close(LIMIT_S)


def test_end_that_is_noticed_while_somebody_reads_waits_for_what_came_before_it():
    class Watcher(Owner):
        request_kinds: Container[int] = ()

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def accept(self, link: Link, frame: Frame) -> Any:
            self.seen.append(frame.head.decode())

        def link_ended(self, link: Link, reason: str) -> None:
            self.seen.append("end")

    class Connection(StreamConnection):
        def receive(self) -> list[Frame]:
            frames = super().receive()
            if self.end is None:
                self.end = "it closed the connection"
                # Another thread has just handled what it was busy with.
                other = threading.Thread(target=link.end_if_over)
                other.start()
                other.join(LIMIT_S)
            return frames

    sender, receiver = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    owner = Watcher()
    link = Link(Connection("test", receiver, Limits()), pool, owner)
    peer = StreamConnection("test", sender, Limits())
    peer.send(b"answer")
    try:
        link.read_as_caller(Outcome(), time.monotonic() + LIMIT_S, [], "it")

        assert owner.seen == ["answer", "end"]
    finally:
        link.close()
        peer.close()
        pool.close(LIMIT_S)


def test_thread_that_waits_takes_what_it_has_read_one_by_one():
    class Watcher(Owner):
        request_kinds: Container[int] = ()

        def accept(self, link: Link, frame: Frame) -> Any:
            super().accept(link, frame)
            left.append(len(turn.rest))

    sender, receiver = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    link = Link(StreamConnection("test", receiver, Limits()), pool, Watcher())
    turn = Turn(link, is_callers=True)
    turn.rest += [Frame(b"second", []), Frame(b"first", [])]
    link._under_way += [None] * 2
    left: list[int] = []  # for others, should this one take long
    try:
        link._handle_rest(turn)

        assert left == [1, 0]
    finally:
        link.close()
        sender.close()
        pool.close(LIMIT_S)


def test_caller_whose_turn_was_ended_while_it_handled_an_answer_reads_no_more():
    class Slow(Owner):
        """Takes so long that a look ends the turn."""

        request_kinds: Container[int] = ()

        def accept(self, link: Link, frame: Frame) -> Any:
            assert link.end_turn(turn_of(link))

    def turn_of(link: Link) -> Turn:
        assert link._turn is not None
        return link._turn

    sender, receiver = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    link = Link(StreamConnection("test", receiver, Limits()), pool, Slow())
    peer = StreamConnection("test", sender, Limits())
    peer.send(b"answer to somebody else")
    never = Outcome()
    deadline = time.monotonic() + LIMIT_S
    try:
        link.read_as_caller(never, deadline, [never], "never")

        assert time.monotonic() < deadline
    finally:
        link.close()
        peer.close()
        pool.close(LIMIT_S)


def test_caller_whose_turn_was_ended_in_a_wait_does_not_read(monkeypatch):
    """A signal handler that waits for something else lets others read meanwhile."""
    ours, theirs = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    link = Link(StreamConnection("test", ours, Limits()), pool, Owner())
    never = Outcome()
    reads: list[int] = []
    monkeypatch.setattr(link, "_wait", lambda _deadline, _gauge: about_to_block())
    monkeypatch.setattr(link, "_receive", lambda: reads.append(1))
    try:
        link.read_as_caller(never, time.monotonic() + LIMIT_S, [never], "never")

        assert reads == []
        assert link._reading_wanted, "nobody would read"
    finally:
        link.close()
        theirs.close()
        pool.close(LIMIT_S)


class Answers(Owner):
    """What comes is an answer."""

    request_kinds: Container[int] = ()

    def __init__(self) -> None:
        super().__init__()
        self.on_next: Any = lambda: None
        self.begins: list[float] = []

    def accept(self, link: Link, frame: Frame) -> Any:
        self.on_next()

    def turn_begins(self, now: float) -> None:
        self.begins.append(now)


@pytest.fixture
def calling():
    """A connection, its other end, and who gets what comes."""
    ours, theirs = socket.socketpair()
    peer = StreamConnection("test", theirs, Limits())
    pool = WorkerPool("test", 1, lambda: None)
    owner = Answers()
    link = Link(StreamConnection("test", ours, Limits()), pool, owner)
    yield link, peer, owner
    link.close()
    peer.close()
    pool.close(LIMIT_S)


def _call(calling: tuple[Link, StreamConnection, Answers], meanwhile: Any) -> None:
    link, peer, owner = calling
    answer = Outcome()

    def on_answer() -> None:
        meanwhile()
        answer.finish(None, None)

    owner.on_next = on_answer
    peer.send(b"answer")
    # With another call in flight, so that it is left unread: no pool thread reads it.
    link.read_as_caller(answer, time.monotonic() + LIMIT_S, [answer], "answers")
    assert answer.done


def test_turn_of_the_next_caller_is_as_if_it_were_new(calling):
    """It is the same object, which nobody else has."""
    link = calling[0]
    turns: list[Turn] = []

    def look() -> None:
        turn = link._turn
        assert current_turn() is turn
        assert turn is not None
        turns.append(turn)
        assert turn.thread == threading.get_ident()
        assert turn.serving_since == link.last_received
        assert turn.is_callers
        assert not (turn.is_over or turn.rest or turn.put_off or turn.siblings)

    _call(calling, look)
    other = threading.Thread(target=_call, args=(calling, look))
    other.start()
    other.join(LIMIT_S)

    assert len(turns) == 2
    assert turns[0] is turns[1]
    assert turns[0].is_over
    again = link.take_callers_turn()
    assert again is turns[0]
    assert again.serving_since == 0.0


def test_turn_that_others_have_ended_is_nobodys_again(calling):
    """Whoever had it must find that it is over, also if another has its turn by then."""
    link = calling[0]
    turns: list[Turn] = []

    def end() -> None:
        turns.append(link._turn)
        assert link.end_turn(turns[0])

    _call(calling, end)

    assert link.take_callers_turn() is not turns[0]
    assert turns[0].is_over


def test_caller_that_leaves_a_connection_unread_has_put_a_look_off_before(calling):
    link, _, owner = calling

    _call(calling, lambda: None)

    assert not link._reading_wanted
    assert owner.begins == [link.last_received]
    nothing = Outcome()
    nothing.finish(None, None)
    link.read_as_caller(nothing, 0.0, [nothing], "what is here already")
    assert len(owner.begins) == 2, "nothing was handled, and nobody would look"
    link._last_called = time.perf_counter() + LIMIT_S
    assert link.check_turn(time.monotonic())


def test_look_that_is_put_off_for_long_enough_is_not_put_off_again(calling):
    owner = calling[2]
    owner.watch = SimpleNamespace(settled_until=time.monotonic() + LIMIT_S)

    _call(calling, lambda: None)

    assert owner.begins == []


class _Ending:
    """The lock of a link; a turn ends as soon as a look has let go of it."""

    def __init__(self, link: Link, turn: Turn) -> None:
        self._lock, self._link, self._turn = link._lock, link, turn

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self._link._lock = self._lock
        self._link.leave_callers_turn(self._turn, [self])


def test_look_that_sees_a_turn_which_ends_at_that_moment_comes_again(calling):
    link = calling[0]
    turn = link.take_callers_turn()
    turn.serving_since = now = time.monotonic()
    link._lock = _Ending(link, turn)

    assert link.check_turn(now)
    assert turn.is_over
    assert not link._reading_wanted


def test_only_who_may_lead_waits_for_others_as_well(calling, monkeypatch):
    link = calling[0]
    looked: list[Any] = []

    def spin(_: SpinGauge, look: Any) -> Any:
        looked.append(look)
        return [(link.fileno, 0)]

    monkeypatch.setattr(SpinGauge, "spin", spin)
    gauge = link.gauge_of("it")

    link._wait(0.0, gauge)
    link._wait_in_turn(0.0, gauge)
    assert link._pool._lead.claim()
    link._wait_in_turn(0.0, gauge)

    assert looked == [link.is_ready, link.is_ready, link.is_any_ready]
    assert link._pool.leads, "nobody else has called"


class PuttingOff(Owner):
    """What comes first puts something off, and more comes meanwhile."""

    request_kinds: Container[int] = ()

    def __init__(self, peer: StreamConnection, meanwhile: Any) -> None:
        super().__init__()
        self._peer = peer
        self._meanwhile = meanwhile
        self.done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.seen_by_who_blocks: queue.SimpleQueue[set[str]] = queue.SimpleQueue()

    def accept(self, link: Link, frame: Frame) -> Any:
        if frame.head == b"first":
            self._peer.send(b"meanwhile")
            while self._peer.num_queued:  # whoever has sent "first" sends this, too
                time.sleep(0)
            turn = current_turn()
            assert turn is not None
            for name in ("put off", "and another"):
                link.put_off(turn, functools.partial(self.done.put, name))
        else:
            self._meanwhile(self)


@pytest.fixture
def putting_off(request):
    """The owner of a connection at which "first" has come."""
    ours, theirs = socket.socketpair()
    peer = StreamConnection("test", theirs, Limits())
    owner = PuttingOff(peer, request.param)
    pool = WorkerPool("test", 2, lambda: None)
    pool.start()
    link = Link(StreamConnection("test", ours, Limits()), pool, owner)
    link.start()
    peer.send(b"first")
    yield owner
    link.close()
    peer.close()
    pool.close(LIMIT_S)


def _serve_what_came_meanwhile(owner: PuttingOff) -> None:
    owner.done.put("what came meanwhile")


def _wait_for_what_was_put_off(owner: PuttingOff) -> None:
    about_to_block()
    owner.seen_by_who_blocks.put({owner.done.get(timeout=LIMIT_S) for _ in range(2)})


def _put_off_more_when_the_turn_is_over(owner: PuttingOff) -> None:
    turn = current_turn()
    assert turn is not None
    about_to_block()
    turn.link.put_off(turn, functools.partial(owner.done.put, "late"))
    owner.seen_by_who_blocks.put({owner.done.get(timeout=LIMIT_S) for _ in range(3)})


def test_turn_is_ended_by_the_first_wait_of_its_thread(idle_link, monkeypatch):
    """And what the thread leads: it cannot begin to lead again before the turn is over."""
    ends: list[Turn] = []
    monkeypatch.setattr(idle_link, "end_turn", ends.append)
    resigned: list[None] = []
    monkeypatch.setattr(this_thread, "resign", lambda: resigned.append(None))
    turns = [Turn(idle_link), Turn(idle_link)]

    try:
        for turn in turns:
            set_turn(turn)
            about_to_block()
            about_to_block()
    finally:
        set_turn(None)

    assert ends == turns
    assert len(resigned) == 2
    about_to_block()
    about_to_block()
    assert len(resigned) == 4  # there is no turn that could tell


@pytest.mark.parametrize("putting_off", [_serve_what_came_meanwhile], indirect=True)
def test_what_is_put_off_comes_after_what_came_meanwhile(putting_off):
    done = [putting_off.done.get(timeout=LIMIT_S) for _ in range(3)]

    assert done == ["what came meanwhile", "put off", "and another"]


@pytest.mark.parametrize("putting_off", [_wait_for_what_was_put_off], indirect=True)
def test_what_is_put_off_waits_for_nobody_who_blocks(putting_off):
    seen = putting_off.seen_by_who_blocks.get(timeout=LIMIT_S)

    assert seen == {"put off", "and another"}


@pytest.mark.parametrize(
    "putting_off", [_put_off_more_when_the_turn_is_over], indirect=True
)
def test_what_is_put_off_too_late_is_done_all_the_same(putting_off):
    seen = putting_off.seen_by_who_blocks.get(timeout=LIMIT_S)

    assert seen == {"put off", "and another", "late"}


class Watched(Turn):
    """Notes who looks at its clock, and who sets it."""

    __slots__ = ("on_get", "on_set")

    def __init__(self, link: Link) -> None:
        self.on_get: Any = lambda: 0.0
        self.on_set: Any = lambda: None
        super().__init__(link)

    @property
    def serving_since(self) -> float:  # type: ignore[override]
        return self.on_get()

    @serving_since.setter
    def serving_since(self, since: float) -> None:
        self.on_set()


@pytest.fixture
def idle_link():
    sender, receiver = socket.socketpair()
    pool = WorkerPool("test", 1, lambda: None)
    link = Link(StreamConnection("test", receiver, Limits()), pool, Owner())
    yield link
    link.close()
    sender.close()
    pool.close(LIMIT_S)


def test_turn_that_goes_on_while_a_look_ends_it_is_left_alone(idle_link):
    turn = Watched(idle_link)
    idle_link._reader = idle_link._turn = turn
    times = [0.0, 1.0]  # its thread reads again between the two
    turn.on_get = times.pop

    assert not idle_link.end_turn(turn, if_since=1.0)

    assert not turn.is_over
    assert idle_link._reader is idle_link._turn is turn


def test_turn_that_is_ended_before_its_thread_has_said_that_it_goes_on_is_over(
    idle_link,
):
    turn = Watched(idle_link)
    idle_link._reader = idle_link._turn = turn
    turn.on_get = lambda: 1.0
    turn.on_set = lambda: idle_link.end_turn(turn, if_since=1.0)

    assert not idle_link.reads_again(turn)
    assert turn.is_over


def test_reading_that_was_not_asked_for_to_the_end_is_asked_for_again(
    calling, monkeypatch
):
    """A signal handler may raise at any call, when a thread is about to sleep."""
    link = calling[0]
    _call(calling, lambda: None)
    poller = link._pool.poller

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(poller, "arm", interrupt)
        with pytest.raises(KeyboardInterrupt):
            link.read_by_others()
    assert not link._reading_wanted

    link.read_by_others()

    assert link._reading_wanted
