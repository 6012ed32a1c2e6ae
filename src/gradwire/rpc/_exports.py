"""What others may call where parties do not trust each other.

With ``serializer="safe"`` a request names what it wants, and the name is looked up in a
table that this process has filled itself: no module is imported, and no attribute looked
up, because a message says so.

Of a class that is exported, others may make instances, which stay here, and call the
public methods that the class itself defines. Methods that it inherits belong to the
class that defines them: they can be called if that one is exported too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, overload

from gradwire._ids import check_worker_name
from gradwire.errors import NotExported
from gradwire.wire import name_of

__all__ = [
    "Exports",
    "export",
    "exports",
    "for_agents",
    "methods_for_agents",
]

T = TypeVar("T", bound=Callable[..., Any])

_OWN = "gradwire."
_OWN_CLASSES = frozenset(
    {
        ("gradwire._ids", "WorkerInfo"),
        ("gradwire.nn._remote_module", "RemoteModule"),
        ("gradwire.nn._remote_module", "_rebuild"),
        ("gradwire.optim._protocol", "Mark"),
        ("gradwire.rpc._rref_parts", "Packed"),
        ("gradwire.rpc._rref_table", "RefId"),
    }
)
_MAX_NAME = 256


class _Entry(NamedTuple):
    target: Callable[..., Any]
    peers: frozenset[str] | None  # None: everybody

    def is_for(self, peer: str) -> bool:
        return self.peers is None or peer in self.peers


class Exports:
    """Names and what they stand for.

    Filled while modules are imported, read by any thread; every step is one operation
    on a dictionary.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._names: dict[Any, str] = {}
        self._classes: dict[type, list[_Entry]] = {}
        # What agents ask of each other; programs cannot add to it.
        self._own: dict[str, Callable[..., Any]] = {}
        self._own_methods: dict[type, frozenset[str]] = {}

    def add(
        self, target: Callable[..., Any], name: str | None, peers: Iterable[str] | None
    ) -> None:
        """Enters something under a name; see `export`."""
        if not callable(target):
            raise TypeError(
                f"only functions and classes can be exported, not {type(target).__name__}"
            )
        name = _default_name(target) if name is None else _check_name(name)
        entry = _Entry(target, _check_peers(peers))
        known = self._entries.get(name)
        if known is not None and not _is_same(known.target, target):
            raise ValueError(
                f"{name!r} is exported already, as {known.target!r}; give "
                f"{target!r} another name: export(name=...)"
            )
        self._entries[name] = entry
        self._names.setdefault(target, name)
        if isinstance(target, type):
            entries = self._classes.setdefault(target, [])
            entries[:] = [*(e for e in entries if e is not known), entry]

    def add_own(self, function: Callable[..., Any]) -> None:
        """Enters a function of gradwire that agents call on each other."""
        self._own[f"{function.__module__}:{function.__qualname__}"] = function

    def add_own_methods(self, cls: type, names: Iterable[str]) -> None:
        """Enters methods of a class of gradwire."""
        self._own_methods[cls] = frozenset(names)

    def is_own(self, module: str, qualname: str) -> bool:
        """Whether agents call this on each other, or send it."""
        return f"{module}:{qualname}" in self._own or (module, qualname) in _OWN_CLASSES

    def name(self, target: Callable[..., Any] | str) -> str | None:
        """Under which name a caller asks for something; None if it has none."""
        if type(target) is str:
            return target
        try:
            known = self._names.get(target)
        except TypeError:  # not hashable
            known = None
        return known or name_of(target)  # type: ignore[arg-type]

    def find(self, name: str, caller: str, worker: str) -> Callable[..., Any]:
        """What a name stands for.

        Args:
            name: The name, from a message.
            caller: The worker that asks.
            worker: This one.

        Raises:
            NotExported: Nothing of this name, or not for this caller.
        """
        own = self._own.get(name)
        if own is not None:
            return own
        return self.find_exported(name, caller, worker)

    def find_exported(self, name: str, caller: str, worker: str) -> Callable[..., Any]:
        """As `find`, without what agents ask of each other."""
        entry = self._entries.get(name)
        if entry is None or not (caller == worker or entry.is_for(caller)):
            raise NotExported(
                f"worker {caller!r} asked for {name[:_MAX_NAME]!r}, which worker "
                f"{worker!r} has not exported to it. With serializer='safe' only exported "
                f"functions and classes can be called: put @gradwire.rpc.export above its "
                f"definition, or call gradwire.rpc.export(...), on worker {worker!r}; with "
                "peers=[...], if that is given, the caller must be among them. (What "
                "gradwire.nn and gradwire.optim need is there once it has imported them)",
                worker=worker,
            )
        return entry.target

    def method(
        self, value: object, name: str, caller: str, worker: str
    ) -> Callable[..., Any]:
        """A method of a value of ours; ``__call__`` means the value itself.

        Raises:
            NotExported: Not one that the caller may use.
        """
        cls = type(value)
        if type(name) is str:
            own = self._own_methods.get(cls)
            if own is not None and name in own:
                return getattr(value, name)  # type: ignore[no-any-return]
            if name == "__call__":
                if callable(value) and self.is_exported(cls, caller, worker):
                    return value
            elif not name.startswith("_"):
                for base in cls.__mro__:
                    found = vars(base).get(name)
                    if found is None:
                        continue
                    if _is_method(found) and self.is_exported(base, caller, worker):
                        # Not by `getattr`: what an instance has beside is no method.
                        return found.__get__(value, cls)  # type: ignore[no-any-return]
                    break
        raise NotExported(
            f"worker {caller!r} asked for {str(name)[:_MAX_NAME]!r} of a value of class "
            f"{cls.__module__}.{cls.__qualname__} on worker {worker!r}. With "
            "serializer='safe' only public methods can be called, and only if the class "
            "that defines them is exported to the caller: put @gradwire.rpc.export above "
            f"the class on worker {worker!r}. Attributes cannot be read",
            worker=worker,
        )

    def check_class(self, value: object, caller: str, worker: str) -> None:
        """Raises if the class of a value is not exported to a worker."""
        cls = type(value)
        if not self.is_exported(cls, caller, worker):
            raise NotExported(
                f"worker {caller!r} asked for something of a value of class "
                f"{cls.__module__}.{cls.__qualname__}, which worker {worker!r} has not "
                "exported to it: put @gradwire.rpc.export above the class there",
                worker=worker,
            )

    def is_exported(self, cls: type, caller: str, worker: str) -> bool:
        """Whether a class is exported to a worker; the own one need not be named."""
        entries = self._classes.get(cls, ())
        return any(caller == worker or entry.is_for(caller) for entry in entries)


exports = Exports()
"""Those of this process. (Not of an agent: modules are imported before there is one.)"""


@overload
def export(target: T, /) -> T: ...


@overload
def export(
    target: T, /, *, name: str | None = None, peers: Iterable[str] | None = None
) -> T: ...


@overload
def export(
    *, name: str | None = None, peers: Iterable[str] | None = None
) -> Callable[[T], T]: ...


def export(
    target: T | None = None,
    /,
    *,
    name: str | None = None,
    peers: Iterable[str] | None = None,
) -> T | Callable[[T], T]:
    """Lets other workers call a function or use a class, with ``serializer="safe"``.

    Callers pass the function itself, if they have it too, or its name. Of a class they
    can make instances with `gradwire.rpc.remote`, and call the public methods that the
    class defines through the reference. Without effect with ``serializer="pickle"``.

    Args:
        target: The function or class.
        name: Its name for others; by default ``"module:qualified.name"``.
        peers: Names of the workers that may use it; by default all of the group.

    Returns:
        ``target``, so that this can be a decorator.

    Raises:
        ValueError: The name is taken, or there is none.

    Example:
        >>> @export(name="scale", peers=["hospital"])
        ... def scale(x):
        ...     return 2 * x
        >>> _ = export(torch.add)  # anything that can be called
    """
    if target is None:

        def decorate(target: T) -> T:
            exports.add(target, name, peers)
            return target

        return decorate
    exports.add(target, name, peers)
    return target


def for_agents(function: T) -> T:
    """Marks a function of gradwire that agents call on each other."""
    exports.add_own(function)
    return function


def methods_for_agents(*names: str) -> Callable[[type], Any]:
    """Marks a class of gradwire whose instances are called through references."""

    def decorate(cls: Any) -> Any:
        exports.add_own_methods(cls, names)
        return cls

    return decorate


def _default_name(target: Callable[..., Any]) -> str:
    if isinstance(target, (FunctionType, type)):
        # Its module does not have it yet if this is a decorator: do not look.
        module, qualname = target.__module__, target.__qualname__
        name = f"{'__main__' if module == '__mp_main__' else module}:{qualname}"
        if "<" not in qualname:
            return _check_name(name)
    else:
        found = name_of(target)
        if found is not None:
            return _check_name(found)
    raise ValueError(f"{target!r} has no name of its own; use export(name=...)")


def _check_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise ValueError(
            f"name must be 1 to {_MAX_NAME} printable characters, found {name[:40]!r}"
        )
    if name.startswith(_OWN):
        raise ValueError(f"names that begin with {_OWN!r} are taken, found {name!r}")
    return name


def _check_peers(peers: Iterable[str] | None) -> frozenset[str] | None:
    if peers is None:
        return None
    if isinstance(peers, str):
        raise TypeError(f"peers must be a list of names of workers, found {peers!r}")
    return frozenset(check_worker_name(peer) for peer in peers)


def _is_same(known: Any, target: Any) -> bool:
    """Whether this is the same thing, or a module that defines it was imported again."""
    if known is target:
        return True
    if getattr(known, "__module__", None) is None:
        return False
    return (known.__module__, getattr(known, "__qualname__", known)) == (
        getattr(target, "__module__", None),
        getattr(target, "__qualname__", target),
    )


def _is_method(found: object) -> bool:
    return isinstance(found, (FunctionType, staticmethod, classmethod))
