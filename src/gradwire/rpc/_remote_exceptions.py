"""Exceptions that cross the wire: described on one worker, rebuilt on another.

A rebuilt exception is an instance of its own class *and* of `RemoteError`: a class made
for the purpose inherits from both, so ``except MyError`` works, attributes are all
there, and ``str`` also tells the worker and the traceback there. Where that is not
possible, an instance of its own class with the facts as attributes comes; where even
that is not possible, a plain `RemoteError` with the text.

Between parties that do not trust each other nothing is pickled: the name of the class and
the text travel, no traceback, and classes are found in a fixed table.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import pickle
import traceback
from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any

from gradwire import errors
from gradwire.errors import DecodeError, RemoteError

__all__ = ["describe", "rebuild"]

Description = tuple[str, str, str, str, "bytes | None"]
"""Worker, qualified name of the class, text, traceback, pickled exception or None."""

BY_NAME = b""
"""In the place of the pickled exception: the class is one of a fixed table."""


def describe(
    error: BaseException, worker: str, *, is_safe: bool = False
) -> Description:
    """What is sent of an exception that was raised on ``worker``.

    Args:
        error: The exception.
        worker: Where it was raised.
        is_safe: For somebody who is not trusted: no pickle, and no traceback, which
            shows code.
    """
    original = _original_type(type(error))
    name = f"{original.__module__}.{original.__qualname__}"
    if isinstance(error, RemoteError) and error.worker is not None:
        # It only passes through here.
        worker, name = error.worker, error.remote_type or name
    elif vars(error).keys() >= _FACTS:
        # So does this one, whose class cannot be combined with ours.
        worker = str(vars(error)["worker"])
    if is_safe:
        return worker, name, _key_of(error) or _text_of(error), "", BY_NAME
    trace = "".join(traceback.format_exception(error))
    return worker, name, _text_of(error), trace, _pickled(error)


def rebuild(
    description: Description,
    *,
    is_safe: bool = False,
    find: Callable[[str, str], Any] | None = None,
) -> BaseException:
    """The exception to raise on the caller.

    Args:
        description: What came.
        is_safe: It came from somebody who is not trusted.
        find: Finds a global of the pickle, or refuses it; None: all are good.

    Raises:
        DecodeError: This is no description.
    """
    _check(description)
    worker, name, message, trace, data = description
    error: BaseException | None = None
    if data == BY_NAME or is_safe:
        error = _construct_known(name, message)
    elif data is not None:
        try:
            error = _revive(data, find)
        except Exception:  # the class cannot be imported here, or refuses
            error = None
    if not isinstance(error, Exception):
        error = RemoteError(f"{name}: {message}" if message else name)
    # Where the class could not be combined with ours, these are just attributes. Not by
    # assignment: there are classes that refuse it.
    vars(error).update(worker=worker, remote_type=name, remote_traceback=trace)
    if not isinstance(error, RemoteError) and hasattr(error, "add_note"):
        with contextlib.suppress(Exception):
            error.add_note(f"Raised on worker {worker!r}:\n{trace.rstrip()}")
    return error


def _check(description: object) -> None:
    if (
        type(description) is not tuple
        or len(description) != 5
        or any(type(text) is not str for text in description[:4])
        or type(description[4]) not in (bytes, type(None))
    ):
        raise DecodeError("the description of an error that arrived is malformed")


def _text_of(error: BaseException) -> str:
    cls = RemoteError if type(error) is RemoteError else _original_type(type(error))
    try:
        if cls is RemoteError:
            return BaseException.__str__(error)
        return cls.__str__(error)
    except Exception:
        return f"<{cls.__name__} whose text cannot be made>"


def _key_of(error: BaseException) -> str:
    """The key that was not found, if it is a text: who gets it puts it in quotes again."""
    if _original_type(type(error)) is KeyError and len(error.args) == 1:
        (key,) = error.args
        if type(key) is str:
            return key
    return ""


# An exception travels as (class, arguments, state), as long as that is what its own
# `__reduce__` says. Its `__init__` is not called again, unless that `__reduce__` is the
# class's own: the arguments that an exception keeps are mostly not those that it was made
# with. Exceptions that reduce to something else are pickled as they wish. One that only
# passes through travels as it came; if it has notes, as a pair of these bytes and the notes.


def _pickled(error: BaseException) -> bytes | None:
    # Exits and interrupts must not end the caller: they go as text.
    if not isinstance(error, Exception):
        return None
    carried = error.__dict__.get(_CARRIED)
    if isinstance(carried, bytes):
        return _with_notes(carried, error)
    try:
        reduced = error.__reduce_ex__(2)
        if isinstance(reduced, tuple) and reduced[0] is type(error):
            facts = reduced[:3]
            if not _has_own_reduce(type(error)) and (slots := _slots_of(error)):
                facts = (*facts[:2], error.__dict__ | slots)
            data = pickle.dumps(facts, protocol=5)
        else:
            data = pickle.dumps(error, protocol=5)
        _revive(data)  # only what also comes back is worth sending
    except Exception:
        return None
    return data


def _with_notes(carried: bytes, error: BaseException) -> bytes:
    """The bytes that an exception came from, with the notes that it has now."""
    notes = error.__dict__.get("__notes__")
    if not notes:
        return carried
    return pickle.dumps((carried, [str(note) for note in notes]), protocol=5)


class _Unpickler(pickle.Unpickler):
    """One that asks which globals are good."""

    def __init__(self, data: bytes, find: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        return self._find(module, name)


def _revive(data: bytes, find: Callable[[str, str], Any] | None = None) -> Any:
    loaded = pickle.loads(data) if find is None else _Unpickler(data, find).load()
    if not isinstance(loaded, tuple):
        return loaded
    if type(loaded[0]) is bytes:
        error = _revive(loaded[0], find)
        error.__dict__["__notes__"] = loaded[1]
        return error
    cls, args, *state = loaded
    try:
        error = _construct(_remote_class(cls), args, state)
        error.__dict__[_CARRIED] = data
    except TypeError:  # the class cannot be combined with ours
        error = _construct(cls, args, state)
    return error


def _construct_known(name: str, message: str) -> Any:
    known = _known.get(name)
    return None if known is None else _construct(_remote_class(known), (message,), [])


def _find_known() -> dict[str, Any]:
    """Exceptions that are made of their name and text: builtin ones, and our own."""
    known: dict[str, Any] = {}
    for module in (builtins, errors):
        for cls in list(vars(module).values()):
            if not (isinstance(cls, type) and issubclass(cls, Exception)):
                continue
            if cls.__module__ != module.__name__ or issubclass(cls, RemoteError):
                continue
            kind: Any = cls
            try:
                _construct(_remote_class(kind), ("text",), [])
            except TypeError:
                continue  # those about Unicode, and groups: text alone does not make one
            known[f"{cls.__module__}.{cls.__qualname__}"] = kind
    return known


def _construct(cls: Any, args: tuple[Any, ...], state: list[Any]) -> Any:
    error = cls.__new__(cls, *args)
    original: Any = _original_type(cls)
    if _has_own_reduce(original):
        original.__init__(error, *args)
    else:
        # The builtin class below sets what it keeps beside ``args``, such as an errno.
        builtin = next(c for c in cls.__mro__ if not c.__flags__ & _HEAP_TYPE)
        builtin.__init__(error, *args)
    if state and state[0] is not None:
        error.__setstate__(state[0])
    return error


def _has_own_reduce(cls: type[BaseException]) -> bool:
    return any(
        c.__flags__ & _HEAP_TYPE
        and ("__reduce__" in c.__dict__ or "__reduce_ex__" in c.__dict__)
        for c in cls.__mro__
    )


def _slots_of(error: BaseException) -> dict[str, Any]:
    """What an exception keeps in ``__slots__``, which are no part of its state."""
    return {
        name: getattr(error, name)
        for cls in type(error).__mro__
        if cls.__flags__ & _HEAP_TYPE
        for name, member in cls.__dict__.items()
        if isinstance(member, MemberDescriptorType) and hasattr(error, name)
    }


_FACTS = {"worker", "remote_type", "remote_traceback"}
_CARRIED = "_gradwire_carried"  # the bytes that an exception came from
_HEAP_TYPE = 1 << 9  # flag of classes that were made by Python code


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
    trace = self.remote_traceback.rstrip()
    if not trace:
        return f"{_text_of(self)}\n\nRaised on worker {self.worker!r}"
    return f"{_text_of(self)}\n\nRaised on worker {self.worker!r}:\n{trace}"


def _reduce(self: RemoteError, protocol: int) -> tuple[Any, ...]:
    carried = self.__dict__.get(_CARRIED, BY_NAME)
    if carried:
        carried = _with_notes(carried, self)
    text = "" if carried else _text_of(self)
    facts = (self.worker, self.remote_type, text, self.remote_traceback, carried)
    return rebuild, (facts,)


_known = _find_known()
