"""Public names, frozen: a change here is a change that users see."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import pickle

import pytest
import torch

import gradwire
from gradwire import autograd, errors, nn, optim, rpc
from gradwire.rpc import extension

ERROR_NAMES = [
    "AutogradError",
    "BackwardFailed",
    "BackwardTimeout",
    "CallTimeout",
    "ClosedError",
    "ConnectError",
    "ConnectTimeout",
    "ContextReleased",
    "DeadlineExceeded",
    "DecodeError",
    "EncodeError",
    "ForeignGraph",
    "GradwireError",
    "GraphConsumed",
    "HandshakeRefused",
    "InvalidWorkerName",
    "LaunchError",
    "LaunchTimeout",
    "LimitExceeded",
    "LocalProtocolError",
    "NoActiveContext",
    "NotExported",
    "NotInitialized",
    "NotRepeatable",
    "OwnerLost",
    "PeerLostError",
    "ProtocolError",
    "RemoteError",
    "RemoteProtocolError",
    "RolledBack",
    "SerializationError",
    "ShutdownTimeout",
    "SnapshotError",
    "TransportError",
    "UnknownContext",
    "UnknownWorker",
    "UsageError",
    "VersionMismatch",
]

RPC_NAMES = [
    "Future",
    "RRef",
    "RpcBackendOptions",
    "TlsOptions",
    "WorkerInfo",
    "export",
    "functions",
    "get_debug_info",
    "get_rpc_timeout",
    "get_worker_info",
    "get_workers",
    "init_rpc",
    "is_initialized",
    "on_worker_joined",
    "on_worker_lost",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_for_worker",
]

# For layers above, which register by it; not among the names that users import.
RPC_MODULES = ["extension"]

RPC_PARAMETERS = {
    "init_rpc": (
        "name=None, rank=None, world_size=None, rpc_backend_options=None, *, backend=None"
    ),
    "shutdown": "graceful=True, timeout=0",
    "rpc_sync": "to, func, args=None, kwargs=None, timeout=-1.0",
    "remote": "to, func, args=None, kwargs=None, timeout=-1.0",
    "rpc_async": "to, func, args=None, kwargs=None, timeout=-1.0",
    "get_worker_info": "worker_name=None",
    "get_workers": "",
    "on_worker_joined": "callback",
    "on_worker_lost": "callback",
    "wait_for_worker": "name, timeout=60.0, *, or_role=False",
    "get_rpc_timeout": "",
    "get_debug_info": "",
    "is_initialized": "",
}

AUTOGRAD_NAMES = [
    "Context",
    "aretry",
    "backward",
    "context",
    "draw",
    "get_debug_info",
    "get_gradients",
    "grad",
    "is_available",
    "retry",
]

AUTOGRAD_PARAMETERS = {
    "Context.backward": (
        "self, roots, retain_graph=False, create_graph=False, *, grad_tensors=None, "
        "timeout=0"
    ),
    "Context.gradients": "self",
    "backward": (
        "context_id, roots, retain_graph=False, create_graph=False, *, "
        "grad_tensors=None, timeout=0"
    ),
    "context": "*, accumulate='dict'",
    "draw": "roots, *, title=''",
    "get_debug_info": "",
    "get_gradients": "context_id",
    "grad": (
        "context_id, outputs, inputs, grad_outputs=None, retain_graph=None, "
        "create_graph=False, allow_unused=None, *, materialize_grads=False, timeout=0"
    ),
    "is_available": "",
    **dict.fromkeys(
        ("aretry", "retry"),
        "step, attempts=3, backoff=0.5, *, timeout=60.0, or_role=False, errors="
        f"{(errors.PeerLostError, errors.ConnectError, errors.ConnectTimeout)!r}, "
        "recover=None",
    ),
}

RREF_METHODS = {
    "backward": "self, dist_autograd_ctx_id=-1, retain_graph=False",
    "confirmed_by_owner": "self",
    "is_owner": "self",
    "local_value": "self",
    "owner": "self",
    "owner_name": "self",
    "remote": "self, timeout=-1.0",
    "rpc_async": "self, timeout=-1.0",
    "rpc_sync": "self, timeout=-1.0",
    "to_here": "self, timeout=-1.0",
}

EXTENSION_NAMES = [
    "CUT_OUTSIDE_CONTEXT",
    "NOTHING",
    "Addition",
    "Agent",
    "Interceptor",
    "Leftovers",
    "Note",
    "Outcome",
    "Peer",
    "PendingCall",
    "Scope",
    "current_agent",
    "describe",
    "find_address",
    "for_agents",
    "made_by",
    "methods_for_agents",
    "num_cores",
    "rebuild",
    "register_interceptor",
    "rendezvous_host",
    "serving_agent",
    "serving_peer",
    "set_backward",
    "shielded",
    "shown_as",
    "start_method",
]

OPTIM_NAMES = [
    "DistributedOptimizer",
    "OwnersFailed",
    "ParametersOf",
    "Snapshots",
    "clip_grad_norm_",
]

OPTIONS = {
    "rpc_timeout": 60.0,
    "init_method": "env://",
    "init_timeout": 60.0,
    "connect_timeout": 10.0,
    "lost_after": 10.0,
    "num_worker_threads": 16,
    "transports": None,
    "allow_plain_tcp": False,
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
    "serializer": "pickle",
    "allowed_modules": None,
    "max_peer_bytes": 1 << 36,
    "max_peer_calls": 1 << 20,
    "max_peer_contexts": 1 << 20,
    "max_peer_rrefs": 1 << 20,
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
    "AutogradError": RuntimeError,
    "LaunchError": RuntimeError,
    "UsageError": RuntimeError,
    "InvalidWorkerName": ValueError,
    "DeadlineExceeded": TimeoutError,
}


PARENTS = {
    "AutogradError": "GradwireError",
    "BackwardFailed": "AutogradError",
    "BackwardTimeout": "DeadlineExceeded",
    "ContextReleased": "UnknownContext",
    "ForeignGraph": "AutogradError",
    "GraphConsumed": "AutogradError",
    "NoActiveContext": "UsageError",
    "OwnerLost": "PeerLostError",
    "UnknownContext": "UsageError",
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


@pytest.mark.parametrize("name", sorted(PARENTS))
def test_autograd_error_is_caught_by_its_parent(name):
    assert issubclass(getattr(errors, name), getattr(errors, PARENTS[name]))


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


def test_package_exports_are_frozen():
    assert gradwire.__all__ == ["autograd", "errors", "launch", "nn", "optim", "rpc"]


def test_nn_exports_are_frozen():
    assert nn.__all__ == ["RemoteModule", "parameter_rrefs"]


def test_optim_exports_are_frozen():
    assert optim.__all__ == OPTIM_NAMES


def parameters_of(function):
    signature = inspect.signature(function)
    bare = signature.replace(
        parameters=[
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )
    return str(bare)


def public_names_of(module):
    return {n for n in vars(module) if not n.startswith("_")} - {"annotations"}


# ---------------------------------------------------------------------------------- rpc


def test_rpc_exports_are_frozen():
    assert rpc.__all__ == RPC_NAMES


def test_rpc_functions_exports_are_frozen():
    assert rpc.functions.__all__ == ["async_execution", "idempotent"]


@pytest.mark.parametrize("name", RPC_NAMES)
def test_rpc_export_exists_and_is_described(name):
    assert inspect.getdoc(getattr(rpc, name))


def test_rpc_has_no_public_names_besides_its_exports():
    assert public_names_of(rpc) == {*RPC_NAMES, *RPC_MODULES}


@pytest.mark.parametrize("name", sorted(RPC_PARAMETERS))
def test_rpc_parameters_are_frozen(name):
    assert parameters_of(getattr(rpc, name)) == f"({RPC_PARAMETERS[name]})"


def test_rpc_extension_exports_are_frozen():
    assert extension.__all__ == EXTENSION_NAMES


def test_rpc_extension_has_no_public_names_besides_its_exports():
    assert public_names_of(extension) == set(EXTENSION_NAMES)


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


def test_rref_methods_are_frozen():
    public = [name for name in vars(rpc.RRef) if not name.startswith("_")]

    assert {n: parameters_of(getattr(rpc.RRef, n)) for n in public} == {
        name: f"({parameters})" for name, parameters in RREF_METHODS.items()
    }


def test_worker_info_is_what_torch_has():
    info = rpc.WorkerInfo("trainer", 3)

    assert (info.name, info.id) == ("trainer", 3)
    assert info == rpc.WorkerInfo("trainer", 3) != rpc.WorkerInfo("trainer", 4)
    assert hash(info) == 3
    assert repr(info) == "WorkerInfo(id=3, name=trainer)"
    assert pickle.loads(pickle.dumps(info)) == info


# ----------------------------------------------------------------------------- autograd


def test_autograd_exports_are_frozen():
    assert autograd.__all__ == AUTOGRAD_NAMES


def test_autograd_has_no_public_names_besides_its_exports():
    # What registers the layer is imported there, and is no part of what it offers.
    others = {"Recorder", "extension", "register_interceptor", "set_backward"}

    assert public_names_of(autograd) - others == set(AUTOGRAD_NAMES)


@pytest.mark.parametrize("name", AUTOGRAD_NAMES)
def test_autograd_export_is_described(name):
    assert inspect.getdoc(getattr(autograd, name))


@pytest.mark.parametrize("name", sorted(AUTOGRAD_PARAMETERS))
def test_autograd_parameters_are_frozen(name):
    found = operator.attrgetter(name)(autograd)

    assert parameters_of(found) == f"({AUTOGRAD_PARAMETERS[name]})"


def test_autograd_grad_takes_what_torch_does_after_the_context():
    theirs = list(inspect.signature(torch.autograd.grad).parameters)

    first, *ours = inspect.signature(autograd.grad).parameters

    assert first == "context_id"
    assert ours[:5] == theirs[:5]
    assert set(ours) - {"timeout"} <= set(theirs)


def test_context_methods_are_frozen():
    public = [name for name in vars(autograd.Context) if not name.startswith("_")]

    assert sorted(public) == ["backward", "gradients"]


def test_context_is_its_id():
    context = autograd.Context(7 << 48 | 3)

    assert isinstance(context, int)
    assert context == 7 << 48 | 3
    assert hash(context) == hash(7 << 48 | 3)
    assert {int(context): "found"}[context] == "found"
    assert str(context) == str(7 << 48 | 3)
    assert "rank 7" in repr(context)


def test_context_survives_pickle_as_itself():
    context = autograd.Context(5)

    copy = pickle.loads(pickle.dumps(context))

    assert type(copy) is autograd.Context
    assert copy == context


def test_context_refuses_an_unknown_destination():
    with pytest.raises(ValueError, match="dict"):
        autograd.context(accumulate="nowhere")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use",
    [
        lambda: autograd.context().__enter__(),
        lambda: autograd.backward(1, torch.ones((), requires_grad=True)),
        lambda: autograd.get_gradients(1),
        autograd.get_debug_info,
    ],
    ids=["context", "backward", "get_gradients", "get_debug_info"],
)
def test_autograd_needs_a_worker(use):
    with pytest.raises(errors.NotInitialized):
        use()


def test_autograd_is_always_available():
    assert autograd.is_available()
