"""Passes that `gradwire.autograd.backward` and `grad` start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.autograd._autocast import autocast_state
from gradwire.autograd._context import active_context, current_handler
from gradwire.autograd._engine import Destination
from gradwire.autograd._passes import PassKind, TellStart
from gradwire.errors import BackwardTimeout
from gradwire.rpc.extension import shielded

if TYPE_CHECKING:
    from gradwire.autograd._context import Side
    from gradwire.autograd._exchange import Exchange
    from gradwire.autograd._run import Run

__all__ = ["backward"]


def backward(
    exchange: Exchange,
    side: Side,
    roots: Sequence[Tensor],
    seeds: Sequence[Tensor],
    destination: Destination,
    *,
    retain: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
    timeout_s: float = 0.0,
) -> list[tuple[Any, Tensor | None]]:
    """Runs a pass over a whole context, from its begin to its end everywhere."""
    limit = time.monotonic() + timeout_s if timeout_s else 0.0
    if side.calls:
        _wait_for_calls(side, limit)
    retain = retain or create_graph
    if side.run is not None:
        exchange.leftovers.work_off()  # of a plain backward that has failed just now
    run: Run | None = None
    try:
        with shielded(), side.lock:  # no pass may begin of which nobody knows
            exchange.check_whole(side)
            pass_, instructions = side.state.start(
                PassKind(destination, retain, create_graph)
            )
            tail = side.peek_tail()
            run = exchange.begin(side, pass_)
            run.limit, run.autocast = limit, autocast_state()
        if run.hold_starts():
            instructions = [i for i in instructions if type(i) is not TellStart]
        if instructions:
            exchange.telling.perform(side, run, instructions)
        gradients = exchange.run_part(run, roots, seeds, tail, inputs)
        del tail
        exchange.end_part(side, run)
        exchange.wait_for_children(run)
    except BaseException as error:
        if run is not None:
            exchange.fail(side, run, error)
            exchange.end_failed(side, run)
        raise
    if gradients and destination is Destination.INTO_DICTIONARY:
        exchange.keep(side, run, gradients)
    return gradients


def _wait_for_calls(side: Side, limit: float) -> None:
    """Waits for calls of this context that are under way from here.

    In a handler, only for those that it has made itself: of the others one may wait for
    this very handler.
    """
    handler = current_handler.get()
    is_served = handler is not None and active_context.get() == side.name
    for note, maker in list(side.calls.items()):
        call = note.call
        if call is None or (is_served and maker is not handler):
            continue
        left = max(0.0, limit - time.monotonic()) if limit else None
        if not call.wait(left):
            raise BackwardTimeout(
                f"backward() waited until its limit for a call of {call.target}, made "
                f"in {side.label}, to return"
            )
