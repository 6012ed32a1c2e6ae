"""Workers that hold references to each other's values over a simulated network.

Each has the real `RefService`, and with it the real `RefTable`; what is simulated is all
that surrounds them: agents, connections, programs, the thread that works off dropped
handles. At each step somebody picks one of the things that could happen next. Nothing
happens by itself, so a run can be repeated.

*Programs* make values elsewhere (`remote`), share values of their own, send references to
anybody as arguments and results, fetch values, drop references, and give calls up.

*The network.* One connection for each ordered pair of workers, oneself included. With
``overtaking``, frames of one connection are handled in any order, as by a pool of threads;
calls are decoded some time after they were accepted, perhaps after their sender is lost.

*What breaks.* Calls that are packed and not sent; messages that are not read, at all or
from some object on; workers that die. Their last words may be on their way.

*What must hold.* See `Simulation.check` for every moment, `Simulation.finish` for the end.
"""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from gradwire._config import RpcBackendOptions
from gradwire._ids import WorkerInfo
from gradwire.errors import (
    CallTimeout,
    DecodeError,
    GradwireError,
    OwnerLost,
    PeerLostError,
)
from gradwire.rpc._interceptors import Note, Scope
from gradwire.rpc._limits import PeerLimits
from gradwire.rpc._rref_parts import Deleted, Handle, Owned, Packed, User
from gradwire.rpc._rref_service import RefService
from gradwire.rpc._rref_table import RefId
from gradwire.wire import Outgoing, decode_control

__all__ = ["Failed", "Setting", "Simulation", "simulate"]

MAX_HANDLES = 6
"""A program that holds so many references only drops some."""
SLOWNESS = 0.1
"""How often something that is slow goes on when it could."""
DYING = 0.01
"""How likely it is at each step that a worker dies."""


@dataclass(frozen=True)
class Setting:
    """What may happen in a run.

    Attributes:
        num_workers: How many workers there are.
        overtaking: Frames of one connection are handled in any order.
        breaking: Messages are not sent, not read, or given up.
        dying: Workers die.
        num_steps: How many things programs do; what follows from them comes on top.
    """

    num_workers: int = 3
    overtaking: bool = False
    breaking: bool = False
    dying: bool = False
    num_steps: int = 120


class Failed(AssertionError):
    """The references did something wrong."""


class Value:
    """What is referred to."""


# ---------------------------------------------------------------------------- messages


@dataclass
class Call:
    """A request: it makes a value, fetches one, or only carries references."""

    id: int
    header: bytes | None
    packed: list[Packed]
    creation: tuple[RefId, RefId] | None = None
    fetched: RefId | None = None
    is_given_up: bool = False


@dataclass
class Reply:
    """The end of a call; without a value it is a failure."""

    id: int
    has_value: bool
    header: bytes | None = None
    packed: list[Packed] = field(default_factory=list)
    error: BaseException | None = None
    unread_from: int | None = None


class Control(NamedTuple):
    """A message of the references themselves."""

    message: Any


class End(NamedTuple):
    """The other end of the connection is gone."""


# ------------------------------------------------------------------------- surroundings


class Leftovers:
    """Stands for `gradwire.rpc._leftovers.Leftovers`: works off when it is told to."""

    def __init__(self, drop: Callable[[list[RefId]], None]) -> None:
        self._drop = drop
        self.entries: list[RefId] = []

    def put(self, entry: RefId) -> None:
        self.entries.append(entry)

    def watch(self, mortal: object, entry: RefId) -> weakref.ref[object]:
        return weakref.ref(mortal, lambda _: self.put(entry))

    def ensure_thread(self) -> None:
        pass

    def work_off(self) -> None:
        entries, self.entries = self.entries, []
        if entries:
            self._drop(entries)

    def close(self) -> None:
        pass


class Peer:
    """A worker as seen from another."""

    link = object()
    incarnation = 1

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.fate: str | None = None

    @property
    def is_usable(self) -> bool:
        return self.fate is None

    def error(self) -> PeerLostError:
        return PeerLostError(f"{self.info.name} is lost", worker=self.info.name)


class Agent:
    """One end of all connections; also the network of itself."""

    incarnation = 1
    is_safe = False

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.info = WorkerInfo(f"w{rank}", rank)
        self.limits = PeerLimits(RpcBackendOptions(), self.info.name)
        self.network = self
        self._simulation = simulation
        infos = [WorkerInfo(f"w{r}", r) for r in range(simulation.setting.num_workers)]
        self._peers = [Peer(info) for info in infos]

    def find(self, to: int | WorkerInfo) -> Any:
        return self._peers[to.id if isinstance(to, WorkerInfo) else to]

    def describe(self, error: BaseException) -> BaseException:
        return error

    def rebuild(self, description: BaseException) -> BaseException:
        return description

    def connect(self, peer: Peer) -> None:
        if peer.fate is not None:
            raise peer.error()

    def send(self, peer: Peer, outgoing: Outgoing) -> None:
        self.connect(peer)
        message, _ = decode_control(outgoing.head)
        self._simulation.post(self.info.id, peer.info.id, Control(message))


@dataclass
class Begun:
    """A call that a program has begun: the connection was there at that time."""

    to: int
    kind: str
    handles: list[Handle]


@dataclass
class Ready:
    """A call or a reply that is encoded, and not sent yet."""

    to: int
    message: Call | Reply
    note: Note | None = None
    keeps: Handle | None = None
    made: Handle | None = None


@dataclass
class Pending:
    """A call that waits for its answer."""

    call: Call
    to: int
    note: Note | None
    keeps: Handle | None


@dataclass
class Running:
    """A call that was decoded: its handler waits, or runs."""

    call: Call
    caller: int
    handles: list[Handle]
    scope: Scope | None = None
    unconfirmed: list[User] = field(default_factory=list)
    owned: Owned | None = None


class Worker:
    """One worker: its references, and what its program and its threads are at."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.rank = rank
        self.is_alive = True
        self.agent = Agent(simulation, rank)
        self.service = RefService(cast(Any, self.agent))
        self.leftovers = Leftovers(self.service._drop)
        self.service.leftovers = cast(Any, self.leftovers)
        self.handles: list[Handle] = []
        self.begun: list[Begun] = []
        self.ready: list[Ready] = []
        self.pending: dict[int, Pending] = {}
        self.pool: list[tuple[int, Call]] = []
        self.running: list[Running] = []

    @property
    def table(self) -> Any:
        return self.service._table


class Simulation:
    """A group of workers. All methods that do something return whether they could."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.log: list[str] = []
        self.seen: Counter[str] = Counter()
        self._ids = itertools.count()
        ranks = range(setting.num_workers)
        self.links: dict[tuple[int, int], deque[Any]] = {
            (a, b): deque() for a in ranks for b in ranks
        }
        self.workers = [Worker(self, rank) for rank in ranks]
        self.values: list[weakref.ref[Value]] = []
        # Values that were made, or will never be, because their creation failed.
        self.made: set[RefId] = set()
        self.failed: set[RefId] = set()
        self.deletions: Counter[RefId] = Counter()

    # ------------------------------------------------------------------------ network

    def post(self, source: int, to: int, message: Any) -> None:
        if isinstance(message, Control) and isinstance(message.message, Deleted):
            self.deletions.update(fork for _, fork, _ in message.message.forks)
        if self.workers[to].is_alive:
            self.links[source, to].append(message)

    def busy_links(self) -> list[tuple[int, int]]:
        return [pair for pair, queue in self.links.items() if queue]

    def deliver(self, pair: tuple[int, int], index: int = 0) -> bool:
        """The next frame of a connection, or with overtaking any but the end."""
        source, to = pair
        queue = self.links[pair]
        if not queue:
            return False
        if not self.setting.overtaking:
            index = 0
        frames = [m for m in queue if not isinstance(m, End)] or list(queue)
        message = frames[index % len(frames)]
        if index % len(frames):
            self.seen["overtaking"] += 1
        queue.remove(message)
        worker = self.workers[to]
        self.note(f"w{to} gets {message} from w{source}")
        if isinstance(message, End):
            self._lose(worker, source)
        elif isinstance(message, Control):
            peer = worker.agent.find(source)
            handle = worker.service.messages[type(message.message)]
            handle(peer, message.message, cast(Any, None))
        elif isinstance(message, Call):
            worker.pool.append((source, message))
        else:
            self._get_answer(worker, source, message)
        return True

    def _lose(self, worker: Worker, rank: int) -> None:
        peer = worker.agent.find(rank)
        peer.fate = "it died"
        for call_id, pending in list(worker.pending.items()):
            if pending.to == rank:
                del worker.pending[call_id]
                if pending.note is not None:
                    pending.note.failed(was_sent=True, error=peer.error())
        worker.service.peer_lost(peer)

    # ----------------------------------------------------------------------- programs

    def share(self, rank: int) -> bool:
        """A program makes a reference to a value of its own."""
        worker = self.workers[rank]
        owned = worker.service.own(self._new_value())
        self.made.add(owned.id)
        worker.handles.append(Handle._bind(worker.service, owned))
        self.note(f"w{rank} shares {owned.id}")
        return True

    def begin(self, rank: int, to: int, kind: str, picks: list[int]) -> bool:
        """A program is about to call; it has looked at the connection."""
        worker = self.workers[rank]
        if worker.agent.find(to).fate is not None:
            return False
        handles = self._pick(worker, picks)
        if kind == "send" and not handles:
            return False
        if kind == "fetch":
            refs = [(h, h._ref) for h in handles]
            users = [(h, ref.owner.id) for h, ref in refs if isinstance(ref, User)]
            if not users:
                return False
            (handle, to), handles = users[0], []
            handles.append(handle)
            if worker.agent.find(to).fate is not None:
                return False
        worker.begun.append(Begun(to, kind, handles))
        return True

    def _pick(self, worker: Worker, picks: list[int]) -> list[Handle]:
        known = worker.handles
        chosen = [known[pick % len(known)] for pick in picks] if known else []
        return [h for h in chosen if self._is_sendable(h)]

    def _is_sendable(self, handle: Handle) -> bool:
        ref = handle._ref
        return isinstance(ref, Owned) or ref.confirmation.error is None

    def encode(self, rank: int, index: int, fails_at: int | None = None) -> bool:
        """A begun call becomes a message."""
        worker = self.workers[rank]
        if not worker.begun:
            return False
        begun = worker.begun.pop(index % len(worker.begun))
        service, peer = worker.service, worker.agent.find(begun.to)
        handles = [h for h in begun.handles if self._is_sendable(h)]
        call = Call(next(self._ids), None, [])
        keeps = made = making = None
        if begun.kind == "fetch":
            if not handles:
                return True
            keeps = handles.pop()
            call.fetched = keeps._ref.id
        elif begun.kind == "remote":
            ref, creation = (
                service.create_here()
                if begun.to == rank
                else service.create_there(peer.info)
            )
            made = Handle._bind(service, ref)
            making, call.creation = creation, (creation.rref, creation.fork)
            fails_at = None
        for number, handle in enumerate(handles):
            if number == fails_at:
                self.note(f"w{rank} cannot pack a call to w{begun.to}")
                self.seen["not packed"] += 1
                service.discarded(DecodeError("broken"))
                return True
            call.packed.append(service._pack(handle, peer))
        note: Note | None = None
        if call.packed or call.creation:
            note = service.sending_call(peer, call.id, "f", [], set(), True, making)
            call.header = note.addition.header
        worker.ready.append(Ready(begun.to, call, note, keeps, made))
        self.note(f"w{rank} has packed {call} for w{begun.to}")
        return True

    def send(self, rank: int, index: int, *, is_refused: bool = False) -> bool:
        """A message leaves; unless the connection is gone by now."""
        worker = self.workers[rank]
        if not worker.ready:
            return False
        ready = worker.ready.pop(index % len(worker.ready))
        message, note = ready.message, ready.note
        peer = worker.agent.find(ready.to)
        if isinstance(message, Reply):
            if peer.fate is None:
                self.post(rank, ready.to, message)
            elif message.packed:
                self.seen["result for a lost worker"] += 1
            return True
        if is_refused:
            self.seen["not sent"] += 1
            if note is not None:
                note.failed(was_sent=False)
            self._creation_failed(message)
            return True
        if ready.made is not None:
            worker.handles.append(ready.made)
        if peer.fate is not None:
            self.seen["call to a lost worker"] += 1
            if note is not None:
                note.failed(was_sent=True, error=peer.error())
        else:
            pending = Pending(message, ready.to, note, ready.keeps)
            worker.pending[message.id] = pending
            self.post(rank, ready.to, message)
        return True

    def give_up(self, rank: int, index: int) -> bool:
        """The deadline of a call passes; a worker that has not begun it will not."""
        worker = self.workers[rank]
        waiting = [p for p in worker.pending.values() if p.note is not None]
        if not waiting:
            return False
        pending = waiting[index % len(waiting)]
        del worker.pending[pending.call.id]
        pending.call.is_given_up = True
        self.note(f"w{rank} gives up {pending.call}")
        self.seen["given up"] += 1
        self._creation_failed(pending.call)
        assert pending.note is not None
        pending.note.failed(was_sent=True, error=CallTimeout("too late"))
        return True

    def drop(self, rank: int, index: int) -> bool:
        """A program forgets a reference."""
        handles = self.workers[rank].handles
        if not handles:
            return False
        self.note(f"w{rank} drops {_text(handles[index % len(handles)])}")
        del handles[index % len(handles)]
        return True

    def work_off(self, rank: int) -> bool:
        """The thread for leftovers has its turn."""
        leftovers = self.workers[rank].leftovers
        if not leftovers.entries:
            return False
        leftovers.work_off()
        return True

    def kill(self, rank: int, num_last_words: int) -> bool:
        """A worker dies. Of what it said to each, only so much is on its way."""
        worker = self.workers[rank]
        if not worker.is_alive or sum(w.is_alive for w in self.workers) < 2:
            return False
        worker.is_alive = False
        self.seen["death"] += 1
        self.note(f"w{rank} dies")
        for other in self.workers:
            self.links[other.rank, rank].clear()
            said = self.links[rank, other.rank]
            while len(said) > num_last_words:
                said.pop()
            if other.is_alive:
                said.append(End())
            else:
                said.clear()
        # Nothing of it may do anything any more, not even as it is collected.
        worker.leftovers.put = lambda entry: None  # type: ignore[method-assign]
        for things in (worker.handles, worker.begun, worker.ready, worker.running):
            things.clear()
        worker.pending.clear()
        worker.pool.clear()
        return True

    def _creation_failed(self, call: Call) -> None:
        if call.creation is not None:
            self.failed.add(call.creation[0])

    # ----------------------------------------------------------------------- handlers

    def decode(self, rank: int, index: int, unread_from: int | None = None) -> bool:
        """A thread of the pool takes up a call that was accepted."""
        worker = self.workers[rank]
        if not worker.pool:
            return False
        caller, call = worker.pool.pop(index % len(worker.pool))
        peer, service = worker.agent.find(caller), worker.service
        if peer.fate is not None:
            self.seen["call of a lost worker"] += 1
        if call.fetched is not None:
            unread_from = None  # numbers can always be read
        if call.is_given_up or (
            unread_from is not None and unread_from <= len(call.packed)
        ):
            self._drop_call(worker, caller, call, unread_from)
            return True
        running = Running(call, caller, [])
        for packed in call.packed:
            running.handles.append(service.unpack(packed, peer))
        if call.header is not None:
            running.unconfirmed = list(service.transfer.unconfirmed)
            running.scope = service.received_call(
                peer,
                call.id,
                "f",
                call.header,
                [],
            )
            if call.creation is not None:
                running.owned = running.scope.owned  # type: ignore[attr-defined]
        worker.running.append(running)
        self.note(f"w{rank} takes up {call}")
        return True

    def _drop_call(
        self, worker: Worker, caller: int, call: Call, unread_from: int | None
    ) -> None:
        """A call is not read: its deadline has passed, or an object in it is broken."""
        self.note(f"w{worker.rank} does not read {call}, from {unread_from}")
        peer, service = worker.agent.find(caller), worker.service
        self.seen["unread call"] += 1
        unpacked: list[Any] = []
        if not call.is_given_up:
            for packed in call.packed[:unread_from]:
                unpacked.append(service.unpack(packed, peer))
        self._creation_failed(call)
        service.discarded(DecodeError("broken"))
        if call.header is not None:
            service.dropped_call(peer, call.id, call.header, DecodeError("broken"))
        unpacked.clear()
        self._answer(worker, caller, Reply(call.id, False, error=DecodeError("broken")))

    def can_run(self, running: Running) -> bool:
        outcome = None
        if running.call.fetched is not None and running.owned is not None:
            outcome = running.owned.outcome
        return all(u.confirmation.done for u in running.unconfirmed) and (
            outcome is None or outcome.done
        )

    def run(self, rank: int, index: int, picks: list[int], keep: bool = True) -> bool:
        """A handler that need not wait runs, and returns some references or fails."""
        worker = self.workers[rank]
        able = [r for r in worker.running if self.can_run(r)]
        if not able:
            return False
        running = able[index % len(able)]
        call = running.call
        if call.fetched is not None and running.owned is None:
            try:
                running.owned = worker.service.find(call.fetched)
            except OwnerLost as problem:
                worker.running.remove(running)
                reply = Reply(call.id, False, error=problem)
                self._answer(worker, running.caller, reply)
                return True
            if not self.can_run(running):
                self.seen["awaited value"] += 1
                return True
        worker.running.remove(running)
        self.note(f"w{rank} runs {call}")
        errors = [u.confirmation.error for u in running.unconfirmed]
        if any(errors):
            running.handles.clear()
            cause = next(filter(None, errors))
            self._creation_failed(call)
            reply = Reply(call.id, False, error=cause)
            if running.owned is not None and running.scope is not None:
                running.scope.keep(None, cause)  # the error is the value's
                reply = Reply(call.id, True)
            elif running.scope is not None:
                running.scope.failed(cause)
            self._answer(worker, running.caller, reply)
            return True
        if call.fetched is not None:
            assert running.owned is not None
            error = running.owned.outcome.error
            reply = Reply(call.id, error is None, error=error)
            self._answer(worker, running.caller, reply)
            return True
        if keep:
            worker.handles += running.handles
        running.handles.clear()
        if running.owned is not None:
            assert running.scope is not None
            running.scope.keep(self._new_value(), None)
            self.made.add(running.owned.id)
            self._answer(worker, running.caller, Reply(call.id, True))
            return True
        self._return(worker, running, self._pick(worker, picks))
        return True

    def _return(self, worker: Worker, running: Running, handles: list[Handle]) -> None:
        service, peer = worker.service, worker.agent.find(running.caller)
        reply = Reply(running.call.id, True)
        for handle in handles:
            reply.packed.append(service._pack(handle, peer))
        scope = running.scope
        if reply.packed and scope is None:
            scope = service.packed_reply(peer)
        if scope is not None:
            reply.header = scope.sending_reply([], set()).header
        self._answer(worker, running.caller, reply)

    def _answer(self, worker: Worker, caller: int, reply: Reply) -> None:
        worker.ready.append(Ready(caller, reply))

    def _get_answer(self, worker: Worker, source: int, reply: Reply) -> None:
        pending = worker.pending.pop(reply.id, None)
        peer, service = worker.agent.find(source), worker.service
        if pending is None:
            if reply.header is not None:
                self.seen["unread result"] += 1
                service.dropped_reply(peer, reply.id, reply.header)
            return
        note = pending.note
        if not reply.has_value:
            self._check_failure(worker, pending, reply)
            if note is not None:
                assert reply.error is not None
                note.failed(was_sent=True, error=reply.error)
            return
        if reply.unread_from is not None and reply.header is not None:
            self.seen["unread result"] += 1
            unpacked = [
                service.unpack(packed, peer)
                for packed in reply.packed[: reply.unread_from]
            ]
            service.discarded(DecodeError("broken"))
            service.dropped_reply(peer, reply.id, reply.header)
            unpacked.clear()
            if note is not None:
                note.failed(was_sent=True, error=DecodeError("broken"))
            return
        for packed in reply.packed:
            worker.handles.append(service.unpack(packed, peer))
        if reply.header is not None or note is not None:
            service.received_reply(peer, reply.id, "f", note, reply.header, [])

    def _check_failure(self, worker: Worker, pending: Pending, reply: Reply) -> None:
        """A fetch fails only if the value cannot be there."""
        fetched = pending.call.fetched
        if fetched is None or fetched in self.failed or self.seen["death"]:
            return
        self.fail(f"w{worker.rank} cannot fetch {fetched}: {reply.error!r}")

    # --------------------------------------------------------------------- the claims

    def check(self) -> None:
        """What must hold at every moment."""
        for worker in self.workers:
            if not worker.is_alive:
                continue
            held = [*worker.handles, *(p.keeps for p in worker.pending.values())]
            for running in worker.running:
                held += running.handles
            for handle in held:
                if handle is not None and isinstance(handle._ref, User):
                    self._check_user(worker, handle._ref)
        for fork, number in self.deletions.items():
            if number > 1:
                self.fail(f"{fork} was deleted {number} times")

    def _check_user(self, worker: Worker, ref: User) -> None:
        owner = self.workers[ref.owner.id]
        error = ref.confirmation.error
        if not owner.is_alive or worker.agent.find(owner.rank).fate is not None:
            return
        if error is not None:
            if ref.id not in self.failed and not self.seen["death"]:
                self.fail(f"{ref.fork} on w{worker.rank} failed: {error!r}")
            return
        if ref.id in self.failed:
            return  # whether there is a value is anybody's guess
        forks = owner.table.forks.get(ref.id, {})
        if ref.confirmation.done:
            if forks.get(ref.fork) != worker.rank:
                self.fail(f"w{owner.rank} does not know {ref.fork} of w{worker.rank}")
        elif not self.seen["death"] and ref.id in self.made and not forks:
            self.fail(f"w{owner.rank} has dropped {ref.id}, w{worker.rank} holds it")

    def finish(self) -> None:
        """Lets everything come to its end; then nothing must be left of anything."""
        self._settle()
        self.check()
        for worker in self.workers:
            worker.handles.clear()
        self._settle()
        self.check()
        for worker in self.workers:
            if not worker.is_alive:
                continue
            service = worker.service
            counts = {k: v for k, v in service.debug_info().items() if v}
            if counts or service._owned or service._users:
                self.fail(
                    f"w{worker.rank} still has {counts}, {list(service._owned)}, "
                    f"{list(service._users)}, {worker.table.users}, {worker.table.forks}"
                )
            if worker.pending or worker.running:
                self.fail(f"w{worker.rank} waits: {worker.pending}, {worker.running}")
        self._check_values()

    def _check_values(self) -> None:
        if not all(worker.is_alive for worker in self.workers):
            return  # what the dead had, they still have
        if any(ref() is not None for ref in self.values):
            gc.collect()
        if alive := [ref() for ref in self.values if ref() is not None]:
            self.fail(f"{len(alive)} values are alive")

    def _settle(self) -> None:
        """Programs do nothing more; all that is under way arrives."""
        for _ in range(10_000):
            if not self._settle_one():
                return
        self.fail("it does not come to an end")

    def _settle_one(self) -> bool:
        did = False
        for pair in self.busy_links():
            did = self.deliver(pair) or did
        for worker in self.workers:
            if worker.is_alive:
                rank = worker.rank
                did = self.encode(rank, 0) or did
                did = self.send(rank, 0) or did
                did = self.decode(rank, 0) or did
                did = self.run(rank, 0, [], keep=False) or did
                did = self.work_off(rank) or did
        return did

    def _new_value(self) -> Value:
        value = Value()
        self.values.append(weakref.ref(value))
        return value

    def note(self, text: str) -> None:
        self.log.append(text)

    def fail(self, text: str) -> None:
        raise Failed("\n".join([*self.log, text]))


def _text(handle: Handle) -> str:
    ref = handle._ref
    return f"{ref.fork} of {ref.id}" if isinstance(ref, User) else f"own {ref.id}"


# ------------------------------------------------------------------------ random runs


def simulate(seed: int, setting: Setting) -> Simulation:
    """One run that a seed decides; a failure names the seed and all that happened."""
    chance = random.Random(seed)
    simulation = Simulation(setting)
    # Connections and pools that hold many things up, so that others overtake them.
    slow: set[object] = {pair for pair in simulation.links if chance.random() < 0.3}
    slow |= {w.rank for w in simulation.workers if chance.random() < 0.4}
    try:
        for _ in range(setting.num_steps):
            _step(simulation, chance, slow)
            simulation.check()
        simulation.finish()
    except (Failed, GradwireError, LookupError) as error:
        raise Failed(f"seed {seed}, {setting}: {error!r}\n{error}") from error
    return simulation


def _step(simulation: Simulation, chance: random.Random, slow: set[object]) -> None:
    setting = simulation.setting
    alive = [worker.rank for worker in simulation.workers if worker.is_alive]
    rank = chance.choice(alive)
    worker = simulation.workers[rank]
    picks = [chance.randrange(100) for _ in range(chance.choice((0, 1, 1, 2)))]
    breaks = setting.breaking and chance.random() < 0.2
    number = chance.randrange(3)
    things: list[tuple[int, Callable[[], object]]] = [
        (8, lambda: _deliver(simulation, chance, slow)),
        (2, lambda: simulation.encode(rank, number, 1 if breaks else None)),
        (3, lambda: simulation.send(rank, number, is_refused=breaks)),
        (4, lambda: simulation.run(rank, number, picks, chance.random() < 0.7)),
        (2, lambda: simulation.work_off(rank)),
        (2, lambda: simulation.drop(rank, chance.randrange(100))),
    ]
    if rank not in slow or chance.random() < SLOWNESS:
        unread_from = number if breaks else None
        things.append((3, lambda: simulation.decode(rank, number, unread_from)))
    if len(worker.handles) < MAX_HANDLES:
        to = chance.choice(alive)
        kind = chance.choice(("remote", "send", "fetch"))
        things += [
            (1, lambda: simulation.share(rank)),
            (4, lambda: simulation.begin(rank, to, kind, picks)),
        ]
    if setting.breaking:
        things.append((1, lambda: simulation.give_up(rank, number)))
    if setting.dying and chance.random() < DYING:
        things = [(1, lambda: simulation.kill(rank, number))]
    # Something that can be done, if there is anything.
    for _ in range(5):
        weights = [weight for weight, _ in things]
        _, thing = chance.choices(things, weights)[0]
        if thing():
            return


def _deliver(simulation: Simulation, chance: random.Random, slow: set[object]) -> bool:
    links = simulation.busy_links()
    if not links:
        return False
    pair = chance.choice(links)
    if pair in slow and chance.random() > SLOWNESS:
        return False
    if simulation.setting.breaking and chance.random() < 0.1:
        for message in simulation.links[pair]:
            if isinstance(message, Reply) and message.packed:
                message.unread_from = chance.randrange(len(message.packed) + 1)
    return simulation.deliver(pair, chance.randrange(4))
