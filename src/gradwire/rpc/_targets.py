"""What calls may be about: how a function is named, and what a name leads to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from gradwire.errors import DecodeError, EncodeError
from gradwire.rpc._exports import Exports
from gradwire.rpc._peer import Peer
from gradwire.wire import name_of, resolve

__all__ = [
    "AnyTargets",
    "ExportedTargets",
    "Targets",
    "labels",
    "own_functions",
    "own_names",
    "shown_as",
]

F = TypeVar("F", bound=Callable[..., Any])

labels: dict[str, Callable[[tuple[Any, ...]], str]] = {}
"""By name of a function of gradwire itself: what its calls are for people."""
own_names: dict[Callable[..., Any], str] = {}
"""The names of these functions, which nobody replaces by others."""
own_functions: dict[str | None, Callable[..., Any]] = {}
"""What these names stand for, on every worker and for every peer."""


def shown_as(label: Callable[[tuple[Any, ...]], str]) -> Callable[[F], F]:
    """Has messages say what a call is about, instead of a name that no program has used.

    The function must be one for agents (see `for_agents`), which all may call.

    Args:
        label: Makes that of the arguments.
    """

    def decorate(function: F) -> F:
        name = f"{function.__module__}:{function.__name__}"
        labels[name], own_names[function], own_functions[name] = label, name, function
        return function

    return decorate


class Targets(ABC):
    """The rules of one agent. Where it is asked who calls, None is the worker itself."""

    @abstractmethod
    def name(self, function: Any) -> str | None:
        """How a call names its function; None: the function itself is sent.

        Raises:
            EncodeError: It cannot be called on another worker.
        """

    @abstractmethod
    def find(self, name: str, peer: Peer | None) -> Callable[..., Any]:
        """The function of ours that a peer's call names."""

    @abstractmethod
    def find_class(self, name: str, peer: Peer | None) -> Callable[..., Any]:
        """As `find`; of programs only, no function that agents call for themselves."""

    @abstractmethod
    def method(self, value: Any, name: str, peer: Peer | None) -> Any:
        """What a peer's call through a reference finds: mostly a method."""

    @abstractmethod
    def check_class(self, value: Any, peer: Peer | None) -> None:
        """Raises if a peer has no business with values of this class."""

    @abstractmethod
    def check_callable(self, function: Any) -> None:
        """Raises if a program cannot mean this as a function."""


class AnyTargets(Targets):
    """Workers that trust each other: whatever can be imported, or pickled.

    Args:
        worker: Name of this worker.
        find: Finds a global, or refuses it; None: all are good.
    """

    def __init__(
        self, worker: str, find: Callable[[str, str], Any] | None = None
    ) -> None:
        self._here = f"worker {worker!r}"
        self._find = find

    def name(self, function: Any) -> str | None:
        """See `Targets`."""
        return name_of(function)

    def find(self, name: str, peer: Peer | None) -> Callable[..., Any]:
        """See `Targets`."""
        return resolve(name, self._find, self._here)

    def find_class(self, name: str, peer: Peer | None) -> Callable[..., Any]:
        """See `Targets`."""
        return resolve(name, self._find, self._here)

    def method(self, value: Any, name: str, peer: Peer | None) -> Any:
        """See `Targets`."""
        return getattr(value, name)

    def check_class(self, value: Any, peer: Peer | None) -> None:
        """See `Targets`."""

    def check_callable(self, function: Any) -> None:
        """See `Targets`."""
        if not callable(function):
            hint = (
                "; names can be called with the option serializer='safe' only"
                if isinstance(function, str)
                else ""
            )
            raise TypeError(
                f"function should be callable, found {type(function).__name__}{hint}"
            )


class ExportedTargets(Targets):
    """Parties that do not trust each other: what was exported, by name.

    Args:
        exports: What this process has exported.
        worker: Name of this worker.
    """

    def __init__(self, exports: Exports, worker: str) -> None:
        self._exports = exports
        self._worker = worker

    def name(self, function: Any) -> str:
        """See `Targets`."""
        name = self._exports.name(function)
        if name is None:
            raise EncodeError(
                f"{function!r:.200} cannot be called on another worker: with "
                "serializer='safe' functions are called by the name under which the callee "
                "has exported them (gradwire.rpc.export), and this one has no name that "
                "leads to it, as a lambda, a local function or a bound method. Pass the "
                "name as a str, or call a method through an RRef"
            )
        return name

    def find(self, name: str, peer: Peer | None) -> Callable[..., Any]:
        """See `Targets`."""
        return self._exports.find(_checked(name), self._caller(peer), self._worker)

    def find_class(self, name: str, peer: Peer | None) -> Callable[..., Any]:
        """See `Targets`."""
        caller = self._caller(peer)
        return self._exports.find_exported(_checked(name), caller, self._worker)

    def method(self, value: Any, name: str, peer: Peer | None) -> Any:
        """See `Targets`."""
        return self._exports.method(value, name, self._caller(peer), self._worker)

    def check_class(self, value: Any, peer: Peer | None) -> None:
        """See `Targets`."""
        self._exports.check_class(value, self._caller(peer), self._worker)

    def _caller(self, peer: Peer | None) -> str:
        return self._worker if peer is None else peer.info.name

    def check_callable(self, function: Any) -> None:
        """See `Targets`."""
        if not callable(function) and type(function) is not str:
            raise TypeError(
                "function should be callable, or the name of an exported one, found "
                f"{type(function).__name__}"
            )


def _checked(name: object) -> str:
    if type(name) is not str:
        raise DecodeError("a call without the name of a function arrived")
    return name
