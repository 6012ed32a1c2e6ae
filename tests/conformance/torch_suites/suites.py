"""Finds torch's test suites in the installed wheel and makes classes that can run.

Nothing of the suites is changed. Torch makes its test classes in the same way: a suite,
a fixture that says which backend to use, and the class that runs one test in several
processes.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

__all__ = ["SUITES", "Suite", "TorchScriptNeeded", "load", "prepare", "tests_of"]

_TESTING = "torch.testing._internal"
_RPC = f"{_TESTING}.distributed.rpc"

SUITES = {
    "RpcTest": f"{_RPC}.rpc_test",
    "TensorPipeAgentRpcTest": f"{_RPC}.rpc_test",
    "DistAutogradTest": f"{_RPC}.dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": f"{_RPC}.dist_autograd_test",
    "DistOptimizerTest": f"{_RPC}.dist_optimizer_test",
    "RemoteModuleTest": f"{_TESTING}.distributed.nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": f"{_TESTING}.distributed.nn.api.remote_module_test",
    "DdpUnderDistAutogradTest": f"{_TESTING}.distributed.ddp_under_dist_autograd_test",
    "DdpComparisonTest": f"{_TESTING}.distributed.ddp_under_dist_autograd_test",
    "ParameterServerTest": f"{_RPC}.examples.parameter_server_test",
    "ReinforcementLearningRpcTest": f"{_RPC}.examples.reinforcement_learning_rpc_test",
}
"""Name of each suite, and the module of the wheel that has it."""


class TorchScriptNeeded(Exception):
    """A test used a function that only TorchScript can run."""


class _Scripted:
    """Stands for a function that the suites compile when they are imported.

    The compiler knows torch's own RRefs only, so a function that takes them cannot be
    compiled while the drop-in is there. A test that comes to use one is recognised.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.__name__ = self.__qualname__ = getattr(target, "__name__", "scripted")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TorchScriptNeeded(f"{self.__name__} is a TorchScript function")

    def __reduce__(self) -> Any:
        raise TorchScriptNeeded(f"{self.__name__} is a TorchScript function")


class Suite(NamedTuple):
    cls: Any
    world_size: int
    tests: list[str]


def prepare(*, with_torch: bool) -> None:
    """Makes ``torch.distributed.rpc`` what the suites are to test; call it once, first.

    Args:
        with_torch: Leave torch's own RPC in place, to see what the harness says of it.
    """
    if with_torch:
        return
    importlib.import_module("gradwire.torch_compat").install()
    compile_module = torch.jit.script

    def script(target: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(target, torch.nn.Module):
            return compile_module(target, *args, **kwargs)
        return _Scripted(target)

    torch.jit.script = script  # type: ignore[assignment]
    torch.jit.interface = _Scripted  # type: ignore[assignment]


def load(name: str) -> Suite:
    """One suite, ready to run."""
    suite = getattr(importlib.import_module(SUITES[name]), name)
    fixture = importlib.import_module(f"{_RPC}.tensorpipe_rpc_agent_test_fixture")
    multi = importlib.import_module(f"{_TESTING}.common_distributed")
    bases = (suite, fixture.TensorPipeRpcAgentTestFixture, multi.MultiProcessTestCase)
    # Some tests send themselves to others, so the class must be found by its name.
    cls = globals()[name] = type(name, bases, {"__module__": __name__})
    tests = sorted(one for one in dir(cls) if one.startswith("test"))
    return Suite(cls, int(cls(tests[0]).world_size), tests)


def tests_of(suites: dict[str, Suite]) -> list[str]:
    """All tests, as ``Suite.test``."""
    return [f"{name}.{test}" for name, suite in suites.items() for test in suite.tests]
