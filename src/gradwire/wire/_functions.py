"""Functions travel by name: ``"package.module:qualified.name"``.

``name_of`` gives a name only if looking it up leads back to the very same object, so the
callee runs what the caller meant. Whatever has no such name (a bound method, a partial, a
local function) is left to the pickler, which may or may not be able to send it.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from functools import reduce
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradwire.errors import DecodeError
from gradwire.wire._torch_private import OPERATOR_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["find_global", "name_of", "resolve"]

# The script that was started is __main__; a process that multiprocessing spawned has it
# as __mp_main__ too. Both names mean "your script" to the other side.
_MAIN_MODULES = ("__main__", "__mp_main__")

# Where to look for functions of torch whose own idea of their name leads nowhere.
_TORCH_MODULES: tuple[ModuleType, ...] = (
    torch,
    torch.nn.functional,
    torch.linalg,
    torch.special,
    torch.fft,
    torch.sparse,
)


class _Place(NamedTuple):
    """Where a function was found; it is looked for there first when it is needed again."""

    name: str
    module_name: str
    module: ModuleType
    attribute: str

    def holds(self) -> Any:
        """What is there now; None if the module is another one, or has no such thing."""
        if sys.modules.get(self.module_name) is not self.module:
            return None
        return getattr(self.module, self.attribute, None)


_MOST_PLACES = 4096
_places: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()
_places_by_name: dict[str, _Place] = {}


def name_of(function: Callable[..., Any]) -> str | None:
    """The name under which a callee finds this very function, or None.

    Example:
        >>> name_of(torch.add)
        'torch:add'
        >>> name_of(lambda x: x) is None
        True
    """
    kind = type(function)
    if kind is FunctionType or kind is BuiltinFunctionType:
        place = _places.get(function)
        if place is not None and place.holds() is function:
            return place.name
        return _search(function)
    if kind is type:
        return _verified(function, function.__module__, function.__qualname__)
    if isinstance(function, OPERATOR_TYPES):
        return _verified(function, "torch", f"ops.{function}")
    if kind is MethodType:
        return _name_of_class_method(function)
    owner = getattr(function, "__objclass__", None)
    if owner is not None:
        # Methods of builtin classes, such as torch.Tensor.add.
        return _verified(
            function, owner.__module__, f"{owner.__qualname__}.{function.__name__}"
        )
    return _verified(
        function,
        getattr(function, "__module__", None),
        getattr(function, "__qualname__", None),
    )


def resolve(
    name: str,
    find: Callable[[str, str], Any] | None = None,
    here: str = "this worker",
) -> Callable[..., Any]:
    """Finds the function that a name stands for, importing its module if needed.

    Args:
        name: The name.
        find: Finds a global, or refuses it; by default `find_global`.
        here: This worker, for texts.

    Raises:
        DecodeError: If there is no such function here.
    """
    if find is None and (place := _places_by_name.get(name)) is not None:
        known = place.holds()
        if callable(known):
            return known  # type: ignore[no-any-return]
    module, separator, qualname = name.partition(":")
    if not separator or not module or not qualname:
        raise DecodeError(
            f"the name of a function must look like 'module:name', found {name!r}"
        )
    function = find(module, qualname) if find else find_global(module, qualname, here)
    if not callable(function):
        raise DecodeError(
            f"{qualname!r} in module {module!r} should be a function, but is of type "
            f"{type(function).__name__} on {here}"
        )
    place = None if find else _place_of(function, name, module, qualname)
    if place is not None:
        if len(_places_by_name) >= _MOST_PLACES:
            _places_by_name.clear()
        _places_by_name[name] = place
    return function  # type: ignore[no-any-return]


def find_global(module: str, qualname: str, here: str = "this worker") -> Any:
    """Finds ``qualname`` in a module, importing the module if needed.

    Raises:
        DecodeError: If the module cannot be imported or does not have it.
    """
    candidates = _MAIN_MODULES if module in _MAIN_MODULES else (module,)
    cause: Exception | None = None
    for candidate in candidates:
        loaded = sys.modules.get(candidate)
        try:
            if loaded is None:
                loaded = importlib.import_module(candidate)
            try:
                return _look_up(loaded, qualname)
            except AttributeError:
                # Another thread may still be importing it: this waits for that.
                return _look_up(importlib.import_module(candidate), qualname)
        except Exception as error:
            # The first one tells more: __mp_main__ mostly does not exist at all.
            cause = cause or error
    raise DecodeError(
        f"cannot find {qualname!r} of module {module!r} on {here} "
        f"({type(cause).__name__}: {cause}). Functions and classes travel by name, not by "
        f"code: {here} must be able to import them under the same name"
    ) from cause


def _look_up(module: ModuleType, qualname: str) -> Any:
    if "." not in qualname:
        return getattr(module, qualname)
    return reduce(getattr, qualname.split("."), module)


def _verified(function: object, module: str | None, qualname: str | None) -> str | None:
    """``module:qualname`` if that leads back to ``function``."""
    loaded = sys.modules.get(module) if isinstance(module, str) else None
    if loaded is None or not isinstance(qualname, str):
        return None
    found: Any = loaded
    try:
        for part in qualname.split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    # Methods of classes are made anew by each lookup: those can only be equal.
    if found is function or (type(function) is MethodType and found == function):
        return f"{'__main__' if module == '__mp_main__' else module}:{qualname}"
    return None


def _name_of_class_method(method: Callable[..., Any]) -> str | None:
    owner = getattr(method, "__self__", None)
    if not isinstance(owner, type):
        return None
    return _verified(
        method, owner.__module__, f"{owner.__qualname__}.{method.__name__}"
    )


def _search(function: Callable[..., Any]) -> str | None:
    """The name of a plain or builtin function, whose place is then known."""
    candidates = [(function.__module__, function.__qualname__)]
    if type(function) is BuiltinFunctionType:
        # Those of torch have odd ideas of where they are.
        candidates += [(m.__name__, function.__name__) for m in _TORCH_MODULES]
    for module, qualname in candidates:
        name = _verified(function, module, qualname)
        if name is not None:
            place = _place_of(function, name, module, qualname)
            if place is not None:
                _places[function] = place
            return name
    return None


def _place_of(
    function: Callable[..., Any], name: str, module: str, qualname: str
) -> _Place | None:
    """Where a function is, unless it is inside of a class."""
    for candidate in _MAIN_MODULES if module in _MAIN_MODULES else (module,):
        loaded = sys.modules.get(candidate)
        if loaded is not None:
            place = _Place(name, candidate, loaded, qualname)
            if place.holds() is function:
                return place
    return None
