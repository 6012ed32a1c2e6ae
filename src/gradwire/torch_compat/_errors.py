"""Errors as programs for torch expect them.

Torch raises ``RuntimeError`` for whatever goes wrong in a call, except for a ``TypeError``
or ``ValueError`` of the function that was called. Ours keep their own types, so that
``except MyError`` works, and are also a ``RuntimeError``. Where programs look for words
of torch's in the text, these come first.
"""

from __future__ import annotations

import contextlib
import functools
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    TracebackType,
)
from typing import Any

import torch

from gradwire.errors import (
    DeadlineExceeded,
    DecodeError,
    EncodeError,
    RemoteError,
    UsageError,
)
from gradwire.torch_compat import _core

__all__ = ["as_torch_error", "operator_or_none", "torch_errors"]

_TORCH_RAISES = (RuntimeError, ValueError, TypeError)

_WORDS: dict[type[Exception], dict[str, str]] = {
    EncodeError: {"futures cannot be sent": "Can not pickle torch.futures.Future"},
    DecodeError: {
        "cannot find": "Default RPC pickler does not serialize function code"
    },
    UsageError: {
        "must return a torch.futures.Future": (
            "Functions decorated with @rpc.async_function must return a "
            "torch.futures.Future object, but got something else"
        ),
        "two workers are called": "the name is not unique",
    },
}
"""Words in texts of ours, and those of torch in the same case."""


def as_torch_error(error: BaseException, words: str = "") -> BaseException:
    """The same error, of a class that torch could have raised too.

    Args:
        error: Ours.
        words: What torch would say first.
    """
    if not isinstance(error, Exception) or hasattr(error, "_torch_words"):
        return error
    words = words or _words_for(error)
    if not words and isinstance(error, _TORCH_RAISES):
        return error
    return _twin_of(type(error), error.args, error.__dict__, words, error)


class torch_errors:
    """Errors that leave this block are as torch's.

    A class: a generator cannot let a ``StopIteration`` out.

    Args:
        function: What is called in it.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Any = None) -> None:
        self._function = function

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        words = ""
        if isinstance(error, TypeError) and _is_operator(self._function):
            words = "Overloaded torch operator invoked from Python failed to match any schema"
        translated = as_torch_error(error, words)
        if translated is error:
            return
        # A fresh error, so that no frame refers to an exception that refers to it.
        try:
            raise translated from error.__cause__
        finally:
            del translated


def operator_or_none(function: Any) -> Any:
    """What to keep of a function that is called, until it is known whether it fails.

    The table of operators takes a while to make, so it is looked at only then.
    """
    is_plain = isinstance(function, (BuiltinFunctionType, FunctionType))
    return function if is_plain else None  # a method would keep its object alive


def _is_operator(function: Any) -> bool:
    return torch.jit._builtins._find_builtin(function) is not None  # type: ignore[no-untyped-call]


def _words_for(error: Exception) -> str:
    if isinstance(error, DeadlineExceeded):
        return "RPCErr:1:RPC ran for more than set timeout and is marked with an error"
    for cls, words in _WORDS.items():
        if isinstance(error, cls):
            text = str(error.args[0]) if error.args else ""
            for ours, theirs in words.items():
                if ours in text:
                    return theirs
    if isinstance(error, RemoteError) and not isinstance(error, _TORCH_RAISES):
        return f"Original exception on remote side was {error.remote_type}"
    return ""


def _twin_of(
    cls: type[Exception],
    args: tuple[Any, ...],
    state: dict[str, Any],
    words: str,
    original: Exception | None = None,
) -> Exception:
    # Past `__setattr__` of the class, which may refuse.
    put = BaseException.__setattr__
    twin: Exception
    try:
        twin_class: type[Exception] = _also_runtime_error(cls)  # type: ignore[arg-type]
        twin = twin_class.__new__(twin_class, *args)
        put(twin, "args", args)
        _fill_in(twin, cls, args, original)
    except Exception:  # two layouts that do not go together, or a class that refuses
        text = f"{cls.__name__}: {_plain_text(args if original is None else original)}"
        twin = RuntimeError(f"{words}: {text}" if words else text)
    twin.__dict__.update(state)
    twin.__dict__["_torch_words"] = words
    if original is not None:
        for name in ("__cause__", "__context__", "__suppress_context__"):
            put(twin, name, getattr(original, name))
        put(twin, "__traceback__", original.__traceback__)
    return twin


def _fill_in(
    twin: Exception,
    cls: type[Exception],
    args: tuple[Any, ...],
    original: Exception | None,
) -> None:
    """Sets what the builtin classes below keep beside ``args``, such as an errno."""
    builtins = [c for c in cls.__mro__ if not c.__flags__ & _HEAP_TYPE]
    builtins[0].__init__(twin, *args)  # type: ignore[misc]
    if original is None:
        return
    for field in (field for c in builtins for field in vars(c).values()):
        # One that was never set reads as None; set to that, it would show in texts.
        if (
            isinstance(field, MemberDescriptorType)
            and field.__get__(original) is not None
        ):
            with contextlib.suppress(AttributeError, TypeError):  # it cannot be set
                field.__set__(twin, field.__get__(original))


_HEAP_TYPE = 1 << 9  # flag of classes that were made by Python code


def _plain_text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return "its text cannot be made"


@functools.lru_cache(maxsize=256)
def _also_runtime_error(cls: Any) -> type[Exception]:
    bases: tuple[type[Exception], ...] = (cls, RuntimeError)
    if issubclass(cls, RuntimeError):
        bases = (cls,)
    elif issubclass(RuntimeError, cls):
        bases = (RuntimeError,)
    return type(
        cls.__name__,
        bases,
        {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__str__": _text,
            "__reduce_ex__": _reduce,
            "_torch_twin_of": cls,
            **_core.remote_origin(cls),
        },
    )


def _text(self: Any) -> str:
    text = self._torch_twin_of.__str__(self)
    return f"{self._torch_words}: {text}" if self._torch_words else text


def _reduce(self: Any, protocol: int) -> Any:
    cls = self._torch_twin_of
    if _core.remote_origin(cls):  # it knows itself how to travel
        return cls.__reduce_ex__(self, protocol)
    state = {key: self.__dict__[key] for key in self.__dict__ if key != "_torch_words"}
    return _twin_of, (cls, self.args, state, self._torch_words)
