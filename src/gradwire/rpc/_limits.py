"""How much one peer may make this worker hold; accounting only, no locks and no I/O.

Whoever counts does so under a lock that it needs anyway. A peer that is over a limit gets
an error for the request that went over it; nobody else notices. The worker itself is not
limited.
"""

from __future__ import annotations

from gradwire._config import RpcBackendOptions
from gradwire.errors import LimitExceeded

__all__ = ["Held", "PeerLimits"]


class Held:
    """What one peer makes us hold: requests that are not answered yet."""

    __slots__ = ("calls", "nbytes")

    def __init__(self) -> None:
        self.calls = 0
        self.nbytes = 0


class PeerLimits:
    """What one agent grants to each of its peers.

    Args:
        options: With the limits.
        worker: Name of this worker.

    Attributes:
        nbytes: Bytes of requests that are not answered.
        calls: Number of them.
        contexts: Autograd contexts that a peer has brought, and that live here.
        rrefs: References of a peer to values of ours.
    """

    __slots__ = ("_worker", "calls", "contexts", "nbytes", "rrefs")

    def __init__(self, options: RpcBackendOptions, worker: str) -> None:
        self._worker = worker
        self.nbytes = options.max_peer_bytes
        self.calls = options.max_peer_calls
        self.contexts = options.max_peer_contexts
        self.rrefs = options.max_peer_rrefs

    def over_requests(
        self, held: Held, num_queued: int, peer: str
    ) -> LimitExceeded | None:
        """Which limit the requests of a peer are over, if any.

        Args:
            held: Its requests.
            num_queued: Answers that it has not read yet; they count as well.
            peer: Its name.
        """
        if held.nbytes > self.nbytes:
            return self._exceeded(
                "max_peer_bytes",
                self.nbytes,
                peer,
                f"{held.nbytes} bytes of unanswered requests",
            )
        if held.calls + num_queued > self.calls:
            return self._exceeded(
                "max_peer_calls",
                self.calls,
                peer,
                f"{held.calls} unanswered calls and {num_queued} unread messages",
            )
        return None

    def over_contexts(self, peer: str) -> LimitExceeded:
        """The error for one context too many."""
        what = f"{self.contexts + 1} autograd contexts"
        return self._exceeded("max_peer_contexts", self.contexts, peer, what)

    def over_rrefs(self, peer: str) -> LimitExceeded:
        """The error for one reference too many."""
        what = f"{self.rrefs + 1} references to values"
        return self._exceeded("max_peer_rrefs", self.rrefs, peer, what)

    def _exceeded(self, limit: str, value: int, peer: str, what: str) -> LimitExceeded:
        return LimitExceeded(
            f"worker {peer!r} would have {what} at worker {self._worker!r}, which grants "
            f"each peer {value} (its option {limit}); the request was refused. Wait for "
            "earlier ones, drop what is not needed any more, or raise the limit there",
            worker=self._worker,
            limit=limit,
            value=value,
            peer=peer,
        )
