"""Options and their defaults; the only module that reads environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.errors import UsageError

__all__ = [
    "RpcBackendOptions",
    "TlsOptions",
    "find_name",
    "find_secret",
    "find_tls",
    "is_plain_tcp_allowed",
]

NAME_VARIABLE = "GRADWIRE_NAME"
"""Name of a worker that a launcher has started; the default of ``init_rpc``."""

ROLES_VARIABLE = "GRADWIRE_ROLES"
"""Roles of all workers, as ``launch._roles`` writes them."""

TLS_VARIABLES = ("GRADWIRE_TLS_CA", "GRADWIRE_TLS_CERT", "GRADWIRE_TLS_KEY")
"""Files of a worker for TLS; see `TlsOptions`."""

UNSET_TIMEOUT = -1.0
"""The value of ``timeout=`` that means "the default of the agent", as in torch."""

SERIALIZERS = ("pickle", "safe")

LONGEST_S = 1e6
"""What longer limits are taken as: clocks, locks and polls do not take any number."""


class _HiddenText(str):
    """A text that shows itself nowhere: dumps of local variables go to logs, too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"

    def __str__(self) -> str:
        return "<secret>"

    def __format__(self, spec: str) -> str:
        return "<secret>"


class _HiddenBytes(bytes):
    """As `_HiddenText`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"

    def __str__(self) -> str:
        return "<secret>"


def _hide(secret: str | bytes) -> str | bytes:
    return _HiddenText(secret) if isinstance(secret, str) else _HiddenBytes(secret)


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Files by which a worker proves who it is, and knows the others. All are PEM.

    ``gradwire certs`` makes them. They are read by ``init_rpc``.

    Attributes:
        ca: Certificates of the authorities that sign those of workers.
        certificate: Certificate of this worker, with those between it and the
            authority, if any. It must name the worker: see docs/security.md.
        key: Its private key, not encrypted.

    Example:
        >>> TlsOptions(ca="ca.pem", certificate="trainer0.pem", key="trainer0.key").ca
        'ca.pem'
    """

    ca: str | os.PathLike[str]
    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            value = getattr(self, name)
            if not isinstance(value, (str, os.PathLike)):
                raise TypeError(
                    f"{name} must be the path of a file, not {type(value).__name__}"
                )
            if not os.fspath(value):
                raise ValueError(
                    f"{name} must be the path of a file, found an empty one"
                )


@dataclass(frozen=True, kw_only=True)
class RpcBackendOptions:
    """What can be set for one worker's agent. All times are in seconds.

    Attributes:
        rpc_timeout: Default deadline of a call. 0: bounded by the peer's liveness only.
        init_method: Where workers meet: ``env://``, ``tcp://host:port`` or
            ``file:///path``.
        init_timeout: How long ``init_rpc`` waits for the other workers.
        connect_timeout: Limit for opening one connection, handshake included.
        lost_after: A peer that was not heard of for so long is lost.
        num_worker_threads: How many idle threads the pool keeps; it grows beyond that
            while handlers block.
        transports: Names of the transports to use, in order of preference. None: Unix
            sockets, and between hosts TLS if there are certificates, else plain TCP if
            ``allow_plain_tcp`` is set and there is a secret.
        allow_plain_tcp: Whether other hosts may be reached by plain TCP, where whoever
            is on the way can read and change everything. Naming ``tcp`` in
            ``transports``, or ``GRADWIRE_ALLOW_PLAIN_TCP=1``, allows it as well.
        bind_address: Address that the listener binds to. None: the advertised one.
        advertise_address: Address that others are told to connect to. None: found out.
        interface: Network interface whose address is advertised, for example ``eth0``.
        port: TCP port to listen on, 0 for any free one.
        secret: The cluster secret. None: taken from ``GRADWIRE_SECRET`` or from the file
            that ``GRADWIRE_SECRET_FILE`` names. Without any, only TLS and Unix sockets
            of the same user are used, and no plain TCP port is opened.
        tls: Certificates for TLS between hosts. None: taken from ``GRADWIRE_TLS_CA``,
            ``GRADWIRE_TLS_CERT`` and ``GRADWIRE_TLS_KEY``, if they are set.
        max_head_bytes: Limit for the part of a frame that is not raw tensor memory.
        max_frame_bytes: Limit for a whole frame.
        max_inflight_bytes: How many bytes of unanswered calls one peer may hold for us
            before ``rpc_async`` waits (calls made inside handlers never wait).
        shared_memory_min_bytes: Tensors of at least this size go through shared memory
            between workers on one host.
        shared_memory_keep_bytes: How many bytes of unused segments one connection keeps.
        serializer: How values travel, the same on all workers of a group: ``"pickle"``
            between workers that trust each other, ``"safe"`` if they do not: nothing is
            unpickled, and only what `gradwire.rpc.export` marks can be called.
        allowed_modules: With ``"pickle"``: only functions and classes of these packages
            and modules can be called or unpickled here. None: all that can be imported.
        max_peer_bytes: How many bytes of requests that we have not answered one peer may
            make us hold. Over this limit and the next three the peer gets an error.
        max_peer_calls: How many calls of one peer may be open here.
        max_peer_contexts: How many autograd contexts one peer may keep alive here.
        max_peer_rrefs: How many references to values of ours one peer may hold.

    Example:
        >>> RpcBackendOptions(rpc_timeout=5.0).rpc_timeout
        5.0
    """

    rpc_timeout: float = 60.0
    init_method: str = "env://"
    init_timeout: float = 60.0
    connect_timeout: float = 10.0
    lost_after: float = 10.0
    num_worker_threads: int = 16
    transports: tuple[str, ...] | None = None
    allow_plain_tcp: bool = False
    bind_address: str | None = None
    advertise_address: str | None = None
    interface: str | None = None
    port: int = 0
    secret: str | bytes | None = field(default=None, repr=False)
    tls: TlsOptions | None = None
    max_head_bytes: int = 1 << 30
    max_frame_bytes: int = 1 << 36
    max_inflight_bytes: int = 64 << 20
    shared_memory_min_bytes: int = 128 << 10
    shared_memory_keep_bytes: int = 512 << 20
    serializer: str = "pickle"
    allowed_modules: tuple[str, ...] | None = None
    max_peer_bytes: int = 1 << 36
    max_peer_calls: int = 1 << 20
    max_peer_contexts: int = 1 << 20
    max_peer_rrefs: int = 1 << 20

    def __post_init__(self) -> None:
        _check_seconds("rpc_timeout", self.rpc_timeout, zero_allowed=True)
        for name in ("init_timeout", "connect_timeout", "lost_after"):
            _check_seconds(name, getattr(self, name), zero_allowed=False)
            object.__setattr__(self, name, min(getattr(self, name), LONGEST_S))
        for name in (
            "num_worker_threads",
            "max_head_bytes",
            "max_frame_bytes",
            "max_inflight_bytes",
            "shared_memory_min_bytes",
            "max_peer_bytes",
            "max_peer_calls",
            "max_peer_contexts",
            "max_peer_rrefs",
        ):
            _check_count(name, getattr(self, name), minimum=1)
        _check_count(
            "shared_memory_keep_bytes", self.shared_memory_keep_bytes, minimum=0
        )
        _check_count("port", self.port, minimum=0)
        if self.max_head_bytes > 0xFFFFFFFF:
            raise ValueError(
                "max_head_bytes must fit 32 bits, as the head's length does on the wire"
            )
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, found {self.port}")
        if not isinstance(self.init_method, str) or "://" not in self.init_method:
            raise ValueError(
                "init_method must be a URL such as 'env://', 'tcp://host:port' or "
                f"'file:///path', found {self.init_method!r}"
            )
        if self.serializer not in SERIALIZERS:
            raise ValueError(
                f"serializer must be one of {', '.join(map(repr, SERIALIZERS))}, found "
                f"{self.serializer!r}"
            )
        if self.tls is not None and not isinstance(self.tls, TlsOptions):
            raise TypeError(
                f"tls must be a TlsOptions or None, not {type(self.tls).__name__}"
            )
        if not isinstance(self.allow_plain_tcp, bool):
            raise TypeError(
                "allow_plain_tcp must be a bool, not "
                f"{type(self.allow_plain_tcp).__name__}"
            )
        for name in ("bind_address", "advertise_address", "interface"):
            _check_text(name, getattr(self, name))
        _check_modules(self.allowed_modules)
        _check_transports(self.transports)
        if self.secret is not None:
            if not isinstance(self.secret, (str, bytes)):
                raise TypeError(
                    f"secret must be a str or bytes, not {type(self.secret).__name__}"
                )
            if not self.secret:
                raise ValueError("secret must not be empty; use None for 'no secret'")
            object.__setattr__(self, "secret", _hide(self.secret))


def _check_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")


def _check_transports(names: object) -> None:
    if isinstance(names, str):
        raise TypeError(
            f"transports must be a tuple of names of transports, found the str {names!r}; "
            f"write transports=({names!r},)"
        )
    if names is not None and not isinstance(names, (tuple, list)):
        raise TypeError(
            f"transports must be a tuple of names of transports, found {names!r:.200}"
        )
    if names is not None and not names:
        raise ValueError("transports must name at least one transport, or be None")


def _check_modules(names: object) -> None:
    if names is None:
        return
    if not isinstance(names, tuple) or not all(isinstance(n, str) and n for n in names):
        raise TypeError(
            f"allowed_modules must be a tuple of names of modules, found {names!r:.200}"
        )


def _check_seconds(name: str, value: object, *, zero_allowed: bool) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(
            f"{name} must be a number of seconds, not {type(value).__name__}"
        )
    if not value >= 0 or (value == 0 and not zero_allowed):  # also refuses NaN
        least = "at least 0" if zero_allowed else "above 0"
        raise ValueError(f"{name} must be {least} seconds, found {value}")


def _check_count(name: str, value: object, *, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, found {value}")


def find_secret(options: RpcBackendOptions) -> bytes | None:
    """The cluster secret from the options, the environment or a file; None if there is none."""
    secret = options.secret
    if secret is None:
        secret = os.environ.get("GRADWIRE_SECRET") or None
    if secret is None and (path := os.environ.get("GRADWIRE_SECRET_FILE")):
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise UsageError(
                f"GRADWIRE_SECRET_FILE names {path!r}, which cannot be read: {error}"
            ) from error
        if not secret:
            raise UsageError(f"GRADWIRE_SECRET_FILE names {path!r}, which is empty")
    if isinstance(secret, str):
        # The environment may hold bytes that are no text; an error would quote them.
        secret = secret.encode(errors="surrogateescape")
    return None if secret is None else _HiddenBytes(secret)


def find_name(name: str | None) -> str:
    """The name that was given, or that the launcher has given."""
    found = os.environ.get(NAME_VARIABLE) if name is None else name
    if found is None:
        raise UsageError(
            "a worker needs a name: pass one to init_rpc, or start the program with "
            f"'gradwire run', which sets {NAME_VARIABLE}"
        )
    return found


def find_tls(options: RpcBackendOptions) -> TlsOptions | None:
    """The certificates from the options or the environment; None if there are none."""
    if options.tls is not None:
        return options.tls
    paths = [os.environ.get(variable, "") for variable in TLS_VARIABLES]
    if not any(paths):
        return None
    if not all(paths):
        missing = [v for v, path in zip(TLS_VARIABLES, paths, strict=True) if not path]
        raise UsageError(
            f"TLS needs all of {', '.join(TLS_VARIABLES)}; missing: {', '.join(missing)}"
        )
    return TlsOptions(ca=paths[0], certificate=paths[1], key=paths[2])


def is_plain_tcp_allowed(options: RpcBackendOptions) -> bool:
    """Whether the options or the environment allow plain TCP between hosts."""
    if options.allow_plain_tcp:
        return True
    found = os.environ.get("GRADWIRE_ALLOW_PLAIN_TCP", "0")
    if found not in ("", "0", "1"):
        raise UsageError(f"GRADWIRE_ALLOW_PLAIN_TCP must be 0 or 1, found {found!r}")
    return found == "1"
