"""Remote references, as users hold them: `RRef`, `remote`, and calls through them."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from gradwire._config import UNSET_TIMEOUT
from gradwire._ids import WorkerInfo
from gradwire.errors import (
    CallTimeout,
    DecodeError,
    EncodeError,
    NotInitialized,
    OwnerLost,
    PeerLostError,
    RemoteError,
    UnknownContext,
    UsageError,
)
from gradwire.rpc._agent import Agent
from gradwire.rpc._api import current_agent
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._context import serving_peer
from gradwire.rpc._exports import for_agents
from gradwire.rpc._future import Eventually, Future, Later, Outcome
from gradwire.rpc._interceptors import register_interceptor
from gradwire.rpc._peer import Peer
from gradwire.rpc._rref_parts import Handle, Owned, User
from gradwire.rpc._rref_service import FETCH, RefService
from gradwire.rpc._signals import shielded
from gradwire.rpc._targets import own_names, shown_as
from gradwire.rpc.functions import ASYNC_ATTRIBUTE
from gradwire.wire import PLAIN_TYPES

_LOOK_S = 0.5
_TYPES_OF_ID = [int, int, int]
_FETCHING = "to_here()"
_shown_method = functools.lru_cache("the method {!r}".format)

__all__ = ["CUT_OUTSIDE_CONTEXT", "RRef", "remote", "set_backward"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Backward = Callable[[int, Any, bool], None]
_Invocation: TypeAlias = tuple[
    Callable[..., Any], tuple[Any, ...], dict[str, Any] | None
]
"""What to call on the owner, and with which arguments."""


class RRef(Handle, Generic[T_co]):
    """A reference to a value that lives on one worker, its owner.

    It can be sent to other workers, as an argument or a result, also inside containers.
    The value lives until the last reference is gone.

    Args:
        value: A value of this worker, which becomes its owner.
        type_hint: For code that was written for torch; of no meaning here.

    Example:
        >>> rref = RRef([1, 2])
        >>> rref.local_value()
        [1, 2]
    """

    __slots__ = ("_creation",)

    _creation: Future[None]

    def __init__(self, value: T_co, type_hint: Any = None) -> None:
        self._service = _service_of(current_agent())
        self._ref = self._service.own(value)

    # -------------------------------------------------------------------------- owner

    def owner(self) -> WorkerInfo:
        """The worker that the value lives on."""
        ref = self._ref
        return ref.owner if isinstance(ref, User) else self._service.agent.info

    def owner_name(self) -> str:
        """Its name."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether it is this worker."""
        return isinstance(self._ref, Owned)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows this reference by now."""
        if isinstance(self._ref, Owned):
            return True
        outcome = self._ref.confirmation
        return outcome.done and outcome.error is None

    # -------------------------------------------------------------------------- value

    def local_value(self) -> T_co:
        """The value itself, on its owner; waits until it is made.

        Raises:
            UsageError: This worker is not the owner.
            Exception: What the function raised that should have made the value.
        """
        ref = self._ref
        if isinstance(ref, User):
            raise UsageError(
                f"can't call local_value() on worker {self._service.agent.info.name!r}: "
                f"the value lives on worker {ref.owner.name!r}; use to_here()",
                worker=self._service.agent.info.name,
            )
        ref.outcome.wait()
        value: T_co = ref.outcome.result()
        return value

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T_co:
        """A copy of the value; on its owner the value itself.

        Inside a context a tensor comes with its history: gradients find their way back.

        Args:
            timeout: As in `rpc_sync`.

        Raises:
            OwnerLost: The owner is gone.
            Exception: What the function raised that should have made the value.
        """
        ref = self._ref
        agent = self._service.agent
        if isinstance(ref, Owned):
            deadline = agent.deadline(timeout)
            left = max(0.0, deadline - time.monotonic()) if deadline else None
            if not ref.outcome.wait(left):
                raise CallTimeout(
                    "the value of an RRef was not made within the limit; the function "
                    "that makes it still runs here",
                    worker=agent.info.name,
                )
            return self.local_value()
        ref.check()
        try:
            found: T_co = agent.ask(ref.owner, FETCH, _FETCHING, [*ref.id], timeout)
        except PeerLostError as error:
            if isinstance(error, OwnerLost) or not isinstance(error, RemoteError):
                # The call that should make it may have failed meanwhile, and know why.
                ref.check()
            with self._service.reaching(ref.owner):
                raise
        ref.check()  # its limit may have come meanwhile, and then it is of no use
        return found

    def backward(
        self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False
    ) -> None:
        """Runs a backward pass from the value, which is a scalar, on its owner.

        Args:
            dist_autograd_ctx_id: A context; -1: a plain backward there.
            retain_graph: As in torch.

        Raises:
            UnknownContext: There is no such context.
        """
        context = _check_context(dist_autograd_ctx_id)
        ref = self._ref
        if isinstance(ref, Owned):
            _run_backward(context, self.local_value(), retain_graph)
            return
        ref.check()
        arguments = (tuple(ref.id), context, retain_graph)
        with self._service.reaching(ref.owner):
            self._service.agent.call(ref.owner, run_backward, arguments, None, 0)

    # -------------------------------------------------------------------------- calls

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """The value's methods, called where it lives: ``rref.rpc_sync().method(x)``.

        Args:
            timeout: As in `gradwire.rpc.rpc_sync`.
        """
        return _Proxy(self, self._call_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As `rpc_sync`; calls return futures."""
        return _Proxy(self, self._call_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As `rpc_sync`; calls return references to results, which stay there."""
        return _Proxy(self, self._call_remote, timeout)

    def _call_sync(self, timeout: float, call: _Invocation) -> Any:
        agent, owner, ref = self._service.agent, self.owner(), self._ref
        try:
            with self._service.reaching(owner):
                return agent.call(owner, *call, timeout)
        except OwnerLost:
            if isinstance(ref, User):
                ref.check()  # as in `to_here`
            raise

    def _call_async(self, timeout: float, call: _Invocation) -> Any:
        agent = self._service.agent
        future = agent.call_async(self.owner(), *call, timeout)
        self._outlive(future._outcome)
        return future

    def _call_remote(self, timeout: float, call: _Invocation) -> Any:
        made: RRef[Any] = _create(self._service, self.owner(), *call, timeout)
        self._outlive(made._creation._outcome)
        return made

    def _outlive(self, call: Outcome) -> None:
        """The value must live until the call has found it."""
        if isinstance(call, PendingCall):
            call.keeps = self
            if call.done:
                call.keeps = None

    # -------------------------------------------------------------------------- others

    def _get_future(self) -> Future[None]:
        """Completes when the value is made, or cannot be."""
        return self._creation

    def __repr__(self) -> str:
        if isinstance(self._ref, Owned):
            return f"OwnerRRef({self._ref.id})"
        ref = self._ref
        return f"UserRRef({ref.id}, fork={ref.fork}, owner={ref.owner.name!r})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "Can not pickle rref in python pickler, rref can only be pickled when using "
            "RPC: it is a reference that its owner counts. Send it as an argument or a "
            "result of a call, or pickle what to_here() returns"
        )

    def __copy__(self) -> NoReturn:
        self.__reduce__()

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce__()


class _Proxy:
    """Attributes of a remote value, to be called."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(
        self,
        rref: RRef[Any],
        call: Callable[[float, _Invocation], Any],
        timeout: float,
    ) -> None:
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "__dict__":  # the compiler asks for it
            raise AttributeError(name)
        return functools.partial(self._invoke, name)

    def _invoke(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        ref = self._rref._ref
        if not isinstance(ref, User):
            own = (self._rref, name, *args)
            return self._call(self._timeout, (invoke_own, own, kwargs or None))
        # The id is enough for the owner: it keeps the value for as long as we have the
        # reference. All in one row: plain arguments need not be pickled then.
        ref.check()
        arguments = (*ref.id, name, *args)
        return self._call(self._timeout, (invoke, arguments, kwargs or None))


def start_method(
    rref: RRef[Any], name: str, args: tuple[Any, ...], timeout: float, agent: Agent
) -> Outcome:
    """Starts a call of a method of a value, for `Agent.call_all`.

    Args:
        rref: Refers to the value.
        name: The method.
        args: Its arguments.
        timeout: As in `gradwire.rpc.rpc_sync`.
        agent: Who calls.

    Raises:
        OwnerLost: The owner is gone.
        NotInitialized: The reference is one of an agent that has ended.
        Exception: What the function raised that should have made the value.
    """
    service = rref._service
    if service.agent is not agent:
        raise NotInitialized(
            f"{rref!r} belongs to worker {service.agent.info.name!r} as it was before its "
            "shutdown(); calls through it are no longer possible"
        )
    ref = rref._ref
    call: Outcome | None = None
    if isinstance(ref, User):
        ref.check()
        values = [*ref.id, name, *args]
        if PLAIN_TYPES.issuperset(map(type, values)):
            label = _shown_method(name)
            try:
                call = agent.begin_own(ref.owner, _INVOKE, values, timeout, label)
            except EncodeError:
                pass  # too large for that
        if call is None:
            call = agent.begin_call(ref.owner, invoke, tuple(values), None, timeout)
    else:
        own = (rref, name, *args)
        call = agent.begin_call(agent.info, invoke_own, own, None, timeout)
    rref._outlive(call)
    return call


@overload
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Eventually[T]],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[T]: ...


@overload
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[T]: ...


@overload
def remote(
    to: str | int | WorkerInfo,
    func: str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]: ...


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any] | str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """Runs ``func(*args, **kwargs)`` on a worker, where its result stays.

    Args:
        to: As in `rpc_sync`.
        func: Likewise.
        args: Likewise.
        kwargs: Likewise.
        timeout: Limit for making the value; see `rpc_sync`.

    Returns:
        A reference to the result, at once. What ``func`` raises comes from
        `RRef.to_here`.

    Example:
        >>> rref = remote("worker1", torch.add, args=(torch.ones(2), 1))
        >>> rref.to_here()
        tensor([2., 2.])
    """
    agent = current_agent()
    info = agent.network.find(to).info
    return _create(_service_of(agent), info, func, args, kwargs, timeout)


def _create(
    service: RefService,
    owner: WorkerInfo,
    function: Callable[..., Any] | str,
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> RRef[Any]:
    service.agent.targets.check_callable(function)
    ref: Owned | User
    with shielded():  # what is entered here must get its handle
        if owner.id == service.me:
            ref, creation = service.create_here()
        else:
            ref, creation = service.create_there(owner)
        rref: RRef[Any] = RRef._bind(service, ref)
        try:
            rref._creation = service.agent.make(
                owner, function, args, kwargs, timeout, creation
            )
        except BaseException as error:
            service.created(creation, error, was_sent=False)
            raise
    return rref


# --------------------------------------------------------------- what runs on the owner


def _no_future(function: Callable[..., Any], result: object) -> UsageError:
    return UsageError(
        "Functions decorated with @rpc.functions.async_execution must return a "
        f"torch.futures.Future object, but {function.__module__}."
        f"{function.__qualname__} returned {type(result).__module__}."
        f"{type(result).__qualname__}"
    )


@for_agents
@shown_as(lambda _: _FETCHING)
def fetch(*rref: int) -> Any:
    """The value of a reference, as soon as it is made."""
    outcome = _find(current_agent(), rref).outcome
    if outcome.done:
        return outcome.result()
    future: Future[Any] = Future(outcome=outcome)

    def finish() -> None:
        future._settle()

    if not outcome.add_callback(finish):
        return outcome.result()
    return Later(future)


@for_agents
@shown_as(lambda args: _shown_method(args[3]))
def invoke(
    created_on: int,
    incarnation: int,
    local_id: int,
    name: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a method of a value; an attribute that is none is returned."""
    agent, asker = current_agent(), serving_peer.get()
    value = _value_of(agent, asker, (created_on, incarnation, local_id))
    return _invoke_on(agent.targets.method(value, name, asker), args, kwargs)


_INVOKE = own_names[invoke]


@for_agents
@shown_as(lambda args: _shown_method(args[1]))
def invoke_own(rref: RRef[Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    """As `invoke`, for a call to oneself."""
    value = rref.local_value()
    found = current_agent().targets.method(value, name, serving_peer.get())
    return _invoke_on(found, args, kwargs)


def _invoke_on(found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not callable(found) and not args and not kwargs:
        return found
    result = found(*args, **kwargs)
    # A method that is asked for what its function lacks makes an error of it first.
    function = found.__func__ if type(found) is MethodType else found
    if getattr(function, ASYNC_ATTRIBUTE, None) is not None:
        if not hasattr(result, "add_done_callback"):
            raise _no_future(found, result)
        return Later(result)
    return result


@for_agents
@shown_as(lambda _: "RRef.backward()")
def run_backward(rref: tuple[int, ...], context: int, retain_graph: bool) -> None:
    """See `RRef.backward`."""
    value = _value_of(current_agent(), serving_peer.get(), rref)
    _run_backward(context, value, retain_graph)


CUT_OUTSIDE_CONTEXT = frozenset(
    f"{function.__module__}:{function.__name__}" for function in (fetch,)
)
"""Calls that are not recorded outside a context: what they fetch outlives them."""

_in_context: list[Backward] = []


def set_backward(backward: Backward) -> None:
    """For the layer that knows contexts: how to run a pass over one."""
    _in_context[:] = [backward]


def _check_context(context: Any) -> int:
    if type(context) is bool or not hasattr(context, "__index__"):
        raise TypeError(
            "dist_autograd_ctx_id must be a context or its id, an int; found "
            f"{type(context).__name__}"
        )
    if (found := operator.index(context)) < -1:
        raise UnknownContext(f"there is no context {found}")
    return found


def _run_backward(context: int, root: Any, retain_graph: bool) -> None:
    if not isinstance(root, Tensor):
        raise UsageError(
            "RRef should contain a tensor for .backward(), found a value of type "
            f"{type(root).__name__}"
        )
    if context < 0:
        torch.autograd.backward(root, retain_graph=retain_graph)
    elif _in_context:
        _in_context[0](context, root, retain_graph)
    else:
        raise UsageError("contexts need gradwire.autograd, which was not imported")


def _value_of(agent: Agent, asker: Peer | None, rref: tuple[int, ...]) -> Any:
    outcome = _find(agent, rref).outcome
    # The call that makes it may never come, but whoever asks does not live for ever.
    while not (outcome.done or outcome.wait(_LOOK_S)):
        if asker is not None and asker.fate is not None:
            raise asker.error()
    return outcome.value if outcome.error is None else outcome.result()


def _find(agent: Agent, rref: tuple[int, ...]) -> Owned:
    if [*map(type, rref)] != _TYPES_OF_ID:
        raise DecodeError("the id of an RRef must be three ints")
    owned: Owned = agent.layers[_Service].find(tuple(rref))
    return owned


def made_by(rref: RRef[Any]) -> int:
    """Rank of the worker that had the value made; the owner's if it was its own idea."""
    return rref._ref.id.created_on


def _service_of(agent: Agent) -> RefService:
    service: RefService = agent.layers[_Service]
    return service


class _Service(RefService):
    handle_class = RRef


register_interceptor(_Service)
