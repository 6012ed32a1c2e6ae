"""Workers that follow the pass protocol over a simulated network, step by step.

A run is a program in one context: workers call each other, and start passes. At each
step chance picks one of the things that could happen next: a connection delivers its
next message, a thread of a pool takes up a request, an engine executes a node, a program
makes a call, a handler returns, somebody starts a pass, something breaks. When nothing
can happen any more the run is over, and whoever is still in a pass will be for ever.

What is simulated is what surrounds the protocol: the runtime, as in
`gradwire.autograd._exchange`, and the local engine. A gradient is a number of paths from
the loss, or none.

*The engine.* A part of a pass is one thread. It executes events that the pass covers, each
once. The token makes a recv wait for all later recvs, and a send for all later recvs; data
makes a recv wait for the sends that were computed from it. A send that has no answer blocks
the thread.

*The network.* One connection for each ordered pair of workers; each keeps its order, some
are slow. With ``overtaking``, requests (calls and starts of passes) are handed to a pool,
which takes them up in any order, after whatever has come behind them.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradwire.autograd._passes import (
    NONE,
    WAIT,
    ContextState,
    Instruction,
    Pass,
    PassId,
    PassKind,
    TellAbort,
    TellDead,
    TellDone,
    TellNone,
    TellStale,
    TellStart,
)
from gradwire.errors import BackwardFailed

__all__ = ["Failed", "Setting", "Simulation", "simulate"]

MAX_STEPS = 20_000
MODULUS = 1_000_003
INTO_GRAD, THROUGH = 0, 2


@dataclass(frozen=True)
class Setting:
    """What may happen in a run.

    Attributes:
        overtaking: Requests and other messages of one connection overtake each other.
        traffic: Calls are made before, during and after passes, not only between them.
        rivals: Passes are started while others run.
        dropped: Share of calls and replies that are dropped on their way.
        copied: Share of the protocol's own messages that come twice.
        failing: Chance that a part of a pass fails, at each step.
        dying: Workers die.
        consuming: Share of passes that do not retain the graph.
        differentiable: Share of the others that are differentiable themselves.
    """

    overtaking: bool = False
    traffic: bool = False
    rivals: bool = False
    dropped: float = 0.0
    copied: float = 0.0
    failing: float = 0.0
    dying: bool = False
    consuming: float = 0.5
    differentiable: float = 0.3

    @property
    def is_calm(self) -> bool:
        """Whether no pass has a reason to fail, but that what it needs is consumed."""
        return not (self.rivals or self.failing or self.dying)


class Failed(AssertionError):
    """The protocol did something wrong."""


# ---------------------------------------------------------------------------- messages


class Call(NamedTuple):
    """A request of a program. Without a number it has no history."""

    number: int | None
    after: PassId | None
    consumed: int


class Reply(NamedTuple):
    """The end of a call: a value with a history, or without one."""

    number: int | None
    after: PassId | None
    is_taken: bool = True


class Answer(NamedTuple):
    """The gradients of a message, or none; maybe a message with a history itself."""

    pass_id: PassId
    number: int
    value: Any
    is_last: bool
    history: int | None = None
    after: PassId | None = None


class Start(NamedTuple):
    pass_id: PassId
    kind: PassKind
    answer: Answer | None = None


class Done(NamedTuple):
    pass_id: PassId


class Abort(NamedTuple):
    pass_id: PassId
    cause: Any


class Dead(NamedTuple):
    number: int


class Stale(NamedTuple):
    number: int


class End(NamedTuple):
    """The other end of the connection is gone."""


REQUESTS = (Call, Start)
OF_THE_PROTOCOL = (Start, Done, Abort, Answer, Dead)


@dataclass(eq=False)
class Link:
    """A connection, in one direction: its messages, and whether they are copies."""

    source: int
    target: int
    is_slow: bool
    queue: deque[tuple[Any, bool]] = field(default_factory=deque)


# ------------------------------------------------------------------------------ workers


class Event(NamedTuple):
    """A send or a recv on one worker.

    Attributes:
        number: Of the event.
        is_recv: Which of the two.
        peer: The other worker.
        message: Number of the send, there or here.
        sources: Of a send: the recvs that its tensors were computed from.
        is_stale: Of a recv: its send was consumed while the message was under way.
    """

    number: int
    is_recv: bool
    peer: int
    message: int
    sources: tuple[int, ...] = ()
    is_stale: bool = False


class Run:
    """A worker's part of a pass, as the engine executes it.

    Attributes:
        covered: All events of the pass.
        sends: Those that may be executed now.
        rest: What the latest recv that is left holds up, and itself at the end.
        blocked: The send that the thread waits in.
    """

    def __init__(self, worker: Worker, pass_: Pass, covered: list[Event]) -> None:
        self.worker = worker
        self.pass_ = pass_
        self.kind = pass_.kind
        self.covered = covered
        self.sends: list[Event] = []
        self.rest: list[Event] = []
        self.blocked: Event | None = None
        self.is_executed = False
        self.has_failed = False
        self._unfinished: Counter[int] = Counter()
        self._sums: dict[int, int] = {}

    def load(self, events: list[Event], loss: dict[int, int]) -> None:
        """Makes the part ready to be executed."""
        if self.kind.destination == THROUGH:
            # The engine leaves out what leads to nothing that is asked for.
            events = [event for event in events if event.is_recv or event.sources]
        self.rest = list(events)
        self._sums = dict(loss)
        for event in events:
            self._unfinished.update(event.sources)
        self._release_sends()

    def take_recv(self) -> Event:
        """The latest recv that is left."""
        recv = self.rest.pop()
        self._release_sends()
        return recv

    def next_event(self, chance: random.Random) -> Event | None:
        """Takes out what the engine executes next; None if all is done."""
        recv = self.rest[-1] if self.rest else None
        is_free = recv is not None and not self._unfinished[recv.number]
        if is_free and (not self.sends or chance.random() < 0.5):
            return self.take_recv()
        if not self.sends:
            if recv is not None:
                raise AssertionError("the engine has nothing to execute")
            return None
        # Torch's engine prefers what was recorded last; it need not.
        index = 0 if chance.random() < 0.5 else chance.randrange(len(self.sends))
        return self.sends.pop(index)

    def finish_send(self, event: Event, value: Any) -> None:
        """The gradient of what was sent is there."""
        for source in event.sources:
            self._unfinished[source] -= 1
            if value is not NONE:
                self._sums[source] = (self._sums.get(source, 0) + value) % MODULUS

    def gradient(self, recv: Event) -> Any:
        """The complete sum, when everything that contributes has been executed."""
        return self._sums.get(recv.number, NONE)

    def waits_in(self, number: int) -> bool:
        """Whether the thread waits for the answer to this send."""
        return self.blocked is not None and self.blocked.number == number

    def _release_sends(self) -> None:
        while self.rest and not self.rest[-1].is_recv:
            self.sends.append(self.rest.pop())


class Worker:
    """A worker's side of the context, and what the runtime around it does."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation = simulation
        self.rank = rank
        self.state = ContextState(rank)
        self.is_alive = True
        self.has_joined = False
        self.chain: list[Event] = []
        self.run: Run | None = None
        self.lost: set[int] = set()
        self.calls: Counter[int] = Counter()  # of ours, in flight, by callee
        self.dead: set[int] = set()
        self.stale: set[tuple[int, int]] = set()  # senders and numbers

    def __repr__(self) -> str:
        return f"w{self.rank}"

    # --------------------------------------------------------------------- recording

    def record_send(
        self, peer: int, sources: tuple[int, ...]
    ) -> tuple[int, PassId | None]:
        self.state.meet(peer)
        number = self.state.record_send(peer)
        self.chain.append(Event(number, False, peer, number, sources))
        return number, self.state.begun

    def record_recv(self, peer: int, message: int, after: PassId | None) -> Event:
        self.state.meet(peer)
        number, is_stale, answers = self.state.record_recv(peer, message, after)
        event = Event(number, True, peer, message, is_stale=is_stale)
        self.chain.append(event)
        if answers:
            when = "after" if self.run is None else "during"
            self.simulation.seen[f"straggler {when} a pass"] += 1
        self.perform(None, answers)
        return event

    def some_recvs(self) -> tuple[int, ...]:
        """Recvs of the present chain that something is computed from."""
        recvs = [event.number for event in self.chain if event.is_recv]
        chance = self.simulation.chance
        if not recvs or chance.random() < 0.1:
            return ()
        picked = chance.choices(recvs, k=chance.randint(0, 2))
        return tuple(sorted({*picked, recvs[-1]}))

    def mark_dead(self, number: int) -> None:
        self.simulation.log(f"{self}: message {number} is dead")
        self.dead.add(number)
        self.state.mark_dead(number)
        run = self.run
        if run is not None and run.waits_in(number):
            self.simulation.seen["death of a message that is waited for"] += 1
            self.take(run, run.blocked, NONE)

    def mark_stale(self, sender: int, message: int) -> None:
        """A message that we got is gone at its sender."""
        self.simulation.log(f"{self}: message {message} of w{sender} is stale")
        self.stale.add((sender, message))
        run = self.run
        if run is not None and self.state.is_in_vain(sender, message):
            self.simulation.note_consumed(f"{self}: {message} of w{sender} is stale")
            self.fail(run.pass_.id, "a gradient was sent in vain")

    # ------------------------------------------------------------------------ passes

    def start(self, kind: PassKind, *, is_plain: bool) -> None:
        """What `backward` does, or the first recv of a plain one."""
        simulation = self.simulation
        chance = simulation.chance
        try:
            pass_, instructions = self.state.start(kind)
        except BackwardFailed:
            simulation.seen["second pass of a worker"] += 1
            if simulation.setting.is_calm:
                simulation.report(f"{self}: refused at once")
            return
        run = self._begin(pass_)
        recvs = [event.number for event in run.covered if event.is_recv]
        loss = {
            number: chance.randint(1, 9) for number in recvs if chance.random() < 0.4
        }
        simulation.log(
            f"{self}: starts {_name(pass_.id)}, {kind} {is_plain=}, "
            f"events {pass_.first} to {pass_.end}, loss {loss}"
        )
        simulation.note_start(run, loss)
        events = run.covered
        if is_plain and loss:
            # The engine reaches what the loss does. The latest recv of that comes first:
            # its node starts the pass, and the chain leads to all before it.
            events = [event for event in events if event.number <= max(loss)]
            instructions += [
                TellNone(event.peer, pass_.id, event.message, not kind.retain)
                for event in run.covered
                if event.is_recv and event.number > max(loss)
            ]
        run.load(events, loss)
        if is_plain and loss:
            self.ship(run, run.take_recv(), instructions)
        self.perform(run, instructions)

    def on_start(self, sender: int, message: Start) -> None:
        simulation = self.simulation
        pass_id = message.pass_id
        self.has_joined = True
        if message.answer is not None:
            self.on_answer(sender, message.answer)
        is_new = pass_id.number > self.state.latest.get(pass_id.starter, -1)
        pass_, instructions = self.state.on_start(pass_id, sender, message.kind)
        if any(isinstance(i, TellAbort) for i in instructions):
            simulation.seen["rivals meet" if is_new else "start after abort"] += 1
        run = None
        if pass_ is not None:
            run = self._begin(pass_)
            simulation.log(
                f"{self}: begins {_name(pass_id)}, events {pass_.first} to {pass_.end}"
            )
            run.load(run.covered, {})
        self.perform(run, instructions)

    def _begin(self, pass_: Pass) -> Run:
        if self.run is not None:
            raise AssertionError("a part begins while another one runs")
        if self.simulation.is_under_way(self.rank, Call):
            self.simulation.seen["start before a call"] += 1
        run = self.run = Run(self, pass_, list(self.chain))
        numbers = [event.number for event in run.covered]
        if numbers != list(range(pass_.first, pass_.end)):
            self.simulation.report(f"{self}: the pass does not cover the chain")
        if not pass_.kind.retain:
            self.chain = []
        self.simulation.note_begin(run)
        return run

    def advance(self, run: Run) -> None:
        """The engine executes a node."""
        event = run.next_event(self.simulation.chance)
        if event is None:
            self.simulation.log(f"{self}: is through")
            run.is_executed = True
            instructions = self.state.local_end()
            self._settle(run)
            self.perform(run, instructions)
        elif event.is_recv:
            self.ship(run, event, [])
        else:
            answer = self.state.take_answer(event.number)
            if answer is WAIT:
                self.simulation.log(f"{self}: waits in send {event.number}")
                run.blocked = event
            else:
                self.take(run, event, answer)

    def take(self, run: Run, event: Event | None, answer: Any) -> None:
        """A send has its answer."""
        if event is None:
            raise AssertionError("nobody waits")
        run.blocked = None
        value = NONE
        if answer is not NONE:
            value = answer.value
            if answer.history is not None:
                self.simulation.seen["gradient with a history"] += 1
                self.record_recv(event.peer, answer.history, answer.after)
        self.simulation.note_taken(run, event, value)
        run.finish_send(event, value)

    def ship(self, run: Run, event: Event, instructions: list[Instruction]) -> None:
        """A recv's node sends the gradient back."""
        simulation = self.simulation
        pass_id = run.pass_.id
        value = run.gradient(event)
        is_stale = event.is_stale or (event.peer, event.message) in self.stale
        if is_stale and value is not NONE:
            simulation.note_consumed(f"{self}: recv {event.number} is stale")
            self.fail(pass_id, "a gradient reached what is stale")
            return
        history, after = None, None
        is_tracked = run.kind.create_graph and value is not NONE
        if is_tracked and simulation.chance.random() < 0.7:
            history, after = self.record_send(event.peer, self.some_recvs())
        answer = Answer(
            pass_id, event.message, value, not run.kind.retain, history, after
        )
        simulation.note_answer(answer, event.peer)
        if value is not NONE:
            self.state.note_shipped(event.peer, event.message)
        start = TellStart(event.peer)
        if event.peer == self.rank:
            self.on_answer(self.rank, answer)
        elif start in instructions:
            instructions.remove(start)
            if not simulation.send(self, event.peer, Start(pass_id, run.kind, answer)):
                self.fail(pass_id, f"w{event.peer} cannot be told")
        else:
            simulation.send(self, event.peer, answer)

    def on_answer(self, sender: int, answer: Answer) -> None:
        simulation = self.simulation
        current = self.state.current
        is_over = answer.pass_id.number <= self.state.latest.get(
            answer.pass_id.starter, -1
        )
        if current is None or current.id != answer.pass_id:
            simulation.seen["late answer" if is_over else "early answer"] += 1
        is_wanted, instructions = self.state.on_answer(
            answer.pass_id,
            answer.number,
            NONE if answer.value is NONE else answer,
            answer.is_last,
            None if answer.history is None else (sender, answer.history),
        )
        if answer.number in self.state._dead:
            self.dead.add(answer.number)
        self.perform(None, instructions)
        run = self.run
        if is_wanted and run is not None and run.waits_in(answer.number):
            self.take(run, run.blocked, self.state.take_answer(answer.number))

    def on_done(self, sender: int, pass_id: PassId) -> None:
        run = self.run
        instructions = self.state.on_done(pass_id, sender)
        self._settle(run)
        self.perform(run, instructions)

    def _settle(self, run: Run | None) -> None:
        if run is None or self.run is not run or self.state.current is run.pass_:
            return
        self.run = None
        self.simulation.note_end(run)

    def fail(self, pass_id: PassId, cause: Any, sender: int | None = None) -> None:
        run = self.run
        recvs = []
        if run is not None and run.pass_.id == pass_id:
            run.has_failed = True
            recvs = [(e.peer, e.message) for e in run.covered if e.is_recv]
        instructions = self.state.fail(pass_id, cause, sender, recvs)
        self._settle(run)
        self.perform(run, instructions)

    def on_end(self, peer: int) -> None:
        """A connection has ended: the worker there is lost."""
        self.lost.add(peer)
        del self.calls[peer]
        run = self.run
        instructions = self.state.lose(peer, f"w{peer} is lost")
        if run is not None and self.state.current is not run.pass_:
            self.simulation.seen["death of a worker in a pass"] += 1
            run.has_failed = True
        self._settle(run)
        self.perform(run, instructions)

    def perform(self, run: Run | None, instructions: Any) -> None:
        simulation = self.simulation
        for instruction in instructions:
            to = instruction.to
            if isinstance(instruction, TellStart):
                if run is None:
                    raise AssertionError("a pass begins that nobody runs")
                if not simulation.send(self, to, Start(run.pass_.id, run.kind)):
                    self.fail(run.pass_.id, f"w{to} cannot be told")
            elif isinstance(instruction, TellDone):
                simulation.send(self, to, Done(instruction.pass_id))
            elif isinstance(instruction, TellAbort):
                simulation.send(self, to, Abort(instruction.pass_id, instruction.cause))
            elif isinstance(instruction, TellDead):
                if to == self.rank:
                    self.mark_dead(instruction.message)
                else:
                    simulation.send(self, to, Dead(instruction.message))
            elif isinstance(instruction, TellStale):
                if to == self.rank:
                    self.mark_stale(to, instruction.message)
                else:
                    simulation.send(self, to, Stale(instruction.message))
            elif isinstance(instruction, TellNone):
                _, pass_id, message, is_last = instruction
                answer = Answer(pass_id, message, NONE, is_last)
                simulation.note_answer(answer, to)
                if to == self.rank:
                    self.on_answer(to, answer)
                else:
                    simulation.send(self, to, answer)
            else:
                raise AssertionError(f"the simulator does not know {instruction}")


# --------------------------------------------------------------------------- simulation


@dataclass(eq=False)
class Record:
    """A pass, for somebody who sees everything.

    Attributes:
        expected: The right answers, by rank and number of the send, if they are known.
    """

    id: PassId
    runs: list[Run] = field(default_factory=list)
    has_succeeded: bool = False
    expected: dict[tuple[int, int], Any] | None = None


class Simulation:
    """One run.

    Args:
        seed: Decides about everything.
        setting: What may happen.
        trace: Whether to write down what happens.

    Attributes:
        seen: How often the situations occurred that the runs are made for.
    """

    def __init__(self, seed: int, setting: Setting, *, trace: bool = False) -> None:
        self.seed = seed
        self.setting = setting
        self.chance = chance = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.num_steps = 0
        self.records: dict[PassId, Record] = {}
        # By pass, rank and number of the send.
        self.answers: Counter[tuple[PassId, int, int]] = Counter()
        self.gradients: dict[tuple[PassId, int, int], Any] = {}
        self.taken: dict[tuple[PassId, int, int], Any] = {}
        self._trace: list[str] | None = [] if trace else None
        size = chance.choice([2, 2, 3, 3, 4, 5, 6])
        self.workers = [Worker(self, rank) for rank in range(size)]
        self.workers[0].has_joined = True
        self._links = {
            (a, b): Link(a, b, chance.random() < 0.3)
            for a in range(size)
            for b in range(size)
        }
        self._pool: list[tuple[Worker, int, Any]] = []
        self._handlers: list[tuple[Worker, int, Event | None]] = []
        self._calls_left = 0
        self._passes_left = 0
        self._deaths_left = 0
        self._is_silent = False  # nobody makes calls
        self._is_safe = False  # nothing breaks any more
        self._was_consumed = False  # a pass had to fail for what others had consumed

    # ---------------------------------------------------------------------- the run

    def run(self) -> None:
        """A program, and then a pass by each worker in turn."""
        chance, setting = self.chance, self.setting
        if setting.dying:
            self._deaths_left = chance.randint(1, len(self.workers) - 1)
        for _ in range(chance.randint(1, 3)):
            self._calls_left = chance.randint(1, 8)
            if not setting.traffic:
                self._settle()
            self._is_silent = not setting.traffic
            self._passes_left = chance.randint(1, 3)
            self._settle()
            self._is_silent = False
        self._deaths_left, self._is_silent, self._is_safe = 0, True, True
        for worker in chance.sample(self.workers, len(self.workers)):
            if self._may_start(worker):
                self._start(worker)
                self._settle()
        self._check_answers()
        self._check_states()

    def _settle(self) -> None:
        """Goes on until nothing can happen any more."""
        while self._step():
            self.num_steps += 1
            if self.num_steps > MAX_STEPS:
                self.report("it never ends")
        stuck = [w for w in self.workers if w.is_alive and w.state.current is not None]
        if stuck:
            self.report("\n".join(["they wait for ever:", *map(_describe, stuck)]))

    def _step(self) -> bool:
        """One thing happens; False if there is nothing left."""
        chance = self.chance
        options: list[tuple[Any, ...]] = []
        slow: list[tuple[Any, ...]] = []
        for link in self._links.values():
            if link.queue:
                (slow if link.is_slow else options).append((self._deliver, link))
        options += [(self._take_up, index) for index in range(len(self._pool))]
        options += [(self._return, index) for index in range(len(self._handlers))]
        active = [w.run for w in self.workers if w.run is not None]
        options += [
            (run.worker.advance, run)
            for run in active
            if run.blocked is None and not run.is_executed
        ]
        if self._calls_left:
            options.append((self._call,))
        if self._passes_left and (self.setting.rivals or not active):
            options.append((self._start_somewhere,))
        if slow and (not options or chance.random() < 0.1):
            options = slow
        if not options:
            self._passes_left = 0
            return False
        if not self._is_safe and self._break(active):
            return True
        action, *arguments = chance.choice(options)
        action(*arguments)
        return True

    def _break(self, active: list[Run]) -> bool:
        chance = self.chance
        if active and chance.random() < self.setting.failing:
            run = chance.choice(active)
            self.log(f"{run.worker}: its part fails")
            is_starter = run.pass_.id.starter == run.worker.rank
            self.seen["failure at the starter" if is_starter else "failure"] += 1
            run.worker.fail(run.pass_.id, f"{run.worker} failed")
            return True
        if self._deaths_left and chance.random() < 0.03:
            self._die()
            return True
        return False

    # --------------------------------------------------------------------- programs

    def _call(self) -> None:
        self._calls_left -= 1
        chance = self.chance
        callers = [w for w in self.workers if w.is_alive and w.has_joined]
        if not callers:
            return
        caller = chance.choice(callers)
        rank = chance.randrange(len(self.workers))
        if rank == caller.rank and chance.random() < 0.7:
            rank = (rank + 1) % len(self.workers)
        if rank in caller.lost:
            return
        number, after = None, caller.state.begun
        if chance.random() < 0.8:
            number, after = caller.record_send(rank, caller.some_recvs())
            if chance.random() < self.setting.dropped / 2:
                self.log(f"{caller}: call {number} of w{rank} is not sent")
                caller.mark_dead(number)
                return
        caller.state.meet(rank)
        caller.calls[rank] += 1
        self.send(caller, rank, Call(number, after, caller.state.consumed_by))

    def _on_call(self, worker: Worker, sender: int, call: Call) -> None:
        if self.chance.random() < self.setting.dropped:
            self.log(f"{worker}: drops call {call.number} of w{sender}")
            if call.number is not None:
                self.send(worker, sender, Dead(call.number))
            self.send(worker, sender, Reply(None, None))
            return
        worker.has_joined = True
        worker.state.join(sender, call.after, call.consumed)
        worker.state.meet(sender)
        event = None
        if call.number is not None:
            event = worker.record_recv(sender, call.number, call.after)
        self._handlers.append((worker, sender, event))

    def _return(self, index: int) -> None:
        """A handler returns."""
        worker, caller, event = self._handlers.pop(index)
        if not worker.is_alive or caller in worker.lost:
            return
        number, after = None, None
        if self.chance.random() < 0.8:
            sources = set(worker.some_recvs())
            if event in worker.chain:
                sources.add(event.number)
            number, after = worker.record_send(caller, tuple(sorted(sources)))
        is_taken = self.chance.random() >= self.setting.dropped
        self.send(worker, caller, Reply(number, after, is_taken))

    def _on_reply(self, worker: Worker, sender: int, reply: Reply) -> None:
        worker.calls[sender] -= 1
        if reply.number is None:
            return
        if reply.is_taken:
            worker.record_recv(sender, reply.number, reply.after)
        else:
            self.log(f"{worker}: drops reply {reply.number} of w{sender}")
            self.send(worker, sender, Dead(reply.number))

    def _start_somewhere(self) -> None:
        self._passes_left -= 1
        able = [worker for worker in self.workers if self._may_start(worker)]
        if able:
            self._start(self.chance.choice(able))

    def _may_start(self, worker: Worker) -> bool:
        return worker.is_alive and worker.has_joined and worker.state.broken is None

    def _start(self, worker: Worker) -> None:
        chance, setting = self.chance, self.setting
        retain = chance.random() >= setting.consuming
        create_graph = retain and chance.random() < setting.differentiable
        destination = THROUGH if chance.random() < 0.2 else INTO_GRAD
        is_plain = chance.random() < 0.4
        if not is_plain and worker.calls.total():
            return  # an explicit one waits for its calls
        worker.start(PassKind(destination, retain, create_graph), is_plain=is_plain)

    def _die(self) -> None:
        self._deaths_left -= 1
        alive = [worker for worker in self.workers if worker.is_alive]
        worker = self.chance.choice(alive)
        self.log(f"{worker}: dies")
        worker.is_alive, worker.run = False, None
        self._pool = [entry for entry in self._pool if entry[0] is not worker]
        for other in alive:
            self._links[other.rank, worker.rank].queue.clear()
            if other is not worker:
                queue = self._links[worker.rank, other.rank].queue
                for _ in range(self.chance.randint(0, len(queue))):
                    queue.pop()
                queue.append((End(), True))

    # ---------------------------------------------------------------------- network

    def send(self, worker: Worker, to: int, message: Any) -> bool:
        """Sends a message; False if the sender knows that nobody is there."""
        if to in worker.lost:
            return False
        self.log(f"{worker} -> w{to}: {message}")
        if self.workers[to].is_alive:
            self._links[worker.rank, to].queue.append((message, False))
        return True

    def is_under_way(self, to: int, kind: type) -> bool:
        """Whether such a message is on its way to a worker."""
        return any(
            isinstance(message, kind)
            for link in self._links.values()
            if link.target == to
            for message, _ in link.queue
        ) or any(w.rank == to and isinstance(m, kind) for w, _, m in self._pool)

    def _deliver(self, link: Link) -> None:
        message, is_copy = link.queue.popleft()
        worker = self.workers[link.target]
        if not is_copy and self.chance.random() < self.setting.copied:
            # A message with a history is never sent twice: it would be two.
            history = getattr(getattr(message, "answer", message), "history", None)
            if isinstance(message, OF_THE_PROTOCOL) and history is None:
                link.queue.append((message, True))
        if self.setting.overtaking and isinstance(message, REQUESTS):
            self._pool.append((worker, link.source, message))
        else:
            self._receive(worker, link.source, message)

    def _take_up(self, index: int) -> None:
        self._receive(*self._pool.pop(index))

    def _receive(self, worker: Worker, sender: int, message: Any) -> None:
        self.log(f"{worker} <- w{sender}: {message}")
        match message:
            case Answer():
                worker.on_answer(sender, message)
            case Start():
                worker.on_start(sender, message)
            case Done():
                worker.on_done(sender, message.pass_id)
            case Abort():
                worker.fail(message.pass_id, message.cause, sender)
            case Dead():
                worker.mark_dead(message.number)
            case Stale():
                worker.mark_stale(sender, message.number)
            case Call():
                self._on_call(worker, sender, message)
            case Reply():
                self._on_reply(worker, sender, message)
            case End():
                worker.on_end(sender)

    # -------------------------------------------------------------------- judgement

    def note_start(self, run: Run, loss: dict[int, int]) -> None:
        """Works out the right answers, if everything has arrived."""
        if self._is_silent and self.setting.is_calm:
            record = self.records[run.pass_.id]
            record.expected = self._right_answers(run.worker, loss)

    def _right_answers(
        self, starter: Worker, loss: dict[int, int]
    ) -> dict[tuple[int, int], Any]:
        """Of each message: what the loss gives at its end, and what follows there."""
        chains = {w.rank: w.run.covered if w.run else w.chain for w in self.workers}
        ends = {
            (event.peer, event.message): (rank, event.number)
            for rank, chain in chains.items()
            for event in chain
            if event.is_recv
        }
        known: dict[tuple[int, int], Any] = {}

        def find(message: tuple[int, int]) -> Any:
            if message not in known:
                parts: list[Any] = []
                if message in ends:
                    rank, recv = ends[message]
                    parts = [
                        find((rank, event.number))
                        for event in chains[rank]
                        if recv in event.sources
                    ]
                    if rank == starter.rank:
                        parts.append(loss.get(recv, NONE))
                values = [part for part in parts if part is not NONE]
                known[message] = sum(values) % MODULUS if values else NONE
            return known[message]

        return {message: find(message) for message in ends}

    def note_begin(self, run: Run) -> None:
        pass_id = run.pass_.id
        record = self.records.setdefault(pass_id, Record(pass_id))
        if any(other.worker is run.worker for other in record.runs):
            self.report(f"{run.worker}: begins {_name(pass_id)} again")
        record.runs.append(run)

    def note_answer(self, answer: Answer, to: int) -> None:
        key = answer.pass_id, to, answer.number
        self.answers[key] += 1
        if answer.value is not NONE:
            self.gradients[key] = answer.value

    def note_taken(self, run: Run, event: Event, value: Any) -> None:
        rank = run.worker.rank
        self.log(f"{run.worker}: send {event.number} gets {value}")
        if (run.pass_.id, rank, event.number) in self.taken:
            self.report(f"{run.worker}: send {event.number} has two answers")
        self.taken[run.pass_.id, rank, event.number] = value
        expected = self.records[run.pass_.id].expected
        if expected is not None:
            right = expected.get((rank, event.number), NONE)
            if value != right:
                self.report(
                    f"{run.worker}: send {event.number} gets {value}, not {right}"
                )

    def note_consumed(self, text: str) -> None:
        """A pass has to fail, because what it needs was consumed by an earlier one."""
        self.log(text)
        self.seen["gradient for something consumed"] += 1
        self._was_consumed = True
        if not (self.setting.traffic or self.setting.rivals or self.setting.failing):
            self.report(f"{text}, but everything had arrived")

    def note_end(self, run: Run) -> None:
        name = _name(run.pass_.id)
        self.log(f"{run.worker}: {name} {'failed' if run.has_failed else 'is over'}")
        record = self.records[run.pass_.id]
        if run.has_failed and self.setting.is_calm and not self._was_consumed:
            self.report(f"{run.worker}: {name} failed, and nothing broke")
        if not run.has_failed and not run.is_executed:
            self.report(f"{run.worker}: {name} ended before its part")
        if run.pass_.id.starter == run.worker.rank:
            record.has_succeeded = not run.has_failed
            if record.has_succeeded and not all(r.is_executed for r in record.runs):
                self.report(f"{name} is over, and not everywhere")

    def _check_answers(self) -> None:
        for record in self.records.values():
            if not record.has_succeeded:
                continue
            for run in record.runs:
                if run.has_failed:
                    self.report(f"{_name(record.id)} succeeded, but not everywhere")
                for event in run.covered:
                    if not event.is_recv:
                        self._check_send(run, event)
        covered = {
            (record.id, run.worker.rank, event.number)
            for record in self.records.values()
            for run in record.runs
            for event in run.covered
        }
        for key, value in self.gradients.items():
            pass_id, rank, number = key
            if not self.records[pass_id].has_succeeded or self.taken.get(key) == value:
                continue
            # The engine may leave out what a pass covers.
            if self.workers[rank].is_alive and key not in covered:
                self.report(
                    f"the gradient of message {number} of w{rank} got lost in "
                    f"{_name(pass_id)}, and nobody was told"
                )

    def _check_send(self, run: Run, event: Event) -> None:
        """A send that a successful pass executes was answered once, others at most."""
        worker = run.worker
        key = run.pass_.id, worker.rank, event.number
        may_be_none = event.number in worker.dead or key not in self.taken
        count = self.answers[key]
        if count != 1 and not (count == 0 and may_be_none):
            self.report(
                f"send {event.number} of {worker} was answered {count} times in "
                f"{_name(run.pass_.id)}"
            )

    def _check_states(self) -> None:
        """What is kept is no more than what may be needed."""
        for worker in self.workers:
            if not worker.is_alive:
                continue
            state = worker.state
            for pass_id, answers in state._answers.items():
                if pass_id.number <= state.latest.get(pass_id.starter, -1):
                    self.report(f"{worker}: keeps answers of {_name(pass_id)}")
                for number, (answer, _) in answers.items():
                    if number < state.first and answer is NONE:
                        self.report(f"{worker}: keeps an answer to send {number}")
            if any(number < state.first for number in state._dead):
                self.report(f"{worker}: keeps dead messages that were consumed")
            if len(state._aborted) > len(self.workers):
                self.report(f"{worker}: keeps too many failed passes")

    def log(self, text: str) -> None:
        """Adds to the trace."""
        if self._trace is not None:
            self._trace.append(text)

    def report(self, problem: str) -> None:
        """Ends the run, with all that is known about it."""
        if self._trace is None:
            # Once more, and this time with a trace.
            Simulation(self.seed, self.setting, trace=True).run()
            raise AssertionError(f"a run was not repeatable: {problem}")
        trace = "\n".join(self._trace)
        raise Failed(f"{problem}\nseed {self.seed}, {self.setting}\n{trace}\n{problem}")


def simulate(seed: int, setting: Setting) -> Simulation:
    """A run; raises `Failed` if the protocol did something wrong."""
    simulation = Simulation(seed, setting)
    simulation.run()
    return simulation


def _name(pass_id: PassId) -> str:
    return f"pass {pass_id.number} of w{pass_id.starter}"


def _describe(worker: Worker) -> str:
    run = worker.run
    if run is None:
        return f"  {worker} in {worker.state.current}"
    text = f"  {worker} in {_name(run.pass_.id)}"
    if run.blocked is not None:
        text += f", in send {run.blocked.number} to w{run.blocked.peer}"
    return f"{text}, for {sorted(run.pass_.told)} whom it told"
