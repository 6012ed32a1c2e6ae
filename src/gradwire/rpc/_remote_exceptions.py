"""Exceptions that cross the wire: described on one worker, rebuilt on another.

A rebuilt exception is an instance of its own class *and* of `RemoteError`: a class made
for the purpose inherits from both, so ``except MyError`` works, attributes are all
there, and ``str`` also tells the worker and the traceback there. Where that is not
possible, an instance of its own class with the facts as attributes comes; where even
that is not possible, a plain `RemoteError` with the text.
"""

from __future__ import annotations

import functools
import pickle
import traceback
from typing import Any, cast

from gradwire.errors import RemoteError

__all__ = ["describe", "rebuild"]

Description = tuple[str, str, str, str, "bytes | None"]
"""Worker, qualified name of the class, text, traceback, pickled exception or None."""


def describe(error: BaseException, worker: str) -> Description:
    """What is sent of an exception that was raised on ``worker``."""
    if isinstance(error, RemoteError) and error.worker is not None:
        worker = error.worker  # it only passes through here
    original = _original_type(type(error))
    name = f"{original.__module__}.{original.__qualname__}"
    text = "".join(traceback.format_exception(error))
    return worker, name, _safe_str(error), text, _pickled(error)


def rebuild(description: Description) -> BaseException:
    """The exception to raise on the caller."""
    worker, name, message, trace, data = description
    if data is not None:
        try:
            error = pickle.loads(data)
        except Exception:  # the class cannot be imported here, or refuses
            error = None
        if isinstance(error, Exception):
            return _mark(error, worker, name, trace)
    error = RemoteError(f"{name}: {message}" if message else name)
    error.worker, error.remote_type, error.remote_traceback = worker, name, trace
    return error


def _safe_str(error: BaseException) -> str:
    try:
        return (
            BaseException.__str__(error)
            if isinstance(error, RemoteError)
            else str(error)
        )
    except Exception:
        return f"<{type(error).__name__} whose text cannot be made>"


def _pickled(error: BaseException) -> bytes | None:
    # Only what also comes back is worth sending: many exception classes can be pickled
    # but not unpickled. Exits and interrupts must not end the caller: they go as text.
    if not isinstance(error, Exception):
        return None
    own = getattr(error, "_gradwire_original", None)
    if isinstance(own, bytes):
        return own
    try:
        data = pickle.dumps(error, protocol=5)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _mark(error: Exception, worker: str, name: str, trace: str) -> Exception:
    if isinstance(error, RemoteError):
        marked = error
    else:
        try:
            marked = _as_remote(error)
            marked._gradwire_original = pickle.dumps(error, protocol=5)  # type: ignore[attr-defined]
        except Exception:
            # The class cannot be combined with ours: at least nothing is lost.
            error.worker, error.remote_type = worker, name  # type: ignore[attr-defined]
            error.remote_traceback = trace  # type: ignore[attr-defined]
            if hasattr(error, "add_note"):
                error.add_note(f"Raised on worker {worker!r}:\n{trace.rstrip()}")
            return error
    marked.worker, marked.remote_type, marked.remote_traceback = worker, name, trace
    return marked


def _as_remote(error: Exception) -> RemoteError:
    """The same exception, as an instance of both its class and `RemoteError`."""
    cls = _remote_class(cast(Any, type(error)))
    reduced = error.__reduce_ex__(2)
    if isinstance(reduced, str) or reduced[0] is not type(error):
        marked: RemoteError = cls.__new__(cls, *error.args)
        marked.args = error.args
        marked.__dict__.update(error.__dict__)
        return marked
    marked = _construct(cls, reduced[1])
    if len(reduced) > 2 and reduced[2] is not None:
        setstate = getattr(marked, "__setstate__", None)
        if setstate is not None:
            setstate(reduced[2])
        else:
            marked.__dict__.update(reduced[2])
    return marked


def _construct(cls: type[RemoteError], args: tuple[Any, ...]) -> RemoteError:
    # `RemoteError` comes first in the method order, but the arguments are those of the
    # user's class.
    instance: RemoteError = cls.__new__(cls, *args)
    _original_type(cls).__init__(instance, *args)
    return instance


@functools.lru_cache(maxsize=256)
def _remote_class(original: Any) -> type[RemoteError]:
    return type(
        original.__name__,
        (RemoteError, original),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__str__": _text_with_traceback,
            "__reduce_ex__": _reduce,
            "_gradwire_original_type": original,
        },
    )


def _original_type(cls: type[BaseException]) -> type[BaseException]:
    return cls.__dict__.get("_gradwire_original_type", cls)  # type: ignore[no-any-return]


def _text_with_traceback(self: RemoteError) -> str:
    text = _original_type(type(self)).__str__(self)
    return (
        f"{text}\n\nRaised on worker {self.worker!r}:\n{self.remote_traceback.rstrip()}"
    )


def _reduce(self: RemoteError, protocol: int) -> tuple[Any, ...]:
    facts = (self.worker, self.remote_type, "", self.remote_traceback)
    return rebuild, ((*facts, self._gradwire_original),)  # type: ignore[attr-defined]
