"""`RemoteModule`: a module here that stands for one on another worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from gradwire.errors import EncodeError, UsageError
from gradwire.nn import _owner as owner
from gradwire.nn._owner import Answer, Kind, StandIn
from gradwire.nn._placement import parse_placement
from gradwire.rpc import Future, RRef, remote, rpc_async, rpc_sync
from gradwire.rpc.extension import current_agent
from gradwire.wire import move

__all__ = ["RemoteModule", "parameter_rrefs"]

T = TypeVar("T")

_FIELDS = frozenset({"on", "device", "module_rref"})


def _through(name: str, *, sends_copies: bool = False) -> Any:
    """A method of `nn.Module` that runs on the real one, where the owner is.

    Args:
        name: Its name.
        sends_copies: Its arguments become part of the module, without their history.
    """

    def method(self: RemoteModule, /, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not sends_copies):
            return self._call_method(name, *args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"RemoteModule.{name}"
    method.__doc__ = f"See `torch.nn.Module.{name}`; it runs on the owner."
    return method


class RemoteModule(StandIn, nn.Module):
    """A module that lives on another worker, and is used as if it were here.

    Calling it calls the real one over there, and ``loss.backward()`` runs through the
    call. It can be a part of local modules, and can be sent to other workers, where it
    means the same module. Attributes and methods are those of the real module; tensors
    among them are copies, with their history.

    Parameters are on the owner and never here: `remote_parameters` gives references for
    a `gradwire.optim.DistributedOptimizer`, and ``parameters()`` of a local module that
    this one is part of gives the local ones only.

    Args:
        remote_device: ``"worker/device"`` or ``"rank:n/device"``; without a device: CPU.
        module_cls: A class, or a function that returns a module; the worker must be able
            to import it. With ``serializer="safe"``: one that the worker has exported,
            or its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Attributes:
        on: Name of the worker that has the module, its owner.
        device: The device there.
        module_rref: A reference to the module.

    Raises:
        ValueError: ``remote_device`` is malformed. What ``module_cls`` raises over there
            comes at the first use.

    Example:
        >>> layer = RemoteModule("worker1", nn.Linear, args=(20, 30))
        >>> layer(torch.randn(128, 20)).shape
        torch.Size([128, 30])
    """

    on: str
    device: str
    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module] | str,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        on, device = _locate(remote_device)
        agent = current_agent()
        if isinstance(module_cls, nn.Module):
            raise TypeError(
                "module_cls must be a class or function that makes a module on worker "
                f"{on!r}, found an instance of {type(module_cls).__name__}: pass the class, "
                "and its arguments as args=(...)"
            )
        if agent.is_safe and (callable(module_cls) or type(module_cls) is str):
            module_cls = agent.targets.name(module_cls) or ""
        elif not callable(module_cls):
            raise TypeError(
                "module_cls must be a class or function that makes a module, found "
                f"{type(module_cls).__name__}"
            )
        arguments = (
            module_cls,
            () if args is None else tuple(args),
            {} if kwargs is None else kwargs,
            device,
        )
        self._bind(on, device, remote(on, owner.create_module, arguments))

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str, module_rref: RRef[nn.Module]
    ) -> RemoteModule:
        """Another stand-in for a module that is referred to already.

        Args:
            remote_device: As in the constructor; the worker must be the owner.
            module_rref: The reference.
        """
        on, device = _locate(remote_device)
        if not isinstance(module_rref, RRef):
            raise TypeError(
                f"module_rref must be an RRef, found {type(module_rref).__name__}"
            )
        if module_rref.owner_name() != on:
            raise ValueError(
                f"remote_device {remote_device!r} is on worker {on!r}, but the module is "
                f"on worker {module_rref.owner_name()!r}"
            )
        return _rebuild(cls, on, device, module_rref)

    def _bind(self, on: str, device: str, module_rref: RRef[nn.Module]) -> None:
        self.on, self.device = on, device
        self.module_rref = module_rref

    # ------------------------------------------------------------------------- calling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the real module, with its hooks, and waits for the result."""
        if self.device == "cpu":
            return self.module_rref.rpc_sync().__call__(*args, **kwargs)
        return self._ask(owner.call_on_device, self.device, args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `forward`; returns a future at once."""
        if self.device == "cpu":
            future: Future[Any] = self.module_rref.rpc_async().__call__(*args, **kwargs)
            return future
        arguments = (self.module_rref, self.device, args, kwargs)
        return rpc_async(self.on, owner.call_on_device, arguments)

    # The compiler need not look inside: it breaks the graph here, as at any call.
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]
    forward_async._torchdynamo_disable = True  # type: ignore[attr-defined]

    # ---------------------------------------------------------------------- parameters

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Tensor]]:
        """References to the module's parameters, in their order.

        Args:
            recurse: Also those of its parts.
        """
        return list(self.remote_named_parameters(recurse).values())

    def remote_named_parameters(self, recurse: bool = True) -> dict[str, RRef[Tensor]]:
        """As `remote_parameters`, by name."""
        return dict(self._ask(owner.list_parameters, recurse))

    def get_module_rref(self) -> RRef[nn.Module]:
        """A reference to the module."""
        return self.module_rref

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Not possible: see `remote_parameters`."""
        self._refuse("parameters", "Please use ``remote_parameters`` instead")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> NoReturn:
        """Not possible: see `remote_named_parameters`."""
        self._refuse(
            "named_parameters", "Please use ``remote_named_parameters`` instead"
        )

    def buffers(self, recurse: bool = True) -> NoReturn:
        """Not possible: see `state_dict`."""
        self._refuse("buffers", "``state_dict`` has copies of their values")

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> NoReturn:
        """Not possible: see `state_dict`."""
        self._refuse("named_buffers", "``state_dict`` has copies of their values")

    def _refuse(self, name: str, remedy: str) -> NoReturn:
        # Nothing would be the truth, but an optimizer without parameters trains nothing.
        raise UsageError(
            f"Method ``{name}`` not supported for RemoteModule. {remedy}: the tensors are "
            f"on worker {self.on!r}, and none is here",
            worker=self.on,
        )

    # ------------------------------------------------- methods of all modules, over there

    train = _through("train")
    requires_grad_ = _through("requires_grad_")
    zero_grad = _through("zero_grad")
    apply = _through("apply")
    compile = _through("compile")
    share_memory = _through("share_memory")
    to = _through("to")
    to_empty = _through("to_empty")
    cpu = _through("cpu")
    cuda = _through("cuda")
    xpu = _through("xpu")
    ipu = _through("ipu")
    mtia = _through("mtia")
    type = _through("type")
    float = _through("float")
    double = _through("double")
    half = _through("half")
    bfloat16 = _through("bfloat16")
    get_parameter = _through("get_parameter")
    get_buffer = _through("get_buffer")
    get_submodule = _through("get_submodule")
    set_submodule = _through("set_submodule", sends_copies=True)
    get_extra_state = _through("get_extra_state")
    set_extra_state = _through("set_extra_state", sends_copies=True)
    register_buffer = _through("register_buffer", sends_copies=True)
    register_parameter = _through("register_parameter", sends_copies=True)
    register_module = _through("register_module", sends_copies=True)
    add_module = _through("add_module", sends_copies=True)

    @property
    def training(self) -> bool:
        """Whether the real module is in training mode."""
        return bool(self._ask(owner.get_attribute, "cpu", "training")[1])

    @training.setter
    def training(self, mode: bool) -> None:
        if self._is_bound():  # the constructor of `nn.Module` sets it, too
            self._ask(owner.set_attribute, "training", mode)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> RemoteModule:
        """Called when a module that this one is part of is converted.

        ``fn`` cannot be sent. What it does to dtypes is found with empty tensors; the
        device stays, as it was chosen for this module and for that worker.
        """
        dtypes = self._find_dtypes()
        changes = {dtype: fn(torch.empty(0, dtype=dtype)).dtype for dtype in dtypes}
        if any(before != after for before, after in changes.items()):
            self._ask(owner.change_dtypes, changes)
        return self

    def _find_dtypes(self) -> set[torch.dtype]:
        return self._ask(owner.find_dtypes)

    # --------------------------------------------------------------------------- state

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Called by `state_dict`, that of this module or of one that it is part of."""
        # What is detached, or not there yet in a lazy module, has no history to send.
        with torch.set_grad_enabled(torch.is_grad_enabled() and keep_vars):
            values, metadata = self._ask(owner.read_state, keep_vars)
        for name, value in values.items():
            destination[prefix + name] = value
        entries = getattr(destination, "_metadata", None)
        if entries is not None:
            for path, entry in metadata.items():
                entries[owner.join(prefix, path)] = entry

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Called by `load_state_dict`, that of this module or of one that it is part of.

        The latter does not show us what is noted about the parts of the real module. If
        something is noted about the module itself, the state is taken for a current one.
        """
        for hook in self._load_state_dict_pre_hooks.values():
            hook(
                state_dict,
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )
        values = {k: v for k, v in state_dict.items() if k.startswith(prefix)}
        metadata = getattr(state_dict, "_metadata", None)
        is_current = "version" in local_metadata
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        with torch.no_grad():
            loaded = self._ask(
                owner.load_state,
                prefix,
                move(values, "cpu"),
                None if metadata is None else dict(metadata),
                is_current,
                assign,
            )
        missing, unexpected, errors = loaded
        missing_keys += missing
        unexpected_keys += unexpected
        error_msgs += errors

    # ---------------------------------------------------------------------- attributes

    def __getattr__(self, name: str) -> Any:
        """An attribute of the real module. Private names are not looked for there."""
        if name.startswith("_") or not self._is_bound():
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; names that "
                "begin with an underscore are not looked for on the owner"
            )
        try:
            answer = self._ask(owner.get_attribute, self.device, name)
        except EncodeError as error:
            raise EncodeError(
                f"attribute {name!r} of the module on worker {self.on!r} cannot be sent: "
                f"{error.args[0]}. Call a function there that uses it: it can take "
                "get_module_rref()",
                worker=self.on,
            ) from error
        if answer[0] == Kind.METHOD:
            return functools.partial(self._call_method, name)
        return self._receive(answer)

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            name.startswith("_")
            or name in _FIELDS
            or hasattr(type(self), name)
            or not self._is_bound()
        ):
            super().__setattr__(name, value)
            return
        with torch.no_grad():  # a copy, without its history
            self._ask(owner.set_attribute, name, value)

    def _call_method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        # What is awaited there has its result by the time that it comes here.
        answer: Any = self._ask(owner.call_method, self.device, name, args, kwargs)
        return self._receive(answer)

    def _receive(self, answer: Answer) -> Any:
        kind, content = answer
        if kind == Kind.ITSELF:
            self.device = content
            return self
        if kind == Kind.MODULE:
            return _rebuild(RemoteModule, self.on, self.device, content)
        return content

    def _is_bound(self) -> bool:
        return "module_rref" in self.__dict__

    def _ask(self, function: Callable[..., T], *args: Any) -> T:
        return rpc_sync(self.on, function, (self.module_rref, *args))

    # ------------------------------------------------------------------------- copying

    def __reduce__(self) -> Any:
        # A reference can be pickled in messages only, and so can this.
        return _rebuild, (type(self), self.on, self.device, self.module_rref)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(
            f"a RemoteModule cannot be copied: the module is on worker {self.on!r}. "
            "copy.copy() gives another stand-in for it, and "
            "get_module_rref().to_here() a copy of the module on this worker",
            worker=self.on,
        )

    def extra_repr(self) -> str:
        """Where the module is."""
        return f"on={self.on!r}, device={self.device!r}"


def parameter_rrefs(module: nn.Module) -> list[RRef[Tensor]]:
    """References to all parameters of a module, those of remote modules in it included.

    Args:
        module: A module of this worker.

    Returns:
        The references, for a `gradwire.optim.DistributedOptimizer`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), RemoteModule("worker1", nn.Linear, (3, 1)))
        >>> [rref.owner_name() for rref in parameter_rrefs(model)]
        ['worker0', 'worker0', 'worker1', 'worker1']
    """
    return list(owner.refer_to_parameters(module, recurse=True).values())


def _locate(remote_device: str) -> tuple[str, str]:
    worker, device = parse_placement(remote_device)
    return current_agent().network.find(worker).info.name, device


def _rebuild(
    cls: type[RemoteModule], on: str, device: str, module_rref: RRef[nn.Module]
) -> RemoteModule:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module._bind(on, device, module_rref)
    return module
