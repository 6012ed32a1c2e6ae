"""What a `RemoteModule` asks of the worker that has the module; runs there."""

from __future__ import annotations

import enum
import inspect
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradwire.nn._access import (
    attribute_of,
    check_writable,
    method_of,
    module_to_call,
    module_to_manage,
)
from gradwire.rpc import Future, RRef, get_worker_info, rpc_sync
from gradwire.rpc.extension import current_agent, for_agents, serving_peer, shown_as
from gradwire.wire import move

__all__ = [
    "Answer",
    "Kind",
    "Loaded",
    "StandIn",
    "call_method",
    "call_on_device",
    "change_dtypes",
    "create_module",
    "find_dtypes",
    "find_firsts",
    "get_attribute",
    "list_parameters",
    "load_state",
    "read_state",
    "set_attribute",
]

_OF_PARAMETERS = frozenset(("requires_grad_", "zero_grad"))
"""Methods of modules that go through all parameters."""

ParameterRef = RRef[Tensor]
Metadata = Mapping[str, dict[str, Any]]


class StandIn:
    """Marks modules whose parameters are on another worker."""

    @abstractmethod
    def remote_named_parameters(self, recurse: bool = True) -> dict[str, ParameterRef]:
        """References to them, by name."""

    @abstractmethod
    def _find_dtypes(self) -> set[torch.dtype]:
        """The dtypes of all that the real module is made of."""


class Kind(enum.IntEnum):
    """What an attribute or a result is, and so what comes in its place."""

    VALUE = enum.auto()
    """Comes as it is."""
    ITSELF = enum.auto()
    """The module itself; comes as the device that it is on."""
    MODULE = enum.auto()
    """Another module; comes as a reference."""
    METHOD = enum.auto()
    """Something to be called; does not come."""


Answer = tuple[int, Any]
"""An attribute or a result of a module, on its way: what it is, and what comes."""

Loaded = tuple[list[str], list[str], list[str]]
"""What loading a state has found: missing names, unexpected ones, and errors.

As in torch, all names have their prefixes.
"""


@for_agents
def create_module(
    module_cls: Callable[..., nn.Module] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
) -> nn.Module:
    """Makes the module; its class is named where nothing is unpickled."""
    if isinstance(module_cls, str):
        module_cls = current_agent().targets.find_class(module_cls, serving_peer.get())
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of "
            f"<class nn.Module>, but it returns an instance of {type(module)}"
        )
    return module.to(device)


# ------------------------------------------------------------------- calls, attributes


@for_agents
@shown_as(lambda _: "a remote module")
def call_on_device(
    rref: RRef[nn.Module], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a module whose tensors are not on the CPU; messages are."""
    args, kwargs = move((args, kwargs), device)
    return move(module_to_call(rref)(*args, **kwargs), "cpu")


@for_agents
@shown_as(lambda args: f"the method {args[2]!r} of a remote module")
def call_method(
    rref: RRef[nn.Module],
    device: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Answer | Coroutine[Any, Any, Answer]:
    """Calls a method; what it awaits is awaited here."""
    module = module_to_call(rref)
    if device != "cpu":
        args, kwargs = move((args, kwargs), device)
    result = method_of(rref, name)(*args, **kwargs)
    if name in _OF_PARAMETERS:
        # Torch asks the tensors that are here; parts on other workers are modules, too.
        for part in module.modules():
            if isinstance(part, StandIn):
                getattr(part, name)(*args, **kwargs)
    if isinstance(result, torch.futures.Future) and not isinstance(result, Future):
        result = _make_awaitable(result)
    if inspect.isawaitable(result):
        return _answer_later(module, device, result)
    return _answer(module, device, result)


@for_agents
def get_attribute(rref: RRef[nn.Module], device: str, name: str) -> Answer:
    """Reads an attribute."""
    found = attribute_of(rref, name)
    if callable(found) and not isinstance(found, nn.Module):
        return Kind.METHOD.value, None
    return _answer(rref.local_value(), device, found)


@for_agents
def set_attribute(rref: RRef[nn.Module], name: str, value: Any) -> None:
    """Sets an attribute."""
    setattr(check_writable(rref, name), name, value)


def _make_awaitable(future: torch.futures.Future[Any]) -> Future[Any]:
    """One of ours for one of torch's."""
    ours: Future[Any] = Future()

    def finish(done: torch.futures.Future[Any]) -> None:
        try:
            value = done.value()
        except Exception as error:
            ours.set_exception(error)
        else:
            ours.set_result(value)

    future.add_done_callback(finish)
    return ours


async def _answer_later(
    module: nn.Module, device: str, result: Awaitable[Any]
) -> Answer:
    return _answer(module, device, await result)


def _answer(module: nn.Module, device: str, value: Any) -> Answer:
    if value is module:
        now = next((str(tensor.device) for tensor in _tensors(module)), device)
        return Kind.ITSELF.value, now
    if isinstance(value, nn.Module) and not isinstance(value, StandIn):
        return Kind.MODULE.value, RRef(value)
    return Kind.VALUE.value, value if device == "cpu" else move(value, "cpu")


# -------------------------------------------------------------------------- parameters


@for_agents
def list_parameters(
    rref: RRef[nn.Module], recurse: bool
) -> list[tuple[str, ParameterRef]]:
    """References to all parameters, with their names."""
    return list(refer_to_parameters(module_to_manage(rref), recurse).items())


def refer_to_parameters(module: nn.Module, recurse: bool) -> dict[str, ParameterRef]:
    """References to a module's parameters by name, each once, wherever they are."""
    found: dict[str, ParameterRef] = {}
    seen: set[nn.Parameter] = set()
    # By owner: the parts that have told of parameters there. Each has told of none twice.
    parts: dict[str, set[str]] = {}
    for path, part in module.named_modules() if recurse else [("", module)]:
        prefix = f"{path}." if path else ""
        if isinstance(part, StandIn):
            for name, reference in part.remote_named_parameters(recurse).items():
                found[prefix + name] = reference
                parts.setdefault(reference.owner_name(), set()).add(path)
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                found[prefix + name] = RRef(parameter)
    if seen:
        parts.setdefault(get_worker_info().name, set()).add("")
    for owner, tellers in parts.items():
        if len(tellers) > 1:
            _drop_twins(found, owner)
    return found


def _drop_twins(found: dict[str, ParameterRef], owner: str) -> None:
    """Leaves the first of several references to one parameter; only its owner knows."""
    names = [name for name, rref in found.items() if rref.owner_name() == owner]
    rrefs = [found[name] for name in names]
    is_here = owner == get_worker_info().name
    firsts = find_firsts(rrefs) if is_here else rpc_sync(owner, find_firsts, (rrefs,))
    for number in set(range(len(names))).difference(firsts):
        del found[names[number]]


@for_agents
def find_firsts(rrefs: list[ParameterRef]) -> list[int]:
    """The numbers of the first references to each of some values of this worker."""
    numbers: dict[int, int] = {}
    for number, rref in enumerate(rrefs):
        numbers.setdefault(id(rref.local_value()), number)
    return list(numbers.values())


@for_agents
def find_dtypes(rref: RRef[nn.Module]) -> set[torch.dtype]:
    """The dtypes of all that the module is made of, parts on other workers included."""
    module = module_to_manage(rref)
    found = {tensor.dtype for tensor in _tensors(module)}
    for part in module.modules():
        if isinstance(part, StandIn):
            found |= part._find_dtypes()
    return found


@for_agents
def change_dtypes(
    rref: RRef[nn.Module], changes: Mapping[torch.dtype, torch.dtype]
) -> None:
    """Converts tensors of some dtypes to others."""
    module: Any = module_to_manage(rref)
    module._apply(lambda tensor: tensor.to(changes[tensor.dtype]))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        if not isinstance(part, StandIn):
            yield from part.parameters(recurse=False)
            yield from part.buffers(recurse=False)


# ------------------------------------------------------------------------------- state


@for_agents
def read_state(
    rref: RRef[nn.Module], keep_vars: bool
) -> tuple[dict[str, Any], Metadata]:
    """The module's state and what torch notes about it: the versions of the classes."""
    state = module_to_manage(rref).state_dict(keep_vars=keep_vars)
    return move(dict(state), "cpu"), dict(_metadata_of(state))


@for_agents
def load_state(
    rref: RRef[nn.Module],
    prefix: str,
    state: dict[str, Any],
    metadata: Metadata | None,
    is_current: bool,
    assign: bool,
) -> Loaded:
    """Loads a part of a state into a module that is a part of another.

    Args:
        rref: The module.
        prefix: What its names begin with.
        state: All values whose names do.
        metadata: What torch notes about a state, if that is known.
        is_current: If not: whether the state was saved by classes such as these.
        assign: As in torch.
    """
    module = module_to_manage(rref)
    if metadata is None and is_current:
        saved = _metadata_of(module.state_dict())
        metadata = {join(prefix, path): entry for path, entry in saved.items()}
    # Put where it is in the whole, so that all names and texts are those of the whole.
    whole: Any = module
    for name in reversed(prefix.split(".")[:-1]):
        part, whole = whole, nn.Module()
        whole.add_module(name, part)
    values: OrderedDict[str, Any] = OrderedDict(state)
    if metadata is not None:
        values._metadata = metadata  # type: ignore[attr-defined]
    found: list[Any] = []
    errors = []
    hook = whole.register_load_state_dict_post_hook(lambda _, keys: found.append(keys))
    try:
        whole.load_state_dict(values, strict=False, assign=assign)
    except RuntimeError as error:
        # Torch has gone through all of it, and raises what it has collected.
        title, _, text = str(error).partition(":\n\t")
        if not title.startswith("Error(s) in loading state_dict"):
            raise
        errors.append(text)
    finally:
        hook.remove()
    missing, unexpected = found[-1]
    return list(missing), list(unexpected), errors


def join(prefix: str, path: str) -> str:
    """The path of a module that is part of another; as keys of torch's metadata."""
    return prefix + path if path else prefix[:-1]


def _metadata_of(state: Mapping[str, Any]) -> Metadata:
    return cast(Metadata, state._metadata)  # type: ignore[attr-defined]
