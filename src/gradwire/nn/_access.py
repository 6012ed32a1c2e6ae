"""What a worker may do with a module of another one; runs on the owner.

Workers that trust each other may do anything. With ``serializer="safe"`` the class of the
module must be exported. Then whoever has a reference may call the module, and the public
methods of its class. All the rest of a `RemoteModule` (parameters, state, modes,
conversions, attributes) is for the worker that had the module made, by the name of its
class: a module that the owner has made, and then lets others call, keeps its weights
to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from gradwire.errors import NotExported
from gradwire.rpc import RRef
from gradwire.rpc.extension import Agent, Peer, current_agent, made_by, serving_peer

__all__ = [
    "attribute_of",
    "check_writable",
    "method_of",
    "module_to_call",
    "module_to_manage",
]

# Methods of all modules; what they take is plain data. Not `compile`, whose options can
# name programs to run, nor what takes functions or modules.
_METHODS = frozenset(
    {
        "train",
        "eval",
        "requires_grad_",
        "zero_grad",
        "to",
        "cpu",
        "cuda",
        "float",
        "double",
        "half",
        "bfloat16",
    }
)


def module_to_call(rref: RRef[nn.Module]) -> nn.Module:
    """The module, if the caller may call it.

    Raises:
        NotExported: It may not.
    """
    module = rref.local_value()
    agent = current_agent()
    if agent.is_safe:
        agent.targets.check_class(module, serving_peer.get())
        if not isinstance(module, nn.Module):
            _refuse(agent, serving_peer.get(), "a module", module)
    return module


def module_to_manage(rref: RRef[nn.Module]) -> nn.Module:
    """The module, if the caller may do with it what it likes.

    Raises:
        NotExported: It may not.
    """
    module = module_to_call(rref)
    agent = current_agent()
    if agent.is_safe:
        peer = serving_peer.get()
        if peer is not None and peer.info.id not in (made_by(rref), agent.info.id):
            _refuse(agent, peer, "more than to call it", module)
    return module


def method_of(rref: RRef[nn.Module], name: str) -> Callable[..., Any]:
    """A method of a module, if the caller may call it.

    Raises:
        NotExported: It may not.
    """
    agent = current_agent()
    if agent.is_safe and name in _METHODS:
        return getattr(module_to_manage(rref), name)  # type: ignore[no-any-return]
    found = agent.targets.method(module_to_call(rref), name, serving_peer.get())
    return found  # type: ignore[no-any-return]


def attribute_of(rref: RRef[nn.Module], name: str) -> Any:
    """An attribute of a module, if the caller may read it.

    Raises:
        NotExported: It may not.
    """
    agent = current_agent()
    if not agent.is_safe:
        return getattr(rref.local_value(), name)
    if name in _METHODS:
        return method_of(rref, name)
    module = module_to_call(rref)
    # Not by `getattr`: that may run code, and finds methods of all classes.
    if not name.startswith("_"):
        for place in (vars(module), module._parameters, module._buffers):
            if name in place:
                module_to_manage(rref)
                return place[name]
    return agent.targets.method(module, name, serving_peer.get())


def check_writable(rref: RRef[nn.Module], name: str) -> nn.Module:
    """The module, if the caller may set this attribute of it.

    Raises:
        NotExported: It may not.
    """
    module = module_to_manage(rref)
    agent = current_agent()
    if agent.is_safe and name != "training":
        _refuse(agent, serving_peer.get(), f"to set {str(name)[:80]!r}", module)
    return module


def _refuse(agent: Agent, peer: Peer | None, what: str, module: object) -> NoReturn:
    caller = agent.info.name if peer is None else peer.info.name
    cls = type(module)
    raise NotExported(
        f"worker {caller!r} asked for {what} of a value of class {cls.__module__}."
        f"{cls.__qualname__} on worker {agent.info.name!r}. With serializer='safe' a "
        "module whose class is exported can be called, and its public methods; its "
        "parameters, state and mode are for the worker that had it made (RemoteModule), "
        "and attributes cannot be set. Export a function for what is missing",
        worker=agent.info.name,
    )
