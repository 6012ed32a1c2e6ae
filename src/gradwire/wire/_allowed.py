"""Which globals pickles and calls may name, if a worker wants only some modules.

Not a sandbox: what is allowed can be called with any arguments. It keeps a peer with the
secret from whatever else happens to be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NoReturn

import torch

from gradwire.errors import DecodeError
from gradwire.wire._functions import find_global

__all__ = ["AllowedModules"]

# What values are rebuilt with; none of these runs code of the caller's choice.
_ALWAYS = frozenset(
    {
        "builtins.bytearray",
        "builtins.complex",
        "builtins.frozenset",
        "builtins.object",
        "builtins.range",
        "builtins.set",
        "builtins.slice",
        "collections.OrderedDict",
        "collections.defaultdict",
        "collections.deque",
        "copyreg._reconstructor",
        "torch.Size",
        "torch.device",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        "torch.nn.parameter.Parameter",
    }
)
_VALUES = (torch.dtype, torch.layout, torch.memory_format)


class AllowedModules:
    """A list of packages and modules.

    Args:
        names: Their names; of a package all modules are meant.
        is_own: Whether something of gradwire's own is there for others.
    """

    def __init__(
        self,
        names: Iterable[str],
        is_own: Callable[[str, str], bool] = lambda module, qualname: False,
    ) -> None:
        self._names = tuple(names)
        self._is_own = is_own

    def find(self, module: str, qualname: str) -> Any:
        """Finds a global.

        Raises:
            DecodeError: It is not there, or not allowed.
        """
        name = f"{module}.{qualname}"
        if name in _ALWAYS:
            return find_global(module, qualname)
        if module.startswith("gradwire."):
            found = find_global(module, qualname)
            if self._is_own(module, qualname):
                return found
        if module in ("builtins", "gradwire.errors", "torch"):
            found = find_global(module, qualname) if "." not in qualname else None
            if isinstance(found, _VALUES):
                return found
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        if not self._has(module):
            self._refuse(name)
        # A name may lead on to another module, which its module has only imported.
        found = None
        parts = qualname.split(".")
        for end in range(1, len(parts) + 1):
            found = find_global(module, ".".join(parts[:end]))
            if not self._is_of_an_allowed_one(found):
                self._refuse(name)
        return found

    def _is_of_an_allowed_one(self, found: Any) -> bool:
        if isinstance(found, ModuleType):
            return self._has(found.__name__)
        home = getattr(found, "__module__", None)
        # Operators of torch do not know where they live; values have no module.
        return not isinstance(home, str) or self._has(home) or home == "_operator"

    def _has(self, module: str) -> bool:
        return any(module == n or module.startswith(f"{n}.") for n in self._names)

    def _refuse(self, name: str) -> NoReturn:
        raise DecodeError(
            f"{name[:200]!r} is not allowed on this worker: its option allowed_modules has "
            f"only {', '.join(map(repr, self._names))}; add the module there if it is to be "
            "used by others"
        )
