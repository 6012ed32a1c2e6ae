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
                                      BackwardTimeout
      RemoteError                     user code raised on another worker
      LimitExceeded                   a worker asked for more than another one grants it
      AutogradError(RuntimeError)     BackwardFailed, GraphConsumed, ForeignGraph
      NotRepeatable                   a step was applied in part, or its error came late

The tree is split by what the caller can do about it: mend the program (UsageError,
AutogradError, SerializationError), wait or go on without a worker (TransportError,
DeadlineExceeded), ask for less (LimitExceeded), report a bug or a stranger
(ProtocolError), look at the other worker (RemoteError), or begin again from a saved
state (NotRepeatable).
Bad argument types and values raise plain ``TypeError`` and ``ValueError``.

Every error keeps its facts as attributes and survives pickling.
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
    "SerializationError",
    "ShutdownTimeout",
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
    """

    about: str | None = None

    def __init__(self, message: str = "", *, worker: str | None = None) -> None:
        super().__init__(message)
        self.worker = self.about = worker


class UsageError(GradwireError, RuntimeError):
    """The program asked for something that makes no sense here and now."""


class NotInitialized(UsageError):
    """A call was made before ``init_rpc`` or after ``shutdown``."""


class UnknownWorker(UsageError):
    """The destination is not a member of this group."""


class InvalidWorkerName(UsageError, ValueError):
    """A worker name is empty, too long, or has characters that names may not have."""


class NoActiveContext(UsageError):
    """Something that needs an autograd context was asked for outside of any."""


class UnknownContext(UsageError):
    """No autograd context with this id is known to this worker."""


class ContextReleased(UnknownContext):
    """The autograd context was left; its graphs and gradients are gone."""


class NotExported(UsageError):
    """With ``serializer="safe"``: what was asked for is not exported to the caller."""


class TransportError(GradwireError):
    """Bytes could not be moved between two workers."""


class ConnectError(TransportError):
    """No connection to a worker could be opened."""


class ClosedError(TransportError):
    """The connection or the agent was closed by this side."""


class PeerLostError(TransportError):
    """The other worker died, stopped answering, or left while it was needed."""


class OwnerLost(PeerLostError):
    """The worker that owns a referenced value is gone, and the value with it."""


class ProtocolError(GradwireError):
    """One side broke the rules of the wire protocol."""


class LocalProtocolError(ProtocolError):
    """This side was about to send something that the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something that the protocol does not allow."""


class VersionMismatch(ProtocolError):
    """The two sides speak different versions of the protocol."""


class HandshakeRefused(ProtocolError):
    """One side refused the other: wrong secret, wrong user, or a name that is taken.

    Attributes:
        code: One word for the kind of refusal, for example ``secret`` or ``taken``.
    """

    def __init__(
        self, message: str = "", *, worker: str | None = None, code: str = "protocol"
    ) -> None:
        super().__init__(message, worker=worker)
        self.code = code


class SerializationError(GradwireError):
    """A value could not be turned into bytes, or bytes into a value."""


class EncodeError(SerializationError):
    """A value cannot be sent; raised on the worker that tried to send it."""


class DecodeError(SerializationError):
    """A value that arrived cannot be rebuilt, for example a function that is not there."""


class DeadlineExceeded(GradwireError, TimeoutError):
    """A wait reached its limit; the message says for whom it waited."""


class ConnectTimeout(DeadlineExceeded):
    """Workers did not appear, or did not answer, in time."""


class CallTimeout(DeadlineExceeded):
    """A call did not return before its deadline."""


class ShutdownTimeout(DeadlineExceeded):
    """A graceful shutdown reached its limit before all workers were done."""


class BackwardTimeout(DeadlineExceeded):
    """A backward pass did not end before the limit that it was given."""


class LaunchError(GradwireError, RuntimeError):
    """A worker that was started here has died, or could not be started."""


class LaunchTimeout(DeadlineExceeded):
    """Workers that were started here were not done in time; they were ended."""


class AutogradError(GradwireError, RuntimeError):
    """A backward pass cannot give the gradients that one process would."""


class BackwardFailed(AutogradError):
    """A pass was ended for a reason that lies in no backward function.

    An error in a backward function of some worker keeps its own type instead.
    """


class GraphConsumed(AutogradError):
    """The graph was used by an earlier pass that did not retain it."""


class ForeignGraph(AutogradError):
    """A pass reached a tensor that belongs to another call or to another context."""


class NotRepeatable(GradwireError):
    """A step cannot be run again, because something of it has been applied for good."""


class LimitExceeded(GradwireError):
    """A worker asked for more than this one grants to a single peer.

    Attributes:
        limit: Name of the option that sets the limit.
        value: Its value.
        peer: The worker that asked.
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


class RemoteError(GradwireError):
    """User code raised on another worker.

    An exception whose class can be imported here arrives as an instance of *both* that
    class and this one. One that cannot be sent or rebuilt arrives as a plain
    ``RemoteError`` that carries its text.

    Attributes:
        worker: Name of the worker on which the exception was raised.
        remote_type: Qualified name of the original class.
        remote_traceback: Formatted traceback of the original exception.
    """

    worker: str | None = None
    remote_type: str = ""
    remote_traceback: str = ""

    def __str__(self) -> str:
        text = super().__str__()
        if not self.remote_traceback:
            return text
        return f"{text}\n\nRaised on worker {self.worker!r}:\n{self.remote_traceback.rstrip()}"
