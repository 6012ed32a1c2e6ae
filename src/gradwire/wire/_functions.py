"""Functions travel by name: ``"package.module:qualified.name"``.

``name_of`` gives a name only if looking it up leads back to the very same object, so the
callee runs what the caller meant. Whatever has no such name (a bound method, a partial, a
local function) is left to the pickler, which may or may not be able to send it.
"""

from __future__ import annotations

import importlib
import sys
from functools import reduce
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

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

# Names that took a search, by object. Only holds builtins, which live as long as their
# modules; each name is verified again whenever it is used.
_found_names: dict[Any, str] = {}


def name_of(function: Callable[..., Any]) -> str | None:
    """The name under which a callee finds this very function, or None.

    Example:
        >>> name_of(torch.add)
        'torch:add'
        >>> name_of(lambda x: x) is None
        True
    """
    kind = type(function)
    if kind is FunctionType or kind is type:
        return _verified(function, function.__module__, function.__qualname__)
    if kind is BuiltinFunctionType:
        return _name_of_builtin(function)
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
    name: str, find: Callable[[str, str], Any] | None = None
) -> Callable[..., Any]:
    """Finds the function that a name stands for, importing its module if needed.

    Args:
        name: The name.
        find: Finds a global, or refuses it; by default `find_global`.

    Raises:
        DecodeError: If there is no such function here.
    """
    module, separator, qualname = name.partition(":")
    if not separator or not module or not qualname:
        raise DecodeError(
            f"the name of a function must look like 'module:name', found {name!r}"
        )
    function = (find or find_global)(module, qualname)
    if not callable(function):
        raise DecodeError(
            f"{qualname!r} in module {module!r} should be a function, but is of type "
            f"{type(function).__name__} on this worker"
        )
    return function  # type: ignore[no-any-return]


def find_global(module: str, qualname: str) -> Any:
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
        f"cannot find {qualname!r} of module {module!r} on this worker "
        f"({type(cause).__name__}: {cause}). Functions and classes travel by name, not by "
        "code: this worker must be able to import them under the same name"
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


def _name_of_builtin(function: Callable[..., Any]) -> str | None:
    known = _found_names.get(function)
    if known is not None:
        module, _, qualname = known.partition(":")
        name = _verified(function, module, qualname)
        if name is not None:
            return name
    for module, qualname in _places_of_builtin(function):
        name = _verified(function, module, qualname)
        if name is not None:
            _found_names[function] = name
            return name
    return None


def _places_of_builtin(function: Callable[..., Any]) -> list[tuple[str, str]]:
    places = [(function.__module__, function.__qualname__)]
    places += [(module.__name__, function.__name__) for module in _TORCH_MODULES]
    return places
