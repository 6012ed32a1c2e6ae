"""Leaves of others that are fetched by reference: no handler there, no wire node here."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autograd_functions as ag
import autograd_handlers as handlers
import functions
import rref_functions as fn
from autograd_functions import call, parameter
from gradwire import autograd, rpc
from gradwire.autograd import _fetched
from gradwire.autograd._api import current_exchange
from gradwire.autograd._functions import Recv
from gradwire.autograd._telling import Telling
from gradwire.errors import (
    CallTimeout,
    ForeignGraph,
    GraphConsumed,
    LocalProtocolError,
    OwnerLost,
)
from gradwire.rpc._api import current_agent
from gradwire.rpc._lookups import Lookups
from gradwire.wire import Outgoing, decode_control
from on_worker import on_worker
from rref_functions import own

pytestmark = pytest.mark.multiproc

LARGE = 130  # a square of doubles that does not fit into the head of a message


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from ag.clean(request)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# ----------------------------------------------------------------- what is called there


def own_parameter(name: str, *shape: int) -> Any:
    return own(parameter(name, *shape))


def own_value(name: str) -> Any:
    """Of what is kept here under a name."""
    return own(fn.kept[name])


def keep_value(name: str, value: Any) -> None:
    fn.kept[name] = value


def keep_transposed() -> None:
    fn.kept["value"] = torch.arange(6.0).reshape(2, 3).t().requires_grad_()


def computed() -> Tensor:
    return parameter("weight") * 2


def own_computed() -> Any:
    return own(computed())


def fetch(to: str, name: str, *shape: int) -> Tensor:
    fetched: Tensor = call(to, own_parameter, name, *shape).to_here()
    return fetched


def fetch_and_use(to: str, x: Tensor) -> Tensor:
    return torch.tanh(x @ fetch(to, "weight") + parameter("bias"))


# ------------------------------------------------------------------------- what is noted

_patch = pytest.MonkeyPatch()
_noted: Counter[str] = Counter()


def begin_to_note() -> None:
    """Counts lookups, those that came to the long way, and recvs that the engine runs."""
    node_class: Any = Recv._backward_cls
    look_up, run = Lookups.serve, node_class.apply

    def noting(self: Lookups, *args: Any) -> bool:
        is_served = look_up(self, *args)
        _noted["short" if is_served else "long"] += 1
        return is_served

    def noting_run(*args: Any) -> Any:
        _noted["recvs"] += 1
        return run(*args)

    _patch.setattr(Lookups, "serve", noting)
    _patch.setattr(node_class, "apply", noting_run)


def noted() -> dict[str, int]:
    _patch.undo()
    found = dict(_noted)
    _noted.clear()
    return found


def noting(program: Callable[[], Any], worker: str) -> dict[str, int]:
    """What a worker notes during a program."""
    ag.outside(call, worker, begin_to_note)
    try:
        program()
    finally:
        found: dict[str, int] = ag.outside(call, worker, noted)
    return found


# ---------------------------------------------------------------------------- exactness


def one() -> Tensor:
    return (fetch("w1", "bias") * parameter("x")).sum()


def several_of_two_workers() -> Tensor:
    w, b = fetch("w1", "weight"), fetch("w1", "bias")
    return (torch.tanh(parameter("x") @ w + b) @ fetch("w2", "weight")).sum()


def several_of_one_worker() -> Tensor:
    w, b = fetch("w1", "weight"), fetch("w1", "bias")
    return torch.tanh(parameter("x") @ w + b).square().sum()


def several_and_a_leaf_of_its_own() -> Tensor:
    return several_of_one_worker() * parameter("bias").square().sum()


def with_one_gradient() -> Tensor:
    w, b = fetch("w1", "weight"), fetch("w1", "bias")
    return ((w + b) * parameter("x")).sum()


def unused_beside_another() -> Tensor:
    kept = fetch("w1", "weight")
    loss = several_of_one_worker()
    del kept
    return loss


def unused() -> Tensor:
    fetch("w1", "weight")
    kept = fetch("w2", "weight")
    loss = one()
    del kept
    return loss


def the_same_twice() -> Tensor:
    reference = call("w1", own_parameter, "bias")
    return (reference.to_here() * reference.to_here().exp() * parameter("x")).sum()


def used_twice() -> Tensor:
    b = fetch("w1", "bias")
    return (b * parameter("x") + b.square()).sum()


def before_something_is_sent() -> Tensor:
    b = fetch("w1", "bias")
    return (call("w1", handlers.affine, parameter("x") * b) * b).sum()


def after_something_was_sent() -> Tensor:
    y = call("w1", handlers.affine, parameter("x"))
    return (y * fetch("w1", "bias") * fetch("w2", "bias")).sum()


def in_between() -> Tensor:
    b = fetch("w2", "bias")
    y = call("w1", handlers.affine, parameter("x") * b)
    z = call("w2", handlers.affine, y * fetch("w1", "bias"))
    return (z * fetch("w1", "weight") * fetch("w2", "weight")).sum()


def by_a_handler() -> Tensor:
    return call("w2", fetch_and_use, "w1", parameter("x")).sum()


def large_and_small() -> Tensor:
    large = fetch("w1", "large", LARGE, LARGE)
    return large.square().sum() * fetch("w1", "bias").sum()


def something_computed() -> Tensor:
    return (call("w1", own_computed).to_here() * fetch("w1", "bias")).sum()


def changed_in_place() -> Tensor:
    return (fetch("w1", "bias").mul_(3) * parameter("x")).sum()


def detached_in_place() -> Tensor:
    return one() + fetch("w1", "weight").detach_().sum()


def with_a_hook() -> Tensor:
    b = fetch("w1", "bias")
    b.register_hook(lambda gradient: gradient * 5)
    return (b * parameter("x")).sum()


def of_myself() -> Tensor:
    return (fetch("w0", "bias") * fetch("w1", "bias")).sum()


def beside_a_call_to_myself() -> Tensor:
    b = fetch("w1", "bias")
    return (call("w0", handlers.affine, parameter("x") * b) * b).sum()


PROGRAMS = (
    one,
    several_of_two_workers,
    several_of_one_worker,
    several_and_a_leaf_of_its_own,
    with_one_gradient,
    unused_beside_another,
    unused,
    the_same_twice,
    used_twice,
    before_something_is_sent,
    after_something_was_sent,
    in_between,
    by_a_handler,
    large_and_small,
    something_computed,
    changed_in_place,
    detached_in_place,
    with_a_hook,
    of_myself,
    beside_a_call_to_myself,
)
MODES = [mode for mode in ag.MODES if mode != "calls"]  # references need a context


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
@on_worker(0)
def test_gradients_are_those_of_one_process(program, mode):
    ag.check(program, mode, exact=False)


def random_program(seed: int) -> Callable[[], Tensor]:
    """Fetches, calls and handlers that fetch, in any order and of several workers."""

    def program() -> Tensor:
        choose = random.Random(seed)
        kinds = choose.choice((["fetch"], ["fetch", "call"], ["fetch", "handler"]))
        values = [parameter("x")]
        for _ in range(choose.randint(2, 9)):
            to = choose.choice(("w1", "w2", "w3"))
            kind = choose.choice(kinds)
            if kind == "call":
                values.append(call(to, handlers.affine, choose.choice(values)))
            elif kind == "handler":
                of = choose.choice(("w1", "w2", "w3"))
                values.append(call(to, fetch_and_use, of, choose.choice(values)))
            else:
                values.append(fetch(to, choose.choice(("weight", "bias"))))
        total = parameter("x") * 0
        for value in choose.sample(values, choose.randint(1, len(values))):
            other = choose.choice(values)
            total = total + torch.tanh(value) * (other + choose.uniform(-1, 1))
        return total.sum()

    return program


@pytest.mark.parametrize("seed", range(40))
@on_worker(0)
def test_random_programs_are_those_of_one_process(seed):
    mode = MODES[seed % len(MODES)]
    ag.check(random_program(seed), mode, exact=False)


@pytest.mark.parametrize("program", PROGRAMS)
@on_worker(0)
def test_gradients_of_a_graph_that_is_retained(program):
    with autograd.context() as ctx:
        loss = program()
        ctx.backward(loss, retain_graph=True)
        ctx.backward(loss)
        found = ag.fetch_dictionary(ctx)

    def twice() -> None:
        loss = program()
        loss.backward(retain_graph=True)
        loss.backward()

    ag.assert_same(found, ag.in_one_process(twice).gradients, exact=False)


@on_worker(0)
def test_steps_of_one_context_add_up():
    with autograd.context() as ctx:
        for step in (several_of_two_workers, in_between, several_of_two_workers):
            ctx.backward(step())
        found = ag.fetch_dictionary(ctx)

    def alone() -> None:
        for step in (several_of_two_workers, in_between, several_of_two_workers):
            step().backward()

    ag.assert_same(found, ag.in_one_process(alone).gradients, exact=False)


# ------------------------------------------------------------------------ the short ways


def _step() -> None:
    with autograd.context() as ctx:
        ctx.backward(several_of_two_workers())


@on_worker(0)
def test_leaves_are_handed_out_on_the_short_way():
    assert noting(_step, "w1")["short"] == 2


@on_worker(0)
def test_engine_runs_no_recv_if_all_that_came_is_leaves():
    assert "recvs" not in noting(_step, "w0")


class Told:
    """Notes what this worker tells others about passes."""

    def __init__(self, patch: pytest.MonkeyPatch, *, is_held: bool = False) -> None:
        self.was_shipped = False
        self.all: list[tuple[int, Any, bytes]] = []
        ship, send = _fetched._ship_with_begin, Telling.send

        def noting_ship(*args: Any) -> bool:
            self.was_shipped = not is_held and ship(*args)
            return self.was_shipped

        def noting_send(telling: Telling, to: int, outgoing: Outgoing) -> Any:
            head = outgoing.head
            size = 12 + int.from_bytes(
                head[4:8], "big"
            )  # with that of the control part
            self.all.append((to, decode_control(head)[0], head[size:]))
            return send(telling, to, outgoing)

        patch.setattr(_fetched, "_ship_with_begin", noting_ship)
        patch.setattr(Telling, "send", noting_send)

    @property
    def kinds(self) -> list[str]:
        """The classes of all messages."""
        return [type(message).__name__ for _, message, _ in self.all]


def told_in(program: Callable[[], Tensor], *, is_held: bool = False) -> Told:
    """What this worker tells in a pass."""
    with autograd.context() as ctx:
        loss = program()
        with pytest.MonkeyPatch.context() as patch:
            told = Told(patch, is_held=is_held)
            ctx.backward(loss)
    for _, message, _ in told.all:
        message.key = 0  # another one for each context
    return told


@pytest.mark.parametrize(
    ("program", "is_shipped"),
    [
        (several_of_one_worker, True),
        (several_and_a_leaf_of_its_own, True),
        (one, False),
        (several_of_two_workers, False),
        (with_one_gradient, False),
        (unused_beside_another, False),
        (the_same_twice, True),
        (large_and_small, False),
        (after_something_was_sent, False),
    ],
)
@on_worker(0)
def test_same_is_told_if_all_goes_to_one_worker_at_once(program, is_shipped):
    at_once, slowly = told_in(program), told_in(program, is_held=True)

    assert (at_once.was_shipped, slowly.was_shipped) == (is_shipped, False)
    assert at_once.all == slowly.all


def meanwhile(what: Callable[[Any, Any], None]) -> Told:
    """What is told if something happens to a context while the engine runs for its pass."""

    def do(_: Tensor) -> None:
        side = current_exchange().registry.get(int(ctx))
        what(current_exchange(), side)

    with autograd.context() as ctx, pytest.MonkeyPatch.context() as patch:
        w, b = fetch("w1", "weight"), fetch("w1", "bias")
        b.register_hook(do)
        told = Told(patch)
        ctx.backward(torch.tanh(parameter("x") @ w + b).square().sum())
        patch.undo()
        found = ag.fetch_dictionary(ctx)

    def alone() -> None:
        several_of_one_worker().backward()

    ag.assert_same(found, ag.in_one_process(alone).gradients, exact=False)
    return told


@on_worker(0)
def test_worker_that_has_heard_of_the_pass_is_not_told_of_it_again():
    told = meanwhile(lambda exchange, side: exchange.tell_held(side))

    assert (told.was_shipped, told.kinds) == (False, ["PassStart", "Gradients"])
    assert told.all[1][1].start is None


@on_worker(0)
def test_worker_hears_of_the_pass_with_all_gradients():
    told = meanwhile(lambda *_: None)

    assert (told.was_shipped, told.kinds) == (True, ["Gradients"])
    assert told.all[0][1].start is not None


@on_worker(0)
def test_gradient_of_a_message_that_has_become_stale_is_refused():
    def lose(exchange: Any, side: Any) -> None:
        last = side.run.recvs[-1]
        exchange.mark_stale(side, last.peer, [last.number])

    with pytest.raises(GraphConsumed):
        meanwhile(lose)


@on_worker(0)
def test_nothing_is_shipped_in_a_pass_that_has_failed():
    kinds: list[str] = []

    def fail(exchange: Any, side: Any) -> None:
        send = exchange.telling.send

        def noting_send(to: int, outgoing: Outgoing) -> Any:
            kinds.append(type(decode_control(outgoing.head)[0]).__name__)
            return send(to, outgoing)

        exchange.telling.send = noting_send
        exchange.abort(side, side.run, ValueError("enough"))

    try:
        with pytest.raises(ValueError, match="enough"):
            meanwhile(fail)
    finally:
        del current_exchange().telling.send
    assert "PassAbort" in kinds and "Gradients" not in kinds


@on_worker(0)
def test_engine_runs_recvs_if_somebody_waits_for_them():
    def step() -> None:
        with autograd.context() as ctx:
            ctx.backward(after_something_was_sent())

    assert noting(step, "w0")["recvs"] == 3


@on_worker(0)
def test_what_is_fetched_after_something_was_sent_comes_before_it_in_backward():
    with autograd.context() as ctx:
        tail = current_exchange().registry.get(int(ctx)).peek_tail
        fetch("w1", "bias"), fetch("w2", "bias")
        assert len(tail()) == 2  # nobody waits for either of them
        call("w1", handlers.affine, parameter("x"))
        fetch("w2", "bias")
        assert len(tail()) == 1


def ways(program: Callable[[], Any]) -> dict[str, int]:
    """How often w1 went the short and the long way."""
    found = noting(program, "w1")
    return {key: found[key] for key in ("short", "long") if key in found}


@on_worker(0)
def test_what_is_not_simple_goes_the_long_way():
    def large() -> None:
        with autograd.context():
            fetch("w1", "large", LARGE, LARGE)

    def transposed() -> None:
        call("w1", keep_transposed)
        reference = call("w1", own_value, "value")
        with autograd.context():
            torch.testing.assert_close(
                reference.to_here().detach(), torch.arange(6.0).reshape(2, 3).t()
            )

    def list_of_numbers() -> None:
        call("w1", keep_value, "value", [1, 2])
        assert call("w1", own_value, "value").to_here() == [1, 2]

    def not_recorded() -> None:
        with autograd.context(), torch.no_grad():
            assert not fetch("w1", "weight").grad_fn

    for program in (large, transposed, list_of_numbers, not_recorded):
        assert ways(program) == {"long": 1}


@on_worker(0)
def test_each_fetch_is_in_the_context_and_the_modes_around_it():
    def fetched() -> Tensor:
        value: Tensor = reference.to_here()
        return value

    reference = call("w1", own_parameter, "bias")
    with autograd.context() as outer:
        before = fetched()
        with autograd.context(accumulate="grad") as inner:
            within = fetched()
            with torch.no_grad():
                assert fetched().grad_fn is None
            with torch.autocast("cpu", dtype=torch.bfloat16):
                under_autocast = fetched()
            inner.backward((within * 2 + under_autocast * 3).sum())
        outer.backward((before * 5 + fetched() * 7).sum())
        again = fetched()
        outer.backward((again * 11).sum())
        found = ag.fetch_dictionary(outer)["w1"]["bias"]
        into_grad = ag.outside(ag.fetch_grad)["w1"]["bias"]

    assert found is not None and (found == 5 + 7 + 11).all()
    assert into_grad is not None and (into_grad == 2 + 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@on_worker(0)
def test_tensors_that_need_no_gradients_are_handed_out_outside_of_contexts(dtype):
    value = torch.arange(12).reshape(3, 4).to(dtype)
    call("w1", keep_value, "value", value)
    reference = call("w1", own_value, "value")
    found: list[Tensor] = []

    assert ways(lambda: found.append(reference.to_here())) == {"short": 1}

    (fetched,) = found
    assert fetched.dtype is dtype and not fetched.requires_grad
    torch.testing.assert_close(fetched, value)
    fetched.zero_()  # its memory is its own
    torch.testing.assert_close(reference.to_here(), value)


@on_worker(0)
def test_calls_that_are_served_on_the_short_way_are_counted():
    reference = call("w1", own_parameter, "weight")
    before = call("w1", rpc.get_debug_info)["calls_served"]

    with autograd.context():
        for _ in range(5):
            reference.to_here()

    info = call("w1", rpc.get_debug_info)
    assert info["calls_served"] == before + 6
    assert info["server_active_calls"] == 1  # the question itself


# ----------------------------------------------------------------------------- its limits


@on_worker(0)
def test_hooks_of_the_node_are_called():
    seen: list[str] = []
    with autograd.context() as ctx:
        b = fetch("w1", "bias")
        node: Any = b.grad_fn
        node.register_prehook(lambda gradients: (gradients[0] * 7, *gradients[1:]))
        node.register_hook(lambda *_: seen.append("after"))
        ctx.backward((b * parameter("x")).sum())
        found = ag.fetch_dictionary(ctx)["w1"]["bias"]

    assert seen == ["after"]
    expected = ag.in_one_process(lambda: one().backward()).gradients["w1"]["bias"]
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected * 7)


@on_worker(0)
def test_gradient_of_what_was_fetched_can_be_retained():
    with autograd.context() as ctx:
        b = fetch("w1", "bias")
        b.retain_grad()
        ctx.backward((b * parameter("x")).sum())
        found = ag.fetch_dictionary(ctx)["w1"]["bias"]

    assert b.grad is not None and found is not None
    torch.testing.assert_close(b.grad, found)


@on_worker(0)
def test_graph_is_consumed_by_a_pass():
    with autograd.context() as ctx:
        b = fetch("w1", "bias")
        ctx.backward(b.sum())
        with pytest.raises(GraphConsumed):
            ctx.backward(b.exp().sum())
        with pytest.raises(GraphConsumed):
            ctx.backward((b * fetch("w1", "bias")).sum())


@on_worker(0)
def test_leaves_of_another_context_are_refused():
    with autograd.context(), autograd.context() as inner:
        b = fetch("w1", "bias")
        with autograd.context() as innermost:
            loss = (b * fetch("w1", "bias")).sum()
            with pytest.raises(ForeignGraph):
                innermost.backward(loss)
        inner.backward(b.sum())


@on_worker(0)
def test_reference_that_is_over_is_refused():
    reference = call("w1", own_parameter, "weight")
    service, target = reference._service, reference._ref
    rref = [*target.id]
    del reference, target
    fn.wait_until(lambda: not call("w1", fn.counts).get("owner_rrefs"))

    with pytest.raises(OwnerLost, match="does not have the value"):
        service.agent.ask(
            "w1", "gradwire.rpc._rref:fetch", "to_here()", [*rref[:2], 10**6], -1
        )


@on_worker(0)
def test_answer_above_the_limit_of_a_frame_is_an_error():
    reference = call("w1", own_parameter, "fitting", 32, 32)
    call("w1", limit_heads, 8000)
    try:
        with autograd.context() as ctx:
            with pytest.raises(LocalProtocolError, match="the limit is 8000"):
                reference.to_here()
            loss = one_of(call("w1", keep_small))
            ctx.backward(loss)  # nobody waits for the gradient of what never came
    finally:
        call("w1", limit_heads, None)


def one_of(small: Any) -> Tensor:
    return (small.to_here() * 2).sum()


def keep_small() -> Any:
    fn.kept["small"] = torch.ones(3, requires_grad=True)
    return own(fn.kept["small"])


_heads: dict[Any, int] = {}


def limit_heads(limit: int | None) -> None:
    """Of what this worker sends to w0."""
    link: Any = current_agent().network.find("w0").link
    connection = link.connection
    if limit is None:
        connection._max_head_bytes = _heads.pop(connection)
    else:
        _heads[connection] = connection._max_head_bytes
        connection._max_head_bytes = limit


@on_worker(0)
def test_fetch_has_a_deadline():
    reference = rpc.remote("w1", functions.block_until_set, ("fetched",))
    with pytest.raises(CallTimeout, match=r"to_here\(\) on worker 'w1'"):
        reference.to_here(timeout=0.05)
    call("w1", functions.set_event, "fetched")
    assert reference.to_here() == "fetched"
