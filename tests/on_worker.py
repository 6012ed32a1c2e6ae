"""Lets the body of a test run inside a worker process, as a user's program would.

    @on_worker(0)
    def test_call_returns_value():
        assert rpc.rpc_sync("w1", max, args=(1, 2)) == 2

The test process takes the fixture with the cluster and waits; the body runs on the main
thread of the worker. Parameters of the body are those of the test: they are sent, so they
must be picklable, and fixtures among them must be plain data.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

_BODY = "body_on_worker"


def on_worker(
    rank: int, *, fixture: str = "cluster"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs the decorated test on the worker of this rank.

    Args:
        rank: Which worker.
        fixture: Name of the fixture that gives the cluster.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**arguments: Any) -> None:
            cluster = arguments.pop(fixture)
            cluster.run(rank, _run_body, body.__module__, body.__name__, arguments)

        parameters = inspect.signature(body).parameters
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                for name in (fixture, *parameters)
            ]
        )
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(body, name))
        setattr(test, _BODY, body)
        return test

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    body = getattr(getattr(importlib.import_module(module), name), _BODY)
    try:
        body(**arguments)
    except AssertionError as error:
        # pytest does not rewrite asserts in here, so show what they were about.
        raise AssertionError(
            f"{error}\nin {name}: {_innermost_locals(error)}"
        ) from error


def _innermost_locals(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    found = trace.tb_frame.f_locals if trace is not None else {}
    return ", ".join(f"{key} = {value!r:.300}" for key, value in found.items())
