"""What ``torch.distributed.nn.api.remote_module`` is while the drop-in is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

import gradwire.nn
import gradwire.rpc
from gradwire.errors import UsageError
from gradwire.torch_compat._errors import torch_errors
from gradwire.torch_compat.futures import TorchFuture, adopt
from gradwire.torch_compat.rpc.rref import adopt_reference

__all__ = ["RemoteModule", "pack", "script", "unpack"]

T = TypeVar("T")

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
"""What torch's programs find in one that was sent to them."""


def _unsupported(name: str, remedy: str = "") -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule{remedy}")

    refuse.__name__ = name
    refuse.__doc__ = "Not possible, as in torch."
    return refuse


class _RemoteModule(gradwire.nn.RemoteModule):
    """A module that lives on another worker, with the methods that torch's has.

    Args:
        remote_device: ``"worker/device"`` or ``"rank:n/device"``; without a device: CPU.
        module_cls: A class, or a function that returns a module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        _module_interface_cls: Says that the real module is scripted.
    """

    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: tuple[Callable[..., Any], ...]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        try:
            with torch_errors():
                super().__init__(remote_device, module_cls, args, kwargs)
        except ValueError as error:
            # Torch lets the class of devices complain about a device that there is not.
            if isinstance(error.__cause__, RuntimeError):
                raise UsageError(str(error)) from error.__cause__
            raise
        self.__dict__["is_scriptable"] = _module_interface_cls is not None

    @classmethod
    def init_from_module_rref(
        cls,
        remote_device: str,
        module_rref: gradwire.rpc.RRef[nn.Module],
        _module_interface_cls: Any = None,
    ) -> _RemoteModule:
        """Another stand-in for a module that is referred to already.

        Torch does not mind a worker that is not the module's owner; it is not asked.
        """
        device = remote_device.partition("/")[2] or "cpu"
        scriptable = _module_interface_cls is not None
        module: _RemoteModule = _arrive(cls, module_rref, device, scriptable)
        return module

    def _bind(
        self, on: str, device: str, module_rref: gradwire.rpc.RRef[nn.Module]
    ) -> None:
        # In the order of torch's; past `__setattr__`, which is for the real module.
        self.__dict__.update(
            on=on,
            device=device,
            is_device_map_set=False,
            is_scriptable=False,
            generated_methods=(),
            module_rref=adopt_reference(module_rref),
        )

    def forward_async(self, *args: Any, **kwargs: Any) -> TorchFuture[Any]:
        """As `forward`; returns a future at once."""
        with torch_errors():
            return adopt(super().forward_async(*args, **kwargs))

    # As that of the class above.
    forward_async._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _ask(self, function: Callable[..., T], *args: Any) -> T:
        with torch_errors():
            return super()._ask(function, *args)

    def __getattr__(self, name: str) -> Any:
        # One that was sent becomes a whole module when it is first used as one.
        if name in _MODULE_STATE and name not in self.__dict__:
            nn.Module.__init__(self)
            return self.__dict__[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # As in torch, an attribute that is set here is not set on the owner.
        nn.Module.__setattr__(self, name, value)

    def __reduce__(self) -> NoReturn:
        text = (
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be "
            "pickled when using RPC"
        )
        raise torch.jit.Error(text) if self.is_scriptable else UsageError(text)

    register_buffer = _unsupported("register_buffer")
    register_parameter = _unsupported("register_parameter")
    add_module = _unsupported("add_module")
    apply = _unsupported("apply")
    cuda = _unsupported("cuda")
    ipu = _unsupported("ipu")
    xpu = _unsupported("xpu")
    cpu = _unsupported("cpu")
    type = _unsupported("type")
    float = _unsupported("float")
    double = _unsupported("double")
    half = _unsupported("half")
    bfloat16 = _unsupported("bfloat16")
    to = _unsupported("to")
    register_backward_hook = _unsupported("register_backward_hook")
    register_forward_pre_hook = _unsupported("register_forward_pre_hook")
    register_forward_hook = _unsupported("register_forward_hook")
    state_dict = _unsupported("state_dict")
    load_state_dict = _unsupported("load_state_dict")
    parameters = _unsupported(
        "parameters", ". Please use ``remote_parameters`` instead."
    )
    named_parameters = _unsupported("named_parameters")
    buffers = _unsupported("buffers")
    named_buffers = _unsupported("named_buffers")
    children = _unsupported("children")
    named_children = _unsupported("named_children")
    modules = _unsupported("modules")
    named_modules = _unsupported("named_modules")
    requires_grad_ = _unsupported("requires_grad_")
    zero_grad = _unsupported("zero_grad")
    share_memory = _unsupported("share_memory")
    extra_repr = _unsupported("extra_repr")


class RemoteModule(_RemoteModule):
    """A module that lives on another worker; see `gradwire.nn.RemoteModule`."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


_MODULE_STATE = frozenset(nn.Module().__dict__)


def _arrive(
    cls: Any, module_rref: gradwire.rpc.RRef[nn.Module], device: str, scriptable: bool
) -> Any:
    """A stand-in that is not made by its constructor, as torch's programs find it."""
    module = cls.__new__(cls)
    module._bind(module_rref.owner_name(), device, module_rref)
    fields = module.__dict__
    fields["is_scriptable"] = scriptable
    # Torch makes these two for each module, and so programs find them there.
    fields["forward_async"] = cls.forward_async.__get__(module)
    fields["forward"] = cls.forward.__get__(module)
    return module


def pack(module: _RemoteModule) -> tuple[Any, ...]:
    """What is sent of one; attributes that a program has added are not."""
    if module.is_scriptable:
        raise UsageError(
            "Passing a script RemoteModule over RPC is not supported. Send its "
            "`module_rref`, and make a RemoteModule of that with init_from_module_rref()"
        )
    return type(module), module.module_rref, module.device


def unpack(packed: tuple[Any, ...]) -> Any:
    """The module that `pack` was given."""
    cls, module_rref, device = packed
    return _arrive(cls, module_rref, device, False)


_script = torch.jit.script


def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``torch.jit.script``; a remote module stays as it is.

    There is nothing in it to compile: the real module is elsewhere, and can be scripted
    there.
    """
    if isinstance(obj, gradwire.nn.RemoteModule):
        return obj
    return _script(obj, *args, **kwargs)
