"""Errors as programs for torch expect them.

Torch raises ``RuntimeError`` for whatever goes wrong in a call, except for a ``TypeError``
or ``ValueError`` of the function that was called. Ours keep their own types, so that
``except MyError`` works, and are also a ``RuntimeError``. Where programs look for words
of torch's in the text, these come first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
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

__all__ = ["as_torch_error", "torch_errors"]

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


@contextmanager
def torch_errors(function: Any = None) -> Iterator[None]:
    """Errors that leave this block are as torch's.

    Args:
        function: What is called in it.
    """
    try:
        yield
    except Exception as error:
        words = ""
        if isinstance(error, TypeError) and _is_operator(function):
            words = "Overloaded torch operator invoked from Python failed to match any schema"
        translated = as_torch_error(error, words)
        if translated is error:
            raise
        # A fresh error, so that no frame refers to an exception that refers to it.
        try:
            raise translated from error.__cause__
        finally:
            del translated


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
    try:
        twin_class: type[Exception] = _also_runtime_error(cls)  # type: ignore[arg-type]
        twin: Any = twin_class.__new__(twin_class, *args)
    except TypeError:  # two layouts that do not go together
        twin = RuntimeError(f"{cls.__name__}: {original}")
    twin.__dict__.update(state)
    twin.args = args
    twin._torch_words = words
    if original is not None:
        twin.__cause__, twin.__context__ = original.__cause__, original.__context__
        twin.__suppress_context__ = original.__suppress_context__
        twin.__traceback__ = original.__traceback__
    return twin  # type: ignore[no-any-return]


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
