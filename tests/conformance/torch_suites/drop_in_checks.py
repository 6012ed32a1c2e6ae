"""What test_drop_in.py checks in processes of their own: the drop-in changes torch for good."""

from __future__ import annotations

import importlib
import pickle

import gradwire.torch_compat
from gradwire.errors import CallTimeout, PeerLostError
from gradwire.rpc.extension import describe, rebuild


class Sealed(Exception):
    """One that refuses to be changed."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


def names() -> None:
    import torch.distributed

    gradwire.torch_compat.install()
    rpc = importlib.import_module("torch.distributed.rpc")
    api = importlib.import_module("torch.distributed.rpc.api")
    optim = importlib.import_module("torch.distributed.optim")
    modules = importlib.import_module("torch.distributed.nn")
    assert rpc is torch.distributed.rpc
    assert api is rpc.api
    assert torch.distributed.autograd.__name__.startswith("gradwire.")
    assert issubclass(rpc.RRef, importlib.import_module("gradwire.rpc").RRef)
    assert issubclass(
        optim.DistributedOptimizer,
        importlib.import_module("gradwire.optim").DistributedOptimizer,
    )
    assert issubclass(
        modules.RemoteModule, importlib.import_module("gradwire.nn").RemoteModule
    )
    assert rpc.BackendType.TENSORPIPE is rpc.BackendType["TENSORPIPE"]
    assert gradwire.torch_compat.is_installed()
    gradwire.torch_compat.install()
    assert torch.distributed.rpc is rpc


def device_maps() -> None:
    gradwire.torch_compat.install()
    rpc = importlib.import_module("torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method="file:///nowhere")
    options.set_device_map("worker1", {"cpu": "cpu"})
    translate = importlib.import_module("torch.distributed.rpc.options").translate
    assert translate(options).init_method == "file:///nowhere"
    options.set_device_map("worker1", {"cuda:0": "cuda:1"})
    try:
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    except RuntimeError as error:
        assert "map devices for worker 'worker1'" in str(error)
        assert ".cpu()" in str(error)
    else:
        raise AssertionError("device maps were accepted")


def options_are_mapped() -> None:
    gradwire.torch_compat.install()
    rpc = importlib.import_module("torch.distributed.rpc")
    given = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=3, rpc_timeout=7.5, init_method="tcp://localhost:1"
    )
    options = importlib.import_module("torch.distributed.rpc.options").translate(given)
    assert (options.num_worker_threads, options.rpc_timeout) == (3, 7.5)
    assert options.init_method == "tcp://localhost:1"
    assert options.init_timeout == 30 * 60


def errors() -> None:
    gradwire.torch_compat.install()
    as_torch_error = importlib.import_module(
        "gradwire.torch_compat._errors"
    ).as_torch_error
    late = CallTimeout("late", worker="w1")
    for error in (KeyError("a"), late, PeerLostError("gone"), Exception("plain")):
        twin = as_torch_error(error)
        assert isinstance(twin, type(error))
        assert isinstance(twin, RuntimeError)
        assert twin.args == error.args
        assert vars(error).items() <= vars(twin).items()
        again = pickle.loads(pickle.dumps(twin))
        assert type(again) is type(twin)
        assert str(again) == str(twin)
        abroad = as_torch_error(rebuild(describe(error, "w2")))
        assert isinstance(abroad, type(error))
        assert isinstance(abroad, RuntimeError)
        assert "w2" in str(abroad)
        further = rebuild(describe(abroad, "w3"))
        assert isinstance(further, type(error))
    assert "RPC ran for more than" in str(as_torch_error(late))
    sealed = as_torch_error(Sealed(3))
    assert isinstance(sealed, Sealed)
    assert isinstance(sealed, RuntimeError)
    assert sealed.args == (3,)
    missing = as_torch_error(FileNotFoundError(2, "not there", "a file"))
    assert isinstance(missing, FileNotFoundError)
    assert (missing.errno, missing.filename) == (2, "a file")
    value = ValueError("kept")
    assert as_torch_error(value) is value
