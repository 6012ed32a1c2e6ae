"""Many threads send at once; the interpreter switches between them all the time."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any

import pytest

from gradwire.transport import Limits
from gradwire.transport._inproc import channel_pair

NUM_THREADS, NUM_FRAMES = 4, 20_000


@pytest.fixture
def _restless():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless")
def test_frames_of_many_threads_all_arrive():
    ours, theirs = (c.upgrade(Limits(), b"") for c in channel_pair())
    problems: list[BaseException] = []

    def send(number: int) -> None:
        try:
            for frame in range(NUM_FRAMES):
                ours.send(b"%d %d" % (number, frame), hold=frame % 3 != 0)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=send, args=(n,)) for n in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    received: list[bytes] = []
    while any(thread.is_alive() for thread in threads):
        received += [frame.head for frame in theirs.receive()]
    for thread in threads:
        thread.join()
    ours.flush()
    while frames := theirs.receive():
        received += [frame.head for frame in frames]
        ours.flush()
    ours.close()
    theirs.close()

    assert problems == []
    for number in range(NUM_THREADS):
        mine = [head for head in received if head.startswith(b"%d " % number)]
        assert mine == [b"%d %d" % (number, frame) for frame in range(NUM_FRAMES)]


def test_frame_that_another_thread_has_sent_meanwhile_is_not_sent_again():
    """The interpreter may switch to others right when a frame is in the queue."""
    ours: Any
    ours, theirs = (c.upgrade(Limits(), b"") for c in channel_pair())

    class Queue(deque[Any]):
        def extend(self, parts: Any) -> None:
            super().extend(parts)
            if bytes(parts[-1]).endswith(b"first"):
                other = threading.Thread(target=send_others)
                other.start()
                other.join()

    def send_others() -> None:
        ours.send(b"second")  # and the first with it
        ours.send(b"third", hold=True)

    ours._queue = Queue()
    ours.send(b"zeroth", hold=True)  # else the first would not enter the queue
    ours.send(b"first")
    ours.flush()

    heads = [bytes(frame.head) for frame in theirs.receive()]
    assert heads == [b"zeroth", b"first", b"second", b"third"]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("num_taken", [0, 1, 9, None])
@pytest.mark.parametrize("as_error", [False, True])
@pytest.mark.parametrize("first", [b"first", bytes(range(256)) * 100])
def test_rest_of_a_frame_goes_before_what_others_send_meanwhile(
    first, num_taken, as_error
):
    """Of a frame that is written without entering the queue, in one part or in two."""
    ours: Any
    ours, theirs = (c.upgrade(Limits(), b"") for c in channel_pair())
    sock = ours._sock

    class Slow:
        """Takes a part of the first frame only, while others send."""

        def send(self, data: Any) -> int:
            ours._sock = sock
            for head in (b"second", b"third"):
                other = threading.Thread(target=ours.send, args=(head,))
                other.start()
                other.join()
            num = sock.send(data[:num_taken]) if num_taken != 0 else 0
            if as_error and num == 0:
                raise BlockingIOError
            return num

        def sendmsg(self, parts: Any) -> int:
            return self.send(b"".join(parts))

    ours._sock = Slow()
    ours.send(first)

    heads = [bytes(frame.head) for frame in theirs.receive()]
    assert heads == [first, b"second", b"third"]
    assert ours.num_queued == 0
    assert ours.counters()["bytes_sent"] == theirs.counters()["bytes_received"]
    ours.close()
    theirs.close()


def test_large_frame_is_not_copied_to_get_its_header():
    ours: Any
    ours, theirs = (c.upgrade(Limits(), b"") for c in channel_pair())
    sock, head, seen = ours._sock, bytes(100_000), []

    class Watched:
        def sendmsg(self, parts: Any) -> int:
            seen.extend(parts)
            return sock.sendmsg(parts)

    ours._sock = Watched()
    ours.send(head)
    ours._sock = sock

    assert seen[-1] is head
    assert [frame.head for frame in theirs.receive()] == [head]
    ours.close()
    theirs.close()


def test_parts_of_a_frame_that_is_held_enter_the_queue_together():
    """Else a frame of another thread could come between them."""
    ours: Any
    ours, theirs = (c.upgrade(Limits(), b"") for c in channel_pair())

    class Queue(deque[Any]):
        def append(self, part: Any) -> None:
            raise AssertionError("a part enters alone")

    ours._queue = Queue()
    head = bytes(range(256)) * 100
    ours.send(head, hold=True)
    ours.flush()

    assert [frame.head for frame in theirs.receive()] == [head]
    ours.close()
    theirs.close()
