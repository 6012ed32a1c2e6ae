"""The exception tree: everything that gradwire raises on its own account.

    GradwireError
      UsageError(RuntimeError)        NotInitialized, UnknownWorker, InvalidWorkerName,
                                      NoActiveContext, UnknownContext, ContextReleased,
                                      NotExported
      TransportError                  ConnectError, ClosedError, PeerLostError, OwnerLost
      ProtocolError                   LocalProtocolError, RemoteProtocolError,
                                      VersionMismatch, HandshakeRefused
      SerializationError              EncodeError, DecodeError
      DeadlineExceeded(TimeoutError)  ConnectTimeout, CallTimeout, ShutdownTimeout,
                                      BackwardTimeout, LaunchTimeout
      LaunchError(RuntimeError)       a worker that was started has died
      RemoteError                     user code raised on another worker
      LimitExceeded                   a worker asked for more than another one grants it
      AutogradError(RuntimeError)     BackwardFailed, GraphConsumed, ForeignGraph
      NotRepeatable                   a step was applied in part, or its error came late
      RolledBack                      steps were undone, the program has to repeat them
      SnapshotError                   a saved state is missing or damaged

The tree is split by what the caller can do about it: mend the program (UsageError,
AutogradError, SerializationError), wait or go on without a worker (TransportError,
DeadlineExceeded), ask for less (LimitExceeded), report a bug or a stranger
(ProtocolError), look at the other worker (RemoteError, LaunchError), or begin again from a saved
state (NotRepeatable, RolledBack).
Bad argument types and values raise plain ``TypeError`` and ``ValueError``.

Every error keeps its facts as attributes and survives pickling.

Example:
    >>> try:
    ...     rpc_sync("worker1", time.sleep, args=(0.5,), timeout=0.05)
    ... except DeadlineExceeded as error:
    ...     print(type(error).__name__, error.about)
    CallTimeout worker1
"""

from __future__ import annotations

__all__ = [
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


class GradwireError(Exception):
    """Base of every error that gradwire raises on its own account.

    Args:
        message: What was expected, what was found, and what to do next.
        worker: Name of the worker that the error is about, where there is one.

    Attributes:
        worker: Likewise; but if the error has come from another worker, the name of that.
        about: Name of the worker that the error is about, wherever it was raised.

    Example:
        >>> try:
        ...     rpc_sync("worker7", max, args=(1, 2))
        ... except GradwireError as error:
        ...     print(type(error).__name__)
        UnknownWorker
    """

    about: str | None = None

    def __init__(self, message: str = "", *, worker: str | None = None) -> None:
        super().__init__(message)
        self.worker = self.about = worker


class UsageError(GradwireError, RuntimeError):
    """The program asked for something that makes no sense here and now.

    Example:
        >>> Future().value()
        Traceback (most recent call last):
            ...
        gradwire.errors.UsageError: value() was called on a future that is not done; use wait()
    """


class NotInitialized(UsageError):
    """A call was made before ``init_rpc`` or after ``shutdown``.

    Example:
        >>> init_rpc("worker0", rank=0, world_size=1)
        >>> shutdown()
        >>> rpc_sync("worker0", max, args=(1, 2))
        Traceback (most recent call last):
            ...
        gradwire.errors.NotInitialized: RPC has not been initialized. Call init_rpc() first; ...
    """


class UnknownWorker(UsageError):
    """The destination is not a member of this group.

    Example:
        >>> rpc_sync("worker7", max, args=(1, 2))
        Traceback (most recent call last):
            ...
        gradwire.errors.UnknownWorker: ...worker7...
    """


class InvalidWorkerName(UsageError, ValueError):
    """A worker name is empty, too long, or has characters that names may not have.

    Example:
        >>> wait_for_worker("worker 1")
        Traceback (most recent call last):
            ...
        gradwire.errors.InvalidWorkerName: ...found 'worker 1'
    """


class NoActiveContext(UsageError):
    """Something that needs an autograd context was asked for outside of any.

    Example:
        >>> issubclass(NoActiveContext, UsageError)
        True
    """


class UnknownContext(UsageError):
    """No autograd context with this id is known to this worker.

    Example:
        >>> get_gradients(10**15)
        Traceback (most recent call last):
            ...
        gradwire.errors.UnknownContext: ...
    """


class ContextReleased(UnknownContext):
    """The autograd context was left; its graphs and gradients are gone.

    Example:
        >>> with context() as ctx:
        ...     pass
        >>> ctx.gradients()
        Traceback (most recent call last):
            ...
        gradwire.errors.ContextReleased: ...
    """


class NotExported(UsageError):
    """With ``serializer="safe"``: what was asked for is not exported to the caller.

    Example:
        >>> issubclass(NotExported, UsageError)
        True
    """


class TransportError(GradwireError):
    """Bytes could not be moved between two workers.

    Example:
        >>> issubclass(PeerLostError, TransportError)
        True
    """


class ConnectError(TransportError):
    """No connection to a worker could be opened.

    Example:
        >>> options = RpcBackendOptions(transports=("tcp",))  # and no secret
        >>> init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        Traceback (most recent call last):
            ...
        gradwire.errors.ConnectError: ...
    """


class ClosedError(TransportError):
    """The connection or the agent was closed by this side.

    Example:
        >>> issubclass(ClosedError, TransportError)
        True
    """


class PeerLostError(TransportError):
    """The other worker died, stopped answering, or left while it was needed.

    Example:
        >>> try:
        ...     rpc_sync("worker1", os._exit, args=(1,))
        ... except PeerLostError as error:
        ...     print(f"{error.about} is gone")
        worker1 is gone
    """


class OwnerLost(PeerLostError):
    """The worker that owns a referenced value is gone, and the value with it.

    Example:
        >>> table = remote("worker1", dict)
        >>> gone = rpc_async("worker1", os._exit, args=(1,))
        >>> table.to_here()
        Traceback (most recent call last):
            ...
        gradwire.errors.OwnerLost: ...worker1...
    """


class ProtocolError(GradwireError):
    """One side broke the rules of the wire protocol.

    Example:
        >>> issubclass(HandshakeRefused, ProtocolError)
        True
    """


class LocalProtocolError(ProtocolError):
    """This side was about to send something that the protocol does not allow.

    Example:
        >>> issubclass(LocalProtocolError, ProtocolError)
        True
    """


class RemoteProtocolError(ProtocolError):
    """The other side sent something that the protocol does not allow.

    Example:
        >>> issubclass(RemoteProtocolError, ProtocolError)
        True
    """


class VersionMismatch(ProtocolError):
    """The two sides speak different versions of the protocol.

    Example:
        >>> issubclass(VersionMismatch, ProtocolError)
        True
    """


class HandshakeRefused(ProtocolError):
    """One side refused the other: wrong secret, wrong user, or a name that is taken.

    Attributes:
        code: One word for the kind of refusal, for example ``secret`` or ``taken``.

    Example:
        >>> HandshakeRefused("the secrets differ", worker="worker1", code="secret").code
        'secret'
    """

    def __init__(
        self, message: str = "", *, worker: str | None = None, code: str = "protocol"
    ) -> None:
        super().__init__(message, worker=worker)
        self.code = code


class SerializationError(GradwireError):
    """A value could not be turned into bytes, or bytes into a value.

    Example:
        >>> try:
        ...     rpc_sync("worker1", lambda: 1)
        ... except SerializationError as error:
        ...     print(type(error).__name__)
        EncodeError
    """


class EncodeError(SerializationError):
    """A value cannot be sent; raised on the worker that tried to send it.

    Example:
        >>> rpc_sync("worker1", lambda: 1)
        Traceback (most recent call last):
            ...
        gradwire.errors.EncodeError: ...
    """


class DecodeError(SerializationError):
    """A value that arrived cannot be rebuilt, for example a function that is not there.

    Example:
        >>> issubclass(DecodeError, SerializationError)
        True
    """


class DeadlineExceeded(GradwireError, TimeoutError):
    """A wait reached its limit; the message says for whom it waited.

    Example:
        >>> Future().wait(timeout=0.01)
        Traceback (most recent call last):
            ...
        gradwire.errors.DeadlineExceeded: the future had no result after 0.01 s; it ...
    """


class ConnectTimeout(DeadlineExceeded):
    """Workers did not appear, or did not answer, in time.

    Example:
        >>> wait_for_worker("worker7", timeout=0.01)
        Traceback (most recent call last):
            ...
        gradwire.errors.ConnectTimeout: ...worker7...
    """


class CallTimeout(DeadlineExceeded):
    """A call did not return before its deadline.

    Example:
        >>> rpc_sync("worker1", time.sleep, args=(0.5,), timeout=0.05)
        Traceback (most recent call last):
            ...
        gradwire.errors.CallTimeout: ...worker1...
    """


class ShutdownTimeout(DeadlineExceeded):
    """A graceful shutdown reached its limit before all workers were done.

    Example:
        >>> issubclass(ShutdownTimeout, TimeoutError)
        True
    """


class BackwardTimeout(DeadlineExceeded):
    """A backward pass did not end before the limit that it was given.

    Example:
        >>> issubclass(BackwardTimeout, TimeoutError)
        True
    """


class LaunchError(GradwireError, RuntimeError):
    """A worker that was started here has died, or could not be started.

    Example:
        >>> spawn(os._exit, roles=1, args=(3,))
        Traceback (most recent call last):
            ...
        gradwire.errors.LaunchError: ...
    """


class LaunchTimeout(DeadlineExceeded):
    """Workers that were started here were not done in time; they were ended.

    Example:
        >>> spawn(time.sleep, roles=1, args=(60,), timeout=0.1)
        Traceback (most recent call last):
            ...
        gradwire.errors.LaunchTimeout: ...
    """


class AutogradError(GradwireError, RuntimeError):
    """A backward pass cannot give the gradients that one process would.

    Example:
        >>> issubclass(GraphConsumed, AutogradError)
        True
    """


class BackwardFailed(AutogradError):
    """A pass was ended for a reason that lies in no backward function.

    An error in a backward function of some worker keeps its own type instead.

    Example:
        >>> issubclass(BackwardFailed, AutogradError)
        True
    """


class GraphConsumed(AutogradError):
    """The graph was used by an earlier pass that did not retain it.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with context() as ctx:
        ...     loss = rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        ...     ctx.backward(loss)
        ...     ctx.backward(loss)
        Traceback (most recent call last):
            ...
        gradwire.errors.GraphConsumed: ...
    """


class ForeignGraph(AutogradError):
    """A pass reached a tensor that belongs to another call or to another context.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> loss = rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        >>> with context() as ctx:
        ...     ctx.backward(loss)  # the call was made outside of the context
        Traceback (most recent call last):
            ...
        gradwire.errors.ForeignGraph: ...
    """


class NotRepeatable(GradwireError):
    """A step cannot be run again, because something of it has been applied for good.

    Example:
        >>> issubclass(NotRepeatable, GradwireError)
        True
    """


class LimitExceeded(GradwireError):
    """A worker asked for more than this one grants to a single peer.

    Attributes:
        limit: Name of the option that sets the limit.
        value: Its value.
        peer: The worker that asked.

    Example:
        >>> issubclass(LimitExceeded, GradwireError)
        True
    """

    limit: str = ""
    value: int = 0
    peer: str | None = None

    def __init__(
        self,
        message: str = "",
        *,
        worker: str | None = None,
        limit: str = "",
        value: int = 0,
        peer: str | None = None,
    ) -> None:
        super().__init__(message, worker=worker)
        self.limit, self.value, self.peer = limit, value, peer


class RolledBack(GradwireError):
    """Owners of parameters were taken back to a snapshot; later steps are undone.

    Attributes:
        step: How many steps are still made: go on with this one, counted from 0.

    Example:
        >>> RolledBack("back to the snapshot of step 40", step=40).step
        40
    """

    def __init__(
        self, message: str = "", *, worker: str | None = None, step: int = 0
    ) -> None:
        super().__init__(message, worker=worker)
        self.step = step


class SnapshotError(GradwireError):
    """A snapshot is missing, damaged, or of something else.

    Example:
        >>> issubclass(SnapshotError, GradwireError)
        True
    """


class RemoteError(GradwireError):
    """User code raised on another worker.

    An exception whose class can be imported here arrives as an instance of *both* that
    class and this one. One that cannot be sent or rebuilt arrives as a plain
    ``RemoteError`` that carries its text.

    Attributes:
        worker: Name of the worker on which the exception was raised.
        remote_type: Qualified name of the original class.
        remote_traceback: Formatted traceback of the original exception.

    Example:
        >>> try:
        ...     rpc_sync("worker1", divmod, args=(1, 0))
        ... except RemoteError as error:
        ...     print(error.worker, error.remote_type)
        worker1 builtins.ZeroDivisionError
        >>> try:
        ...     rpc_sync("worker1", divmod, args=(1, 0))
        ... except ZeroDivisionError as error:  # it is also what it was over there
        ...     print(error.args[0])
        integer division or modulo by zero
    """

    worker: str | None = None
    remote_type: str = ""
    remote_traceback: str = ""

    def __str__(self) -> str:
        text = super().__str__()
        if not self.remote_traceback:
            return text
        return f"{text}\n\nRaised on worker {self.worker!r}:\n{self.remote_traceback.rstrip()}"
