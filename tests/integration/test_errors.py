"""What goes wrong, and how the caller gets to know."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from typing import Any

import pytest
import torch

import api_functions as api
import functions
from gradwire import rpc
from gradwire.errors import (
    DecodeError,
    EncodeError,
    GradwireError,
    NotInitialized,
    RemoteError,
    UnknownWorker,
    UsageError,
)
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


def catch(to: Any, function: Any, *args: Any) -> Any:
    """The error that a call raises; the same one, whether it is synchronous or not."""
    with pytest.raises(Exception) as caught:
        rpc.rpc_sync(to, function, args=args)
    with pytest.raises(type(caught.value)) as caught_later:
        rpc.rpc_async(to, function, args=args).wait()
    assert str(caught_later.value) == str(caught.value)
    return caught.value


def assert_raised_on(worker: str, error: Any, kind: type[Exception]) -> None:
    assert isinstance(error, kind)
    assert isinstance(error, RemoteError)
    assert error.worker == worker


# --------------------------------------------------------------- errors of the function


@on_worker(0)
def test_remote_error_has_its_own_type():
    error = catch("w1", functions.raise_value_error, "no good")

    assert isinstance(error, ValueError)
    assert isinstance(error, RemoteError)
    assert error.args == ("no good",)


@on_worker(0)
def test_remote_error_names_the_worker():
    error = catch("w1", functions.raise_value_error)

    assert error.worker == "w1"
    assert "'w1'" in str(error)


@on_worker(0)
def test_remote_error_has_the_traceback_of_the_worker():
    error = catch("w1", functions.raise_value_error, "no good")

    assert "in raise_value_error" in error.remote_traceback
    assert "functions.py" in error.remote_traceback
    assert "ValueError: no good" in error.remote_traceback
    assert error.remote_traceback.rstrip() in str(error)


@on_worker(0)
def test_remote_error_names_its_original_type():
    error = catch("w1", api.raise_error, "rated")

    assert error.remote_type == "api_functions.Rated"
    assert type(error).__name__ == "Rated"


@on_worker(0)
def test_remote_error_keeps_attributes():
    error = catch("w1", api.raise_error, "rated")

    assert isinstance(error, api.Rated)
    assert (error.rating, error.notes_taken) == (3, ["seen"])
    assert str(error).startswith("rated 3")


@on_worker(0)
def test_remote_error_with_arguments_of_its_own_keeps_type_and_attributes():
    error = catch("w1", api.raise_error, "refused")

    assert isinstance(error, api.Refused)
    assert (error.code, error.reason) == (7, "no room")
    assert str(error).startswith("refused with 7: no room")


@pytest.mark.parametrize("way", [["w1"], ["w1", "w2"]], ids=len)
@on_worker(0)
def test_remote_error_that_is_made_again_of_its_parts_is_whole(way):
    found = catch(way[0], api.run_along, way[1:], api.raise_error, "remade")

    for error in (found, copy.copy(found)):
        assert_raised_on(way[-1], error, api.Remade)
        assert (error.code, error.reason) == (7, "no room")
        assert error.args == ("made of 7 and no room",)


@pytest.mark.parametrize("way", [["w1"], ["w1", "w2"]], ids=len)
@on_worker(0)
def test_remote_error_keeps_what_is_in_slots(way):
    error = catch(way[0], api.run_along, way[1:], api.raise_error, "slotted")

    assert_raised_on(way[-1], error, api.Slotted)
    assert error.code == 7
    assert str(error).startswith("slot 7")


@on_worker(0)
def test_remote_os_error_keeps_errno_and_file():
    error = catch("w1", api.raise_error, "missing file")

    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.filename) == (2, "/no/such/file")
    assert "No such file or directory: '/no/such/file'" in str(error)


@on_worker(0)
def test_remote_key_error_keeps_its_key():
    error = catch("w1", api.raise_error, "key")

    assert isinstance(error, KeyError)
    assert error.args == ("no such key",)


@on_worker(0)
def test_remote_decode_error_keeps_its_five_facts():
    error = catch("w1", api.raise_error, "decode")

    assert isinstance(error, UnicodeDecodeError)
    assert (error.encoding, error.object, error.start) == ("utf-8", b"ab\xff", 2)
    assert "can't decode byte 0xff in position 2" in str(error)


@on_worker(0)
def test_remote_error_of_torch_is_a_runtime_error():
    error = catch("w1", api.raise_error, "torch")

    assert isinstance(error, RuntimeError)
    assert "inconsistent tensor size" in str(error)


@on_worker(0)
def test_remote_error_shows_its_cause():
    error = catch("w1", api.raise_error, "with cause")

    assert isinstance(error, ValueError)
    assert "KeyError: 'the first'" in str(error)


@on_worker(0)
def test_remote_error_keeps_text_in_any_script():
    text = "größe π, 数値が大きい, 🙂"

    error = catch("w1", functions.raise_value_error, text)

    assert error.args == (text,)
    assert text in str(error)
    assert text in error.remote_traceback


@on_worker(0)
def test_remote_error_of_a_builtin_function_arrives():
    error = catch("w1", int, "seven")

    assert_raised_on("w1", error, ValueError)
    assert "invalid literal for int()" in str(error)


@on_worker(0)
def test_wrong_number_of_arguments_is_a_type_error():
    error = catch("w1", functions.add, 1)

    assert isinstance(error, TypeError)
    assert "missing 1 required positional argument: 'b'" in str(error)


@on_worker(0)
def test_error_of_a_call_to_oneself_is_a_remote_one_too():
    error = catch("w0", functions.raise_value_error, "mine")

    assert_raised_on("w0", error, ValueError)
    assert "in raise_value_error" in str(error)


# ------------------------------------------------------- errors that pass through workers


@on_worker(0)
def test_nested_error_keeps_its_origin():
    error = catch("w1", api.run_along, ["w2"], functions.raise_value_error, "deep")

    assert_raised_on("w2", error, ValueError)
    assert error.args == ("deep",)
    assert error.remote_type == "builtins.ValueError"
    assert "Raised on worker 'w2'" in str(error)
    assert "in raise_value_error" in error.remote_traceback


@on_worker(0)
def test_nested_error_shows_the_way_it_took():
    error = catch("w1", api.run_along, ["w2"], functions.raise_value_error, "deep")

    assert "in run_along" in error.remote_traceback


@on_worker(0)
def test_nested_error_keeps_attributes():
    error = catch("w1", api.run_along, ["w2", "w3"], api.raise_error, "rated")

    assert_raised_on("w3", error, api.Rated)
    assert error.rating == 3


@on_worker(0)
def test_nested_error_keeps_the_notes_that_it_gets_on_its_way():
    found = catch("w1", api.run_along, ["w2"], api.call_and_note, "w3", "rated")

    for error in (found, copy.copy(found)):
        assert_raised_on("w3", error, api.Rated)
        assert error.__notes__ == ["seen by w2"]
        assert error.rating == 3


@on_worker(0)
def test_nested_error_that_cannot_be_pickled_keeps_its_origin():
    error = catch("w1", api.run_along, ["w2"], functions.raise_unpicklable, "held")

    assert type(error) is RemoteError
    assert error.worker == "w2"
    assert error.remote_type == "functions.Unpicklable"
    assert "held" in str(error)


@on_worker(0)
def test_nested_error_that_cannot_be_combined_keeps_its_origin():
    error = catch("w1", api.run_along, ["w2"], api.raise_error, "memory")

    assert type(error) is MemoryError
    assert error.worker == "w2"  # type: ignore[attr-defined]


@on_worker(0)
def test_nested_usage_error_is_the_callees():
    error = catch("w1", api.call, "nobody", functions.get_pid)

    assert_raised_on("w1", error, UnknownWorker)
    assert "'nobody'" in str(error)


# ----------------------------------------------------------- errors that cannot be sent


@on_worker(0)
def test_unpicklable_error_arrives_as_text():
    error = catch("w1", functions.raise_unpicklable, "held by a löck")

    assert type(error) is RemoteError
    assert "held by a löck" in str(error)
    assert error.worker == "w1"
    assert error.remote_type == "functions.Unpicklable"
    assert "in raise_unpicklable" in error.remote_traceback


@on_worker(0)
def test_error_that_cannot_be_unpickled_arrives_as_text():
    error = catch("w1", api.raise_error, "looks good")

    assert type(error) is RemoteError
    assert "surprise" in str(error)
    assert error.remote_type == "api_functions.LooksGood"


@on_worker(0)
def test_errors_that_refuse_attributes_arrive():
    frozen = catch("w1", api.raise_error, "frozen")
    sealed = catch("w1", api.raise_error, "sealed")
    kept: Any = rpc.remote("w1", api.raise_error, args=("frozen",))

    assert type(frozen) is RemoteError
    assert frozen.remote_type == "api_functions.Frozen"
    assert "raise_error" in frozen.remote_traceback
    assert sealed.worker == "w1"
    assert isinstance(sealed, api.Sealed)
    assert str(sealed).startswith("no changes")
    with pytest.raises(RemoteError, match="Frozen"):
        kept.to_here(timeout=10)


@on_worker(0)
def test_error_without_text_arrives_all_the_same():
    error = catch("w1", api.raise_error, "text fails")

    assert isinstance(error, RemoteError)
    assert error.worker == "w1"
    assert "raise_error" in error.remote_traceback


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("exit", "builtins.SystemExit"),
        ("interrupt", "builtins.KeyboardInterrupt"),
        ("cancelled", "asyncio.exceptions.CancelledError"),
    ],
)
@on_worker(0)
def test_exit_in_a_handler_is_an_error_of_the_call_only(kind, name):
    pid = rpc.rpc_sync("w1", functions.get_pid)

    error = catch("w1", api.raise_error, kind)

    assert type(error) is RemoteError
    assert error.remote_type == name
    assert rpc.rpc_sync("w1", functions.get_pid) == pid


# ------------------------------------------------------------- things that cannot be sent


@on_worker(0)
def test_missing_function_is_named():
    def only_here():
        pass

    only_here.__module__, only_here.__qualname__ = "api_functions", "only_here"
    api.only_here = only_here  # type: ignore[attr-defined]
    try:
        error = catch("w1", only_here)
    finally:
        del api.only_here  # type: ignore[attr-defined]

    assert_raised_on("w1", error, DecodeError)
    assert "cannot find 'only_here' of module 'api_functions' on worker 'w1'" in str(
        error
    )


UNPICKLABLE = {
    "lock": (threading.Lock, r"_thread\.lock"),
    "lambda": (lambda: lambda: 1, "lambda"),
    "generator": (lambda: (i for i in range(3)), "generator"),
    "future": (torch.futures.Future, "futures cannot be sent"),
    "our future": (rpc.Future, "futures cannot be sent"),
}


@pytest.mark.parametrize("kind", UNPICKLABLE)
@on_worker(0)
def test_unpicklable_argument_is_refused_on_the_caller(kind):
    make, text = UNPICKLABLE[kind]

    for start in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(EncodeError, match=text) as caught:
            start("w1", functions.echo, args=([make()],))
        assert not isinstance(caught.value, RemoteError)

    api.wait_until(api.is_idle)
    assert rpc.rpc_sync("w1", functions.echo, args=(1,)) == 1


@on_worker(0)
def test_local_function_is_refused_on_the_caller():
    def local():
        pass

    with pytest.raises(EncodeError, match=r"local function.*module level"):
        rpc.rpc_async("w1", local)


@on_worker(0)
def test_unpicklable_result_is_an_error_that_names_it():
    error = catch("w1", functions.return_unpicklable)

    assert_raised_on("w1", error, EncodeError)
    assert "_thread.lock" in str(error)
    assert rpc.rpc_sync("w1", functions.echo, args=(1,)) == 1


# ----------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize("to", [1.0, None, ("w1", 1), b"w1", True], ids=repr)
@on_worker(0)
def test_destination_of_a_wrong_type_is_a_value_error(to):
    for start in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(ValueError, match=r"name \(str\), rank \(int\) or Worker"):
            start(to, functions.get_pid)


@pytest.mark.parametrize(
    "to", ["w9", "", -1, 4, rpc.WorkerInfo("w1", 2), rpc.WorkerInfo("w9", 1)], ids=repr
)
@on_worker(0)
def test_unknown_destination_is_named(to):
    for start in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(UnknownWorker, match="could not find destination") as caught:
            start(to, functions.get_pid)
        assert repr(to) in str(caught.value)
        assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("function", [5, None, "max"], ids=repr)
@on_worker(0)
def test_target_must_be_callable(function):
    for start in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(TypeError, match="callable") as caught:
            start("w1", function)
        assert not isinstance(caught.value, RemoteError)


@pytest.mark.parametrize("args", [5, "ab", {"a": 1}, {1, 2}], ids=repr)
@on_worker(0)
def test_args_of_a_wrong_type_are_refused(args):
    for start in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(TypeError, match="args must be a tuple") as caught:
            start("w1", functions.echo, args=args)
        assert not isinstance(caught.value, RemoteError)


@pytest.mark.parametrize("kwargs", [5, [("a", 1)], "ab", {1: 2}], ids=repr)
@on_worker(0)
def test_kwargs_of_a_wrong_type_are_refused(kwargs):
    for start in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(TypeError, match="kwargs") as caught:
            start("w1", functions.echo, kwargs=kwargs)
        assert not isinstance(caught.value, RemoteError)


@pytest.mark.parametrize(
    ("timeout", "kind"),
    [("5", TypeError), (True, TypeError), (-2, ValueError), (float("nan"), ValueError)],
    ids=repr,
)
@on_worker(0)
def test_timeout_of_a_wrong_kind_is_refused(timeout, kind):
    for start in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(kind, match="timeout must be"):
            start("w1", functions.echo, args=(1,), timeout=timeout)


# ----------------------------------------------------------------- before and afterwards


@pytest.mark.parametrize(
    "call",
    [
        lambda: rpc.rpc_sync("w0", functions.get_pid),
        lambda: rpc.rpc_async("w0", functions.get_pid),
        rpc.get_worker_info,
        rpc.get_debug_info,
        rpc.get_rpc_timeout,
        rpc.shutdown,
    ],
    ids=["rpc_sync", "rpc_async", "worker_info", "debug_info", "timeout", "shutdown"],
)
def test_nothing_can_be_called_before_init(call):
    with pytest.raises(NotInitialized, match=r"Call init_rpc\(\) first"):
        call()


def call_after_shutdown():
    started = time.monotonic()
    rpc.shutdown()
    for start in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(NotInitialized, match=r"after shutdown\(\) no call"):
            start("w0", functions.get_pid)
    with pytest.raises(NotInitialized):
        rpc.shutdown()
    assert not rpc.is_initialized()
    return time.monotonic() - started


def test_nothing_can_be_called_after_shutdown(make_cluster):
    assert make_cluster(1).run(0, call_after_shutdown) < 5


# ---------------------------------------------------------------------- facts that last


def pickle_and_unpickle(error):
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle_and_unpickle])
@pytest.mark.parametrize(
    "kind", ["rated", "refused", "missing file", "key", "decode", "looks good", "exit"]
)
@on_worker(0)
def test_remote_error_keeps_its_facts_when_copied(kind, duplicate):
    error = catch("w1", api.raise_error, kind)

    twin = duplicate(error)

    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.args == error.args
    for name in ("worker", "remote_type", "remote_traceback"):
        assert getattr(twin, name) == getattr(error, name)
    for name in ("rating", "notes_taken", "code", "reason", "errno", "filename"):
        assert getattr(twin, name, None) == getattr(error, name, None)


@on_worker(0)
def test_remote_error_can_be_an_argument_and_a_result():
    error = catch("w1", api.raise_error, "rated")

    result = rpc.rpc_sync("w2", functions.echo, args=(error,))

    assert type(result) is type(error)
    assert str(result) == str(error)
    assert (result.worker, result.rating) == ("w1", 3)


@on_worker(0)
def test_all_errors_of_ours_have_one_base():
    for error in (
        catch("w1", functions.raise_value_error),
        catch("w1", functions.raise_unpicklable),
        catch("nobody", functions.get_pid),
        catch("w1", functions.echo, threading.Lock()),
    ):
        assert isinstance(error, GradwireError)
    assert issubclass(UnknownWorker, UsageError)
