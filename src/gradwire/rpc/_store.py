"""Opening torch's rendezvous store, and using it without ever waiting for ever.

``open_store`` turns an ``init_method`` into a store. ``StoreThread`` runs operations on
it with a limit: a store operation that is inside torch's C++ code knows neither Ctrl-C
nor, in part, a timeout, so it must not run on the thread that waits for it.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from gradwire._environment import find_variable
from gradwire._ids import MAX_RANK
from gradwire.errors import ConnectError, ConnectTimeout, GradwireError, UsageError
from gradwire.rpc._signals import shielded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

    from gradwire._config import RpcBackendOptions

__all__ = [
    "OPEN",
    "StoreThread",
    "note_kind",
    "open_store",
    "open_store_of_open_group",
    "read_key",
]

T = TypeVar("T")

PREFIX = "gradwire"
_ABSENT = "?"
_UNGIVEN = -1


def read_key(store: Store, key: str) -> bytes | None:
    """The value of a key, None if there is none; never waits for the key to appear."""
    # ``get`` would block on a key that is deleted after ``check`` has seen it. A
    # comparison that fails returns the present value, and what was expected if there
    # is no key; no value of ours equals the one expected here.
    value = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else bytes(value)


OPEN = "open"
"""The world size of a group that has none."""

_CLIENT = 1  # any rank but that of the worker that serves the store


def open_store_of_open_group(
    options: RpcBackendOptions, rank: int | None
) -> tuple[Store, int | None]:
    """Like `open_store`, for a group without a size.

    The worker of rank 0 serves a TCP store, as in other groups. Who has no rank yet is
    a client of it.

    Returns:
        The store, and the rank if one was given.
    """
    url = urlsplit(options.init_method)
    query = dict(parse_qsl(url.query))
    query.pop("world_size", None)
    found = _find_optional_number("rank", rank, url, query)
    store = _open(options, url, query, _CLIENT if found is None else found)
    return store, found


def open_store(
    options: RpcBackendOptions, rank: int | None, world_size: int | None
) -> tuple[Store, int, int]:
    """Opens the store that ``options.init_method`` names.

    The store is usable at once: nobody waits here for other workers than the one that
    serves the store.

    Args:
        options: Names the place to meet, and how long to wait for it.
        rank: Rank of this worker; None or -1 if the URL or the environment has it.
        world_size: Number of workers; None or -1 likewise.

    Returns:
        The store, under a prefix of ours, the rank and the world size.

    Raises:
        UsageError: The place is not well described, or rank or world size is missing.
        ConnectError: The store could not be served, for example on a port in use.
        ConnectTimeout: Nobody served the store within ``options.init_timeout``.
    """
    url = urlsplit(options.init_method)
    query = dict(parse_qsl(url.query))
    rank = _find_number("rank", rank, url, query)
    world_size = _find_number("world_size", world_size, url, query)
    if not 1 <= world_size <= MAX_RANK:
        raise UsageError(
            f"world_size must be between 1 and {MAX_RANK}, found {world_size}"
        )
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank must be between 0 and world_size - 1 = {world_size - 1}, found {rank}"
        )
    return _open(options, url, query, rank), rank, world_size


def _open(
    options: RpcBackendOptions, url: SplitResult, query: dict[str, str], rank: int
) -> Store:
    deadline = time.monotonic() + options.init_timeout
    place = options.init_method
    # Given a world size, torch's TCP store would wait in its constructor for all the
    # workers, with an error that does not say who is missing. The rendezvous knows
    # better whom to wait for. A file store would delete its file when its last user
    # leaves, under the hands of whoever has just opened it for the next round.
    told_size = _UNGIVEN
    if url.scheme == "file":
        _check_file(url)
    elif url.scheme in ("env", "tcp"):
        host, port = _find_server(url)
        place = f"{host}:{port}"
        if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _await_server(host, port, deadline, options.init_timeout)
    query |= {"rank": str(rank), "world_size": str(told_size)}
    full = url._replace(query=urlencode(query)).geturl()
    if url.scheme == "env":
        # torch looks for its own variables only; but its launcher's store it finds here.
        is_torch = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
        # ``geturl`` drops the slashes of an empty host, which torch does not mind.
        full = f"{'env://' if is_torch else f'tcp://{place}'}?{urlencode(query)}"
    left_s = max(deadline - time.monotonic(), 1.0)

    def connect() -> Store:
        with _mapped_errors(place, rank):
            store, _, _ = next(rendezvous(full, timeout=timedelta(seconds=left_s)))
            store.set_timeout(timedelta(seconds=options.init_timeout))
            return PrefixStore(PREFIX, store)

    if url.scheme not in ("env", "tcp"):
        return connect()
    # torch waits for the first word of the server without any limit, deaf to Ctrl-C.
    with StoreThread(f" at {place}") as thread:
        return thread.call(connect, timeout_s=left_s)


def _find_number(
    name: str, given: int | None, url: SplitResult, query: dict[str, str]
) -> int:
    """Rank or world size, from the argument, the URL or the environment."""
    found = _find_optional_number(name, given, url, query)
    if found is None:
        if url.scheme == "env":
            raise UsageError(
                f"{name} is missing: start the program with gradwire run or torchrun, pass "
                f"{name}= to init_rpc, or set {name.upper()}"
            )
        raise UsageError(
            f"{name} is missing: pass {name}= to init_rpc or add ?{name}=... to "
            f"init_method {url.geturl()!r}"
        )
    return found


def _find_optional_number(
    name: str, given: int | None, url: SplitResult, query: dict[str, str]
) -> int | None:
    variable = name.upper()
    checked: object = given
    if checked is not None and (
        not isinstance(checked, int) or isinstance(checked, bool)
    ):
        raise TypeError(f"{name} must be an int, not {type(checked).__name__}")
    in_url = query.pop(name, None)
    text, source = in_url, f"{name} in init_method"
    if given is not None and given != _UNGIVEN:
        if in_url is not None and in_url != str(given):
            raise UsageError(
                f"{name} is given twice: {given} as an argument and {in_url!r} in "
                f"init_method {url.geturl()!r}; leave one of them out"
            )
        return given
    if text is None and url.scheme == "env":
        text = find_variable(variable, os.environ)
        source = f"environment variable {variable}"
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{source} must be a whole number, found {text!r}") from None


def _find_server(url: SplitResult) -> tuple[str, int]:
    """Host and port of a TCP store."""
    if url.scheme == "env":
        host = find_variable("MASTER_ADDR", os.environ)
        port_text = find_variable("MASTER_PORT", os.environ)
        if not host or not port_text:
            missing = "MASTER_ADDR" if not host else "MASTER_PORT"
            raise UsageError(
                f"init_method 'env://' needs the environment variable {missing}, which "
                "is not set; set MASTER_ADDR and MASTER_PORT to the address of rank 0, "
                "start with gradwire run, torchrun or srun, or use tcp://host:port or "
                "file:///path"
            )
        if not port_text.isdecimal() or int(port_text) > 65535:
            raise UsageError(f"MASTER_PORT must be a port, found {port_text!r}")
        return host, int(port_text)
    try:
        port = url.port
    except ValueError as error:
        raise UsageError(f"init_method {url.geturl()!r}: {error}") from None
    if not url.hostname or port is None:
        raise UsageError(
            f"init_method must look like 'tcp://host:port', found {url.geturl()!r}"
        )
    return url.hostname, port


def _check_file(url: SplitResult) -> None:
    # torch retries for minutes on a folder that is not there.
    path = Path(url.path)
    if url.netloc or not url.path:
        raise UsageError(
            "init_method must look like 'file:///absolute/path' with three slashes, "
            f"found {url.geturl()!r}"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"init_method {url.geturl()!r} must name a file in a folder that exists and "
            "that all workers share"
        )


def _await_server(host: str, port: int, deadline: float, limit_s: float) -> None:
    """Waits until somebody listens there.

    torch would do so too, but noisily, for up to two and a half times its limit, and
    deaf to Ctrl-C.
    """
    delay = 0.01
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(left, 0.01)).close()
        except OSError as error:
            if time.monotonic() + delay >= deadline:
                raise ConnectTimeout(
                    f"nobody served the rendezvous store at {host}:{port} within "
                    f"{limit_s:.1f} s: {error}; is rank 0 started, and is this its address?"
                ) from error
            time.sleep(delay)
            delay = min(delay * 2, 0.25)
        else:
            return


@contextmanager
def _mapped_errors(place: str, rank: int) -> Iterator[None]:
    """Turns what torch raises for a store into errors of ours."""
    try:
        yield
    except GradwireError:
        raise
    except (ValueError, AssertionError) as error:
        raise UsageError(f"init_method {place!r} cannot be used: {error}") from error
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        if "timed out" in text or "imeout" in text:
            raise ConnectTimeout(
                f"the rendezvous store at {place} did not answer rank {rank} in time: "
                f"{text}; is rank 0 started, and is this its address?"
            ) from error
        if "EADDRINUSE" in text:
            raise ConnectError(
                f"rank {rank} cannot serve the rendezvous store at {place}, the port is "
                "in use: choose another port, or end the process that holds it (another "
                "rank 0?)"
            ) from error
        if "No rendezvous handler" in text:
            raise UsageError(
                f"init_method {place!r} has an unknown scheme; use env://, "
                "tcp://host:port or file:///path"
            ) from error
        raise ConnectError(
            f"the rendezvous store at {place} failed for rank {rank}: {text}; is rank 0 "
            "running, and is this its address?"
        ) from error


KIND_KEY = "kind"


def note_kind(store: Store, *, is_open: bool, timeout_s: float) -> None:
    """Says in the store whether the group has a size; all workers must agree.

    Raises:
        UsageError: They do not.
    """
    mine = OPEN if is_open else "closed"
    with StoreThread() as thread:
        found = thread.call(
            lambda: bytes(store.compare_set(KIND_KEY, "", mine)), timeout_s=timeout_s
        )
    if found != mine.encode():
        raise UsageError(
            "all workers of a group must be given a world_size, or all of them "
            f"world_size={OPEN!r}: this one was {'not ' if is_open else ''}given a number, "
            "and an earlier one was the other way round"
        )


class _Outcome(Generic[T]):
    """What one operation returned or raised."""

    def __init__(self, work: Callable[[], T], where: str) -> None:
        self._work = work
        self._where = where
        self._finished = threading.Event()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def wait(self, timeout_s: float) -> T:
        if not self._finished.wait(timeout_s):
            raise ConnectTimeout(
                f"the rendezvous store{self._where} did not answer within "
                f"{timeout_s:.1f} s; is the process that serves it (rank 0 or the "
                "launcher) alive?"
            )
        if self._error is None:
            return self._value
        # A torch error of any kind means that the store cannot be used any more.
        if isinstance(self._error, RuntimeError) and not isinstance(
            self._error, GradwireError
        ):
            raise ConnectError(
                f"the rendezvous store{self._where} failed: "
                f"{str(self._error).partition(chr(10))[0]}; is the process that serves it "
                "(rank 0 or the launcher) alive?"
            ) from self._error
        raise self._error


class StoreThread:
    """Runs operations on a store, one after the other, on a thread of its own.

    Use it as a context manager. An operation that has timed out still runs, and those
    that come later wait behind it.

    Args:
        where: The place of the store, for texts.
    """

    def __init__(self, where: str = "") -> None:
        self._where = where
        self._work: queue.SimpleQueue[_Outcome[object] | None] = queue.SimpleQueue()
        # A daemon: an operation that never returns must not keep the process alive.
        self._thread = threading.Thread(
            target=self._serve, name="gradwire-store", daemon=True
        )

    def __enter__(self) -> StoreThread:
        try:
            with shielded():
                self._thread.start()
        except BaseException:  # a signal handler raised: nobody calls ``__exit__``
            self._work.put(None)
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._work.put(None)
        self._thread.join(timeout=0.5)

    def call(self, work: Callable[[], T], *, timeout_s: float) -> T:
        """Runs ``work`` on the thread and returns its result.

        Raises:
            ConnectTimeout: It did not return in time.
            ConnectError: The store failed.
        """
        outcome = _Outcome(work, self._where)
        self._work.put(outcome)  # type: ignore[arg-type]
        return outcome.wait(timeout_s)

    def _serve(self) -> None:
        while (outcome := self._work.get()) is not None:
            outcome.run()
