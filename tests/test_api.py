"""Public names, frozen: a change here is a change that users see."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest
import torch

from gradwire import errors, rpc

ERROR_NAMES = [
    "CallTimeout",
    "ClosedError",
    "ConnectError",
    "ConnectTimeout",
    "DeadlineExceeded",
    "DecodeError",
    "EncodeError",
    "GradwireError",
    "HandshakeRefused",
    "InvalidWorkerName",
    "LocalProtocolError",
    "NotInitialized",
    "PeerLostError",
    "ProtocolError",
    "RemoteError",
    "RemoteProtocolError",
    "SerializationError",
    "ShutdownTimeout",
    "TransportError",
    "UnknownWorker",
    "UsageError",
    "VersionMismatch",
]

RPC_NAMES = [
    "Future",
    "RpcBackendOptions",
    "WorkerInfo",
    "functions",
    "get_debug_info",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_initialized",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

PARAMETERS = {
    "init_rpc": "name, rank=None, world_size=None, rpc_backend_options=None, *, backend=None",
    "shutdown": "graceful=True, timeout=0",
    "rpc_sync": "to, func, args=None, kwargs=None, timeout=-1.0",
    "rpc_async": "to, func, args=None, kwargs=None, timeout=-1.0",
    "get_worker_info": "worker_name=None",
    "get_rpc_timeout": "",
    "get_debug_info": "",
    "is_initialized": "",
}

OPTIONS = {
    "rpc_timeout": 60.0,
    "init_method": "env://",
    "init_timeout": 60.0,
    "connect_timeout": 10.0,
    "lost_after": 10.0,
    "num_worker_threads": 16,
    "transports": None,
    "bind_address": None,
    "advertise_address": None,
    "interface": None,
    "port": 0,
    "secret": None,
    "tls": None,
    "max_head_bytes": 1 << 30,
    "max_frame_bytes": 1 << 36,
    "max_inflight_bytes": 64 << 20,
    "shared_memory_min_bytes": 128 << 10,
    "shared_memory_keep_bytes": 512 << 20,
}

FUTURE_METHODS = [
    "add_done_callback",
    "done",
    "set_exception",
    "set_result",
    "then",
    "value",
    "wait",
]

BUILTIN_BASES = {
    "UsageError": RuntimeError,
    "InvalidWorkerName": ValueError,
    "DeadlineExceeded": TimeoutError,
}


def all_errors():
    found, queue = [], [errors.GradwireError]
    while queue:
        found.append(queue.pop())
        # Other modules may derive from the tree; what they add is theirs to freeze. So
        # are the classes of errors that have crossed the wire, which keep their name.
        queue += [
            c
            for c in found[-1].__subclasses__()
            if c.__module__ == errors.__name__
            and "_gradwire_original_type" not in vars(c)
        ]
    return sorted(found, key=lambda error: error.__name__)


def test_errors_exports_are_frozen():
    assert errors.__all__ == ERROR_NAMES


def test_errors_exports_are_the_whole_tree():
    assert [error.__name__ for error in all_errors()] == ERROR_NAMES


@pytest.mark.parametrize("name", sorted(BUILTIN_BASES))
def test_error_derives_from_builtin(name):
    assert issubclass(getattr(errors, name), BUILTIN_BASES[name])


@pytest.mark.parametrize("error_type", all_errors(), ids=lambda error: error.__name__)
def test_error_survives_pickle(error_type):
    error = error_type("expected this, found that", worker="w1")
    error.fact = ("kept", 1)

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is error_type
    assert copy.args == error.args
    assert str(copy) == str(error) == "expected this, found that"
    assert copy.worker == "w1"
    assert copy.__dict__ == error.__dict__


def test_remote_error_shows_traceback_after_pickle():
    error = errors.RemoteError("ValueError: bad", worker="w2")
    error.remote_type = "builtins.ValueError"
    error.remote_traceback = "Traceback of the worker\n"

    copy = pickle.loads(pickle.dumps(error))

    assert copy.remote_type == "builtins.ValueError"
    assert (
        str(copy)
        == "ValueError: bad\n\nRaised on worker 'w2':\nTraceback of the worker"
    )


# ---------------------------------------------------------------------------------- rpc


def test_rpc_exports_are_frozen():
    assert rpc.__all__ == RPC_NAMES


def test_rpc_functions_exports_are_frozen():
    assert rpc.functions.__all__ == ["async_execution"]


@pytest.mark.parametrize("name", RPC_NAMES)
def test_rpc_export_exists_and_is_described(name):
    assert inspect.getdoc(getattr(rpc, name))


def test_rpc_has_no_public_names_besides_its_exports():
    public = {name for name in vars(rpc) if not name.startswith("_")}

    assert public - {"annotations"} == set(RPC_NAMES)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_rpc_parameters_are_frozen(name):
    signature = inspect.signature(getattr(rpc, name))
    bare = signature.replace(
        parameters=[
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )

    assert str(bare) == f"({PARAMETERS[name]})"


def test_rpc_options_and_their_defaults_are_frozen():
    assert dataclasses.asdict(rpc.RpcBackendOptions()) == OPTIONS


def test_rpc_options_are_given_by_name_only():
    make = rpc.RpcBackendOptions

    with pytest.raises(TypeError):
        make(5.0)  # type: ignore[misc]


def test_rpc_options_do_not_show_the_secret():
    assert "sesame" not in repr(rpc.RpcBackendOptions(secret="sesame"))


def test_rpc_future_is_one_of_torch():
    assert issubclass(rpc.Future, torch.futures.Future)


def test_rpc_future_methods_are_frozen():
    public = [name for name in vars(rpc.Future) if not name.startswith("_")]

    assert sorted(public) == FUTURE_METHODS


def test_worker_info_is_what_torch_has():
    info = rpc.WorkerInfo("trainer", 3)

    assert (info.name, info.id) == ("trainer", 3)
    assert info == rpc.WorkerInfo("trainer", 3) != rpc.WorkerInfo("trainer", 4)
    assert hash(info) == 3
    assert repr(info) == "WorkerInfo(id=3, name=trainer)"
    assert pickle.loads(pickle.dumps(info)) == info
