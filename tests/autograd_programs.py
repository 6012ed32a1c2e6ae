"""Programs for the tests of the autograd layer: they run on w0, and return losses.

See autograd_functions.py for how they are compared with one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autograd_functions import (
    SIZE,
    WORKERS,
    Gradients,
    assert_same,
    call,
    call_async,
    fetch_dictionary,
    get_kept,
    here,
    in_one_process,
    keep,
    parameter,
)
from autograd_handlers import (
    add_to_kept,
    affine,
    affine_relay,
    affine_soon,
    await_relay,
    fan_out,
    forward_along,
    get_constant,
    get_indices,
    get_own,
    get_parameter,
    join,
    join_by_name,
    keep_linear,
    kept_total,
    linear,
    pack,
    relay,
    relay_through_future,
    relay_twice_through_futures,
    return_argument,
    split,
    split_three_ways,
    unpack,
    use_kept,
)
from gradwire import autograd


def _x() -> Tensor:
    return parameter("x")


def one_call() -> Tensor:
    return call("w1", affine, _x()).sum()


def call_with_names() -> Tensor:
    return call("w1", join_by_name, left=_x(), right=parameter("y")).sum()


def call_without_waiting() -> Tensor:
    future = call_async("w1", affine, _x())
    return future.wait().sum()


def two_calls_at_once() -> Tensor:
    futures = [call_async(w, affine, _x()) for w in ("w1", "w2")]
    first, second = (future.wait() for future in futures)
    return (first * second).sum()


def several_results() -> Tensor:
    product, scaled = call("w1", split, _x())
    return (product.tanh() * scaled).sum()


def nested_containers() -> Tensor:
    packed = call("w1", pack, _x())
    return call("w2", unpack, packed, 0.5).sum()


def grad_and_no_grad_results() -> Tensor:
    first, constant, second = call("w1", split_three_ways, _x())
    assert [t.requires_grad for t in (first, constant, second)] == [True, False, True]
    return (first * constant - second).sum()


def grad_and_integer_arguments() -> Tensor:
    rows = torch.tensor([0, 0, 2])
    constant = torch.full((SIZE, SIZE), 0.5, dtype=torch.double)
    return call("w1", mix, rows, _x(), constant, parameter("y"), 3).sum()


def mix(rows: Tensor, x: Tensor, constant: Tensor, y: Tensor, number: int) -> Tensor:
    assert not rows.requires_grad and not constant.requires_grad
    return x[rows] * constant + y * number + linear(x)


def same_tensor_twice_in_one_call() -> Tensor:
    x = _x() * 2
    return call("w1", join, x, x).sum()


def same_tensor_in_two_calls() -> Tensor:
    x = _x() * 2
    return (call("w1", linear, x) * call("w1", affine, x)).sum()


def same_tensor_to_three_workers() -> Tensor:
    x = _x() * 2
    y, z, v = (call(worker, affine, x) for worker in ("w1", "w2", "w3"))
    return (y * z + v).sum()


def same_result_twice_in_one_reply() -> Tensor:
    first, second = call("w1", twins, _x())
    return (first * 2 + second.tanh()).sum()


def twins(x: Tensor) -> tuple[Tensor, Tensor]:
    y = affine(x)
    return y, y


def call_to_oneself() -> Tensor:
    return call(here(), affine, _x()).sum()


def call_to_oneself_and_out() -> Tensor:
    return call(here(), affine_relay, "w1", linear, _x()).sum()


def result_goes_back_to_its_worker() -> Tensor:
    y = call("w1", affine, _x())
    z = call("w1", linear, y + parameter("y"))
    return (y * z).sum()


def chain_over_all_workers() -> Tensor:
    value = _x()
    for worker in ("w1", "w2", "w3", "w1"):
        value = call(worker, affine, value) + value
    return value.sum()


def there_and_back() -> Tensor:
    """A calls B, which calls A."""
    return call("w1", affine_relay, "w0", linear, _x()).sum()


def there_and_back_in_the_loss() -> Tensor:
    """The same parameter of A is used by B's call and around it."""
    y = call("w1", affine_relay, "w0", linear, _x())
    return linear(y).sum()


def deep_nesting() -> Tensor:
    route = ["w2", "w0", "w3", "w1", "w0", "w1", "w2"]
    return call("w1", forward_along, route, _x()).sum()


def ping_pong() -> Tensor:
    return call("w1", forward_along, ["w0", "w1"] * 4, _x()).sum()


def diamond() -> Tensor:
    """w1 and w2 both get the input, and both call w3."""
    left = call_async("w1", affine_relay, "w3", linear, _x())
    right = call_async("w2", affine_relay, "w3", affine, _x())
    return (left.wait() * right.wait()).sum()


def diamond_inside_a_handler() -> Tensor:
    return call("w1", fan_out, ["w2", "w3"], affine, _x()).sum()


def unused_result() -> Tensor:
    call("w1", affine, _x())
    return call("w2", linear, _x()).sum()


def unused_result_of_a_later_call() -> Tensor:
    """Nothing that the loss needs was recorded after it."""
    y = call("w2", linear, _x())
    call("w1", affine_relay, "w2", affine, _x())
    call("w2", affine, y)
    return y.sum()


def unused_part_of_a_result() -> Tensor:
    used, _ = call("w1", split, _x())
    return used.sum()


def unused_argument() -> Tensor:
    return call("w1", first_of, _x(), parameter("y")).sum()


def first_of(x: Tensor, y: Tensor) -> Tensor:
    return linear(x)


def only_unused_results() -> Tensor:
    """The loss does not depend on any call."""
    call("w1", affine_relay, "w2", linear, _x())
    return (parameter("y") ** 2).sum()


def detached_result() -> Tensor:
    y = call("w1", affine, _x())
    return (y.detach() * call("w2", affine, _x())).sum()


def detached_argument() -> Tensor:
    return (call("w1", affine, _x().detach()) * parameter("y")).sum()


def result_used_twice() -> Tensor:
    y = call("w1", affine, _x())
    return (y * y.exp() + y).sum()


def result_used_by_two_workers() -> Tensor:
    y = call("w1", affine, _x())
    return (call("w2", linear, y) * call("w3", linear, y)).sum()


def result_without_grad() -> Tensor:
    constant = call("w1", get_constant, _x())
    assert not constant.requires_grad
    return (constant * _x()).sum()


def integer_result() -> Tensor:
    indices = call("w1", get_indices, _x())
    return _x()[indices].sum()


def result_of_remote_leaves_only() -> Tensor:
    own = call("w1", get_own)
    assert own.requires_grad
    return (own * 3).sum()


def remote_leaf_itself() -> Tensor:
    weight = call("w1", get_parameter, "weight")
    return (weight * _x()).sum()


def argument_comes_back() -> Tensor:
    y = call("w1", return_argument, _x() * 2)
    return (y**2).sum()


def leaf_comes_back() -> Tensor:
    y = call("w1", return_argument, _x())
    return (y**2).sum()


def nested_call_without_grad() -> Tensor:
    """Nothing with a history goes to w1, which calls w2 nevertheless."""
    return call("w1", relay, "w2", get_own).sum()


def history_passes_through() -> Tensor:
    """w1 has no part of its own in what it passes on."""
    return call("w1", relay, "w2", affine, _x()).sum()


def coroutine() -> Tensor:
    return call("w1", affine_soon, _x()).sum()


def coroutine_that_calls() -> Tensor:
    return call("w1", await_relay, "w2", affine, _x()).sum()


def reply_from_a_callback() -> Tensor:
    return call("w1", relay_through_future, "w2", affine, _x()).sum()


def call_from_a_callback() -> Tensor:
    return call("w1", relay_twice_through_futures, "w2", affine, _x()).sum()


def callback_of_the_caller() -> Tensor:
    future = call_async("w1", affine, _x())
    return future.then(lambda done: linear(done.value()).sum()).wait()


def many_calls() -> Tensor:
    value = _x()
    for number in range(20):
        value = value + call(WORKERS[number % 4], affine, value)
    return value.sum()


def many_calls_side_by_side() -> Tensor:
    futures = [
        call_async(WORKERS[number % 4], affine, _x() * number) for number in range(20)
    ]
    return sum((future.wait() for future in futures), torch.zeros(())).sum()


def several_losses() -> list[Tensor]:
    y = call("w1", affine, _x())
    return [y.sum(), (call("w2", linear, y) ** 2).sum(), _x().exp().sum()]


PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (
        one_call,
        call_with_names,
        call_without_waiting,
        two_calls_at_once,
        several_results,
        nested_containers,
        grad_and_no_grad_results,
        grad_and_integer_arguments,
        same_tensor_twice_in_one_call,
        same_tensor_in_two_calls,
        same_tensor_to_three_workers,
        same_result_twice_in_one_reply,
        call_to_oneself,
        call_to_oneself_and_out,
        result_goes_back_to_its_worker,
        chain_over_all_workers,
        there_and_back,
        there_and_back_in_the_loss,
        deep_nesting,
        ping_pong,
        diamond,
        diamond_inside_a_handler,
        unused_result,
        unused_result_of_a_later_call,
        unused_part_of_a_result,
        unused_argument,
        only_unused_results,
        detached_result,
        detached_argument,
        result_used_twice,
        result_used_by_two_workers,
        result_without_grad,
        integer_result,
        result_of_remote_leaves_only,
        remote_leaf_itself,
        argument_comes_back,
        leaf_comes_back,
        nested_call_without_grad,
        history_passes_through,
        coroutine,
        coroutine_that_calls,
        reply_from_a_callback,
        call_from_a_callback,
        callback_of_the_caller,
        many_calls,
        many_calls_side_by_side,
        several_losses,
    )
}
"""Programs that mean the same with and without a context, by name."""

# Three or more terms meet in one gradient, in an order that is not fixed.
UNORDERED = {
    "chain_over_all_workers",
    "deep_nesting",
    "ping_pong",
    "diamond",
    "diamond_inside_a_handler",
    "same_tensor_to_three_workers",
    "call_from_a_callback",
    "many_calls",
    "many_calls_side_by_side",
    "several_losses",
    "nested_containers",
}


def kept_value_is_used_again() -> Tensor:
    call("w1", keep_linear, "a", _x())
    return call("w1", use_kept, "a", parameter("y")).sum()


def kept_value_is_used_twice() -> Tensor:
    call("w1", keep_linear, "a", _x())
    first = call("w1", use_kept, "a", parameter("y"))
    second = call("w1", use_kept, "a", parameter("z"))
    return (first * second).sum()


def kept_value_grows() -> Tensor:
    call("w1", keep_linear, "a", _x())
    call("w1", add_to_kept, "a", parameter("y"))
    call("w1", add_to_kept, "a", parameter("z"))
    return call("w1", kept_total, "a")


def kept_argument_is_used_again() -> Tensor:
    """The received tensor itself stays there."""
    call("w1", keep, "a", _x() * 2)
    return call("w1", use_kept, "a", parameter("y")).sum()


def kept_value_is_fetched_by_another_worker() -> Tensor:
    call("w1", keep_linear, "a", _x())
    y = call("w2", affine_relay, "w1", use_kept_second, parameter("y"), "a")
    return y.sum()


def use_kept_second(x: Tensor, name: str) -> Tensor:
    return use_kept(name, x)


def kept_by_two_workers() -> Tensor:
    for worker in ("w1", "w2"):
        call(worker, keep_linear, "a", _x())
    y, z = (call(worker, use_kept, "a", parameter("y")) for worker in ("w1", "w2"))
    return (y * z).sum()


def kept_value_is_never_used() -> Tensor:
    call("w1", keep_linear, "a", _x())
    return call("w2", linear, _x()).sum()


def kept_reply_of_a_nested_call() -> Tensor:
    """w1 keeps what w2 gave it, and sends it to w3 later."""
    call("w1", keep_result_of, "a", "w2", affine, _x())
    return call("w1", send_kept, "a", "w3", linear).sum()


def keep_result_of(name: str, to: str, function: Callable[..., Any], x: Any) -> None:
    keep(name, call(to, function, x))


def send_kept(name: str, to: str, function: Callable[..., Any]) -> Any:
    return call(to, function, get_kept(name))


CONTEXT_PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (
        kept_value_is_used_again,
        kept_value_is_used_twice,
        kept_value_grows,
        kept_argument_is_used_again,
        kept_value_is_fetched_by_another_worker,
        kept_by_two_workers,
        kept_value_is_never_used,
        kept_reply_of_a_nested_call,
    )
}
"""Programs that need one: values stay on a worker between calls."""


def check_usable(ctx: autograd.Context) -> None:
    """Another forward and backward in the same context give exact gradients."""
    expected = in_one_process(lambda: history_passes_through().backward())
    before = fetch_dictionary(ctx)
    ctx.backward(history_passes_through())
    after = fetch_dictionary(ctx)
    added: Gradients = defaultdict(dict)
    for worker, names in expected.gradients.items():
        for name in names:
            new, old = after[worker][name], before[worker].get(name)
            assert new is not None, f"{worker}.{name} has no gradient"
            added[worker][name] = new if old is None else new - old
    assert_same(added, expected.gradients, exact=False)
