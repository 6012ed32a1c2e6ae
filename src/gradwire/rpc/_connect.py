"""Opening connections: dialing, accepting, and the handshake on both sides.

Dialing happens on the thread that needs the connection and blocks it, with a limit.
Accepting happens on the pool's threads and never blocks: a stranger who connects and
says nothing holds a few bytes for some seconds, and no thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from gradwire._config import RpcBackendOptions
from gradwire.errors import (
    ClosedError,
    ConnectError,
    ConnectTimeout,
    GradwireError,
    HandshakeRefused,
    ProtocolError,
)
from gradwire.rpc import _handshake
from gradwire.rpc._handshake import AcceptorHandshake, InitiatorHandshake, PeerIdentity
from gradwire.rpc._host import HostIdentity
from gradwire.rpc._log import log as _log
from gradwire.rpc._peer import Peer
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._records import WorkerRecord
from gradwire.rpc._schemes import REMEDY_BETWEEN_HOSTS
from gradwire.rpc._signals import interruptible
from gradwire.rpc._spin import readiness
from gradwire.transport import Channel, Connection, Limits, Listener, Transport

__all__ = ["Acceptor", "Dialer", "limits_of", "nobody_listens"]

_READ_BYTES = 16 << 10
_SLICE_S = 0.05  # how long a wait for the other side lasts before it looks around
_MAX_STRANGERS = 256
_MOST_AT_ONCE = 16  # who knocks after them comes when others had their turn
_PATIENCE_S = 1.0  # how long the others wait at the door when there are too many
_MOST_LINES = 20  # of the log at a time; and then one per second


def limits_of(options: RpcBackendOptions, *, is_same_user: bool = False) -> Limits:
    """The limits of a connection.

    Args:
        options: Of this worker.
        is_same_user: Whether the kernel says that the peer runs as the same user.
    """
    return Limits(
        # A peer that is not trusted could change a tensor after it was checked. One of
        # the same user needs no segments for that: it can write to all of our memory.
        shares_memory=options.serializer != "safe" or is_same_user,
        max_head_bytes=options.max_head_bytes,
        max_frame_bytes=options.max_frame_bytes,
        shared_memory_min_bytes=options.shared_memory_min_bytes,
        shared_memory_keep_bytes=options.shared_memory_keep_bytes,
    )


class Dialer:
    """Opens connections to other workers.

    Args:
        identify: Who this worker is.
        secret: The cluster secret, None if there is none.
        options: See `RpcBackendOptions`.
        transports: The transports by their names, in order of preference.
        host: This host.
        is_over: Whether this worker goes away: then nobody is waited for any more.
    """

    def __init__(
        self,
        identify: Callable[[], PeerIdentity],
        secret: bytes | None,
        options: RpcBackendOptions,
        transports: Mapping[str, Transport],
        host: HostIdentity,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._identify = identify
        self._secret = secret
        self._options = options
        self._transports = transports
        self._host = host
        self._is_over = is_over

    def choose(self, record: WorkerRecord) -> str:
        """The transport for a worker: the first that both have and that reaches it."""
        same_host = self._host.is_same(record)
        for scheme, transport in self._transports.items():
            reaches = same_host or transport.capabilities.crosses_hosts
            if reaches and scheme in record.addresses:
                return scheme
        where = "the same host" if same_host else "another host"
        remedy = "" if same_host else f"; {REMEDY_BETWEEN_HOSTS}"
        raise ConnectError(
            f"worker {record.name!r} is on {where} and offers "
            f"{', '.join(sorted(record.addresses)) or 'no transport'}; this worker has "
            f"{', '.join(self._transports)}: no transport in common{remedy}",
            worker=record.name,
        )

    def dial(self, record: WorkerRecord, deadline: float) -> tuple[Connection, float]:
        """Connects to a worker and proves who is who.

        Returns:
            The connection, and how far the peer's clock is ahead of ours.

        Raises:
            ConnectError: Nobody is there; see `nobody_listens`.
            ConnectTimeout: Not in time.
            HandshakeRefused: One side did not want the other.
            ClosedError: This worker goes away.
        """
        scheme = self.choose(record)
        left = deadline - time.monotonic()
        try:
            transport = self._transports[scheme]
            channel = interruptible(transport.connect, record.addresses[scheme], left)
        except (ConnectError, ConnectTimeout) as error:
            kind = ConnectError if isinstance(error, ConnectError) else ConnectTimeout
            hint = ""
            if nobody_listens(error):
                hint = "; nobody listens there: has that worker ended?"
            raise kind(
                f"cannot connect to worker {record.name!r} (rank {record.rank}) by {scheme} "
                f"at {record.addresses[scheme]}: {error}{hint}",
                worker=record.name,
            ) from error
        try:
            return self._shake_hands(channel, record, deadline)
        except (ConnectError, ProtocolError) as error:
            channel.close()
            if error.worker is None:  # of the channel, which knows no workers
                raise _name_worker(error, record) from error
            raise
        except BaseException:
            channel.close()
            raise

    def _shake_hands(
        self, channel: Channel, record: WorkerRecord, deadline: float
    ) -> tuple[Connection, float]:
        handshake = InitiatorHandshake(
            self._identify(),
            target_rank=record.rank,
            target_incarnation=record.incarnation,
            target_name=record.name,
            secret=self._secret,
            peer_is_same_user=channel.peer_is_same_user,
            objection_to=_certificate_of(channel),
        )
        channel.write(handshake.start())
        while not handshake.done:
            if self._is_over():
                raise ClosedError("the agent is shut down")
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConnectTimeout(
                    f"worker {record.name!r} (rank {record.rank}) accepted a connection "
                    "but did not answer the handshake in time",
                    worker=record.name,
                )
            data = channel.read(_READ_BYTES)
            if data is None:
                ready = readiness(channel.fileno(), write=channel.wants_write)
                interruptible(ready, min(left, _SLICE_S) * 1e3)
            elif not data:
                raise ConnectError(
                    f"worker {record.name!r} closed the connection during the handshake",
                    worker=record.name,
                )
            else:
                answer = _feed(channel, handshake, data)
                if answer:
                    channel.write(answer)
        if handshake.peer is None:
            raise AssertionError("a finished handshake knows the peer")
        offset = handshake.peer.clock - time.monotonic()
        limits = limits_of(self._options, is_same_user=channel.peer_is_same_user)
        return channel.upgrade(limits, handshake.leftover), offset


def nobody_listens(error: BaseException) -> bool:
    """Whether dialing has shown that no process has the worker's address any more.

    All else says little about the worker: it may be cut off, stopped or overrun.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__
    return cause is not None


def _certificate_of(channel: Channel) -> _handshake.ObjectionTo | None:
    return channel.objection_to if channel.demands_certificate else None


def _name_worker(
    error: ConnectError | ProtocolError, record: WorkerRecord
) -> ConnectError | ProtocolError:
    """The same error, with the worker that was dialled."""
    text = f"the handshake with worker {record.name!r} (rank {record.rank}) failed: {error}"
    if isinstance(error, HandshakeRefused):
        return HandshakeRefused(text, worker=record.name, code=error.code)
    return type(error)(text, worker=record.name)


def _feed(
    channel: Channel, handshake: InitiatorHandshake | AcceptorHandshake, data: bytes
) -> bytes:
    """Gives bytes to the handshake; if it fails, the peer is told why."""
    try:
        return handshake.receive(data)
    except GradwireError:
        if handshake.last_words:
            with contextlib.suppress(ConnectError):
                channel.write(handshake.last_words)
        raise


class Acceptor:
    """Lets other workers in.

    Args:
        admit: Decides, after the proof, whether a peer may come in.
        on_connection: Gets the connection of a peer that was let in, on a pool thread.
        on_abandoned: Is told if there will be none after all.
    """

    def __init__(
        self,
        pool: WorkerPool,
        identify: Callable[[], PeerIdentity],
        secret: bytes | None,
        options: RpcBackendOptions,
        admit: _handshake.Admit,
        on_connection: Callable[[Connection, PeerIdentity], None],
        on_abandoned: Callable[[PeerIdentity], None],
    ) -> None:
        self._pool = pool
        self._identify = identify
        self._secret = secret
        self._options = options
        self._admit = admit
        self._on_connection = on_connection
        self._on_abandoned = on_abandoned
        self._listeners: list[Listener] = []
        self._refusals = _RefusalLog()
        # Guards all below: pool threads and the monitor.
        self._lock = threading.Lock()
        self._strangers: dict[int, _Stranger] = {}
        self._full_since: float | None = None
        self._paused: list[Listener] = []
        self._closed = False

    def listen(self, listener: Listener) -> None:
        """Begins to accept from a listener."""
        self._listeners.append(listener)
        fileno = listener.fileno()
        self._pool.watch(fileno, lambda _r, _w: self._on_knock(listener))
        self._pool.poller.arm(fileno, True, False)

    def _on_knock(self, listener: Listener) -> None:
        if self._waits_for_room(listener):
            return
        try:
            self._accept_some(listener)
        except OSError as error:
            # No descriptors or memory left: a pause, or this would spin.
            _log.warning("cannot accept connections at the moment: %s", error)
            with self._lock:
                self._paused.append(listener)
            return
        self._arm(listener)

    def _arm(self, listener: Listener) -> None:
        with self._lock:
            if not self._closed:
                self._pool.poller.arm(listener.fileno(), True, False)

    def _waits_for_room(self, listener: Listener) -> bool:
        """Whether there are too many for now; then `_forget` goes on, or `keep_house`.

        When a large group starts, most of them have gone in a moment.
        """
        now = time.monotonic()
        with self._lock:
            if len(self._strangers) < _MAX_STRANGERS:
                return False
            if self._full_since is None:
                self._full_since = now
            if now - self._full_since >= _PATIENCE_S:
                return False  # these stay: who knocks now is told so
            self._paused.append(listener)
            return True

    def _accept_some(self, listener: Listener) -> None:
        """Lets in who has knocked, but not without end: this thread may be the leader."""
        for _ in range(_MOST_AT_ONCE):
            with self._lock:
                is_full = len(self._strangers) >= _MAX_STRANGERS
                if is_full and self._full_since is None:
                    return
            channel = listener.accept()
            if channel is None:
                return
            if is_full:
                self._refuse(channel, f"{_MAX_STRANGERS} handshakes are under way")
                continue
            is_vouched_for = channel.peer_is_same_user or channel.demands_certificate
            if self._secret is None and not is_vouched_for:
                self._refuse(
                    channel,
                    "it is not of the same user, and there is no cluster secret",
                )
                continue
            self._welcome(channel)

    def _refuse(self, channel: Channel, why: object) -> None:
        self._refusals.note(channel.peer_description, why)
        channel.close()

    def _welcome(self, channel: Channel) -> None:
        handshake = AcceptorHandshake(
            self._identify(),
            admit=self._admit,
            secret=self._secret,
            peer_is_same_user=channel.peer_is_same_user,
            objection_to=_certificate_of(channel),
        )
        deadline = time.monotonic() + self._options.connect_timeout
        stranger = _Stranger(channel, handshake, deadline)
        fileno = channel.fileno()
        with self._lock:  # whom `close` finds is watched, and whom it misses never is
            is_late = self._closed
            if not is_late:
                self._strangers[fileno] = stranger
                self._pool.watch(fileno, lambda _r, _w: self._on_data(fileno, stranger))
                self._pool.poller.arm(fileno, True, False)
        if is_late:
            channel.close()

    def _on_data(self, fileno: int, stranger: _Stranger) -> None:
        handshake = stranger.handshake
        try:
            if not self._go_on(fileno, stranger):
                return
        except BaseException as error:
            if handshake.peer is not None:
                self._on_abandoned(handshake.peer)
            if self._forget(fileno, stranger):
                self._show_out(stranger.channel, error)
            if not isinstance(error, GradwireError):
                raise
            return
        if handshake.peer is None:
            raise AssertionError("a finished handshake knows the peer")
        if self._forget(fileno, stranger):
            self._let_in(stranger.channel, handshake.leftover, handshake.peer)
        else:
            self._on_abandoned(handshake.peer)  # closed meanwhile

    def _go_on(self, fileno: int, stranger: _Stranger) -> bool:
        """Reads what is there; returns whether the handshake is done."""
        channel, handshake = stranger.channel, stranger.handshake
        while not handshake.done:
            data = channel.read(_READ_BYTES)
            if data is None:
                self._wait_for_more(fileno, stranger)
                return False
            if not data:
                raise ConnectError("it closed the connection during the handshake")
            answer = _feed(channel, handshake, data)
            if answer:
                channel.write(answer)
        return True

    def _show_out(self, channel: Channel, error: BaseException) -> None:
        if isinstance(error, HandshakeRefused) and error.code == _handshake.GLARE:
            who = channel.peer_description
            _log.debug("refused a connection from %s: %s", who, error)
            channel.close()
        else:
            self._refuse(channel, error)

    def _let_in(self, channel: Channel, leftover: bytes, peer: PeerIdentity) -> None:
        try:
            limits = limits_of(self._options, is_same_user=channel.peer_is_same_user)
            connection = channel.upgrade(limits, leftover)
        except BaseException:
            channel.close()
            self._on_abandoned(peer)
            raise
        self._on_connection(connection, peer)

    def _wait_for_more(self, fileno: int, stranger: _Stranger) -> None:
        with self._lock:
            # Else it was closed meanwhile, and the number may be another's by now.
            if self._strangers.get(fileno) is stranger:
                self._pool.poller.arm(fileno, True, stranger.channel.wants_write)

    def _forget(self, fileno: int, stranger: _Stranger) -> bool:
        with self._lock:
            if self._strangers.get(fileno) is not stranger:
                return False
            del self._strangers[fileno]
            self._pool.unwatch(fileno)
            paused: list[Listener] = []
            if self._full_since is not None:
                self._full_since = None
                paused, self._paused = self._paused, paused
        for listener in paused:
            self._arm(listener)
        return True

    def keep_house(self, now: float) -> None:
        """Closes handshakes that take too long, tries paused listeners again."""
        self._refusals.keep_house()
        with self._lock:
            paused, self._paused = self._paused, []
        for listener in paused:
            self._arm(listener)
        for fileno, stranger in list(self._strangers.items()):
            if now >= stranger.deadline and self._forget(fileno, stranger):
                limit = self._options.connect_timeout
                self._refuse(stranger.channel, f"no handshake within {limit:.1f} s")

    def close(self) -> None:
        """Stops listening and closes what is under way."""
        with self._lock:
            self._closed = True
        for listener in self._listeners:
            self._pool.unwatch(listener.fileno())
            listener.close()
        for fileno, stranger in list(self._strangers.items()):
            if self._forget(fileno, stranger):
                stranger.channel.close()


class _RefusalLog:
    """Logs who was refused; not all of them, if somebody knocks again and again."""

    def __init__(self) -> None:
        # Guards all below: pool threads and the monitor.
        self._lock = threading.Lock()
        self._lines_left = float(_MOST_LINES)
        self._last = time.monotonic()
        self._num_hidden = 0

    def note(self, who: str, why: object) -> None:
        """Somebody was refused."""
        with self._lock:
            self._num_hidden += 1
            if not self._may_log():
                return
            num_hidden, self._num_hidden = self._num_hidden - 1, 0
        more = f" ({num_hidden} refusals before are not shown)" if num_hidden else ""
        _log.warning("refused a connection from %s: %s%s", who, why, more)

    def keep_house(self) -> None:
        """Says how many were not shown, if nobody comes any more."""
        with self._lock:
            if not self._num_hidden or not self._may_log():
                return
            num_hidden, self._num_hidden = self._num_hidden, 0
        _log.warning("refused %d more connections, which are not shown", num_hidden)

    def _may_log(self) -> bool:
        """Takes a line, if there is one; the caller holds the lock."""
        now = time.monotonic()
        self._lines_left = min(_MOST_LINES, self._lines_left + now - self._last)
        self._last = now
        if self._lines_left < 1.0:
            return False
        self._lines_left -= 1.0
        return True


class _Stranger:
    """Somebody whose handshake is under way."""

    __slots__ = ("channel", "deadline", "handshake")

    def __init__(
        self, channel: Channel, handshake: AcceptorHandshake, deadline: float
    ) -> None:
        self.channel = channel
        self.handshake = handshake
        self.deadline = deadline


def refusal_for(
    identity: PeerIdentity,
    *,
    own_rank: int,
    own_name: str,
    known: Peer | None,
    namesake: Peer | None,
    is_closing: bool,
    world_size: int,
) -> _handshake.Refusal | None:
    """Whether a worker that has proven itself may come in; pure.

    Args:
        identity: Who it says it is.
        own_rank: Our rank.
        own_name: Our name.
        known: The peer that has this rank at present.
        namesake: The peer that has this name at present.
        is_closing: Whether we are shutting down.
        world_size: Size of the group.
    """
    refuse = _handshake.Refusal
    if is_closing:
        return refuse(_handshake.CLOSING, f"worker {own_name!r} is shutting down")
    if identity.rank >= world_size:
        return refuse(
            _handshake.IDENTITY,
            f"rank {identity.rank} is outside of the group of {world_size} workers",
        )
    if identity.rank == own_rank or identity.name == own_name:
        return refuse(
            _handshake.TAKEN,
            f"name {own_name!r} and rank {own_rank} belong to the worker that you called",
        )
    for other in (known, namesake):
        if other is None or not other.is_usable:
            continue
        same = other.info == (identity.name, identity.rank)
        if not same or (other.incarnation != identity.incarnation and other.link):
            return refuse(
                _handshake.TAKEN,
                f"name {identity.name!r} or rank {identity.rank} is taken by worker "
                f"{other.info.name!r} of rank {other.info.id}",
            )
    if known is not None and known.incarnation == identity.incarnation:
        is_connected = known.is_usable and known.link is not None
        if is_connected or (known.is_dialing and own_rank < identity.rank):
            # Both dial at once: the connection that the lower rank opens is kept.
            return refuse(
                _handshake.GLARE, "a connection to this worker exists already"
            )
        if not known.is_usable and not known.is_mourned:
            return refuse(
                _handshake.TAKEN,
                f"worker {identity.name!r} is being declared lost ({known.fate}); try "
                "again",
            )
    return None
