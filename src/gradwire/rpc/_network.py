"""Who belongs to the group, and the connections to them.

Knows addresses, handshakes and links; knows nothing of calls.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gradwire._config import RpcBackendOptions
from gradwire._ids import Incarnation, WorkerInfo, new_incarnation
from gradwire.errors import (
    ClosedError,
    ConnectError,
    ConnectTimeout,
    GradwireError,
    HandshakeRefused,
    NotInitialized,
    PeerLostError,
    RemoteProtocolError,
    TransportError,
    UnknownWorker,
)
from gradwire.rpc import _handshake
from gradwire.rpc._connect import Acceptor, Dialer, limits_of, refusal_for
from gradwire.rpc._future import Outcome
from gradwire.rpc._handshake import PeerIdentity
from gradwire.rpc._host import find_address, identify_host, rendezvous_host
from gradwire.rpc._link import Link, LinkOwner
from gradwire.rpc._peer import Peer
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._records import WorkerRecord, encode_record, parse_introduction
from gradwire.rpc._schemes import warn_if_readable
from gradwire.rpc._signals import wait_in_slices
from gradwire.rpc._turn import about_to_block
from gradwire.transport import (
    Connection,
    Listener,
    Transport,
    channel_pair,
    get_transport,
)
from gradwire.transport._tcp import format_address, parse_address
from gradwire.wire import Introduction, encode

__all__ = ["Network", "NetworkOwner"]

_log = logging.getLogger("gradwire.rpc")

_AGAIN_S = 0.05
_NEVER = float("inf")


class NetworkOwner(LinkOwner, Protocol):
    """What the network needs of the agent."""

    def peer_joined(self, peer: Peer) -> None:
        """A worker has come, or has come back, to a group that was complete.

        It is connected.
        """


class Network:
    """One worker's view of the group.

    Args:
        info: This worker.
        world_size: Size of the group.
        options: See `RpcBackendOptions`.
        pool: Threads for all connections.
        owner: Gets what arrives.
    """

    def __init__(
        self,
        info: WorkerInfo,
        world_size: int,
        options: RpcBackendOptions,
        secret: bytes | None,
        transports: Mapping[str, Transport],
        pool: WorkerPool,
        owner: NetworkOwner,
    ) -> None:
        self.incarnation: Incarnation = new_incarnation()
        self.is_closing = False
        self._info = info
        self._world_size = world_size
        self._options = options
        self._transports = transports
        self._pool = pool
        self._owner = owner
        self._host = identify_host()
        self._dialer = Dialer(
            self._identify,
            secret,
            options,
            transports,
            self._host,
            is_over=lambda: self.is_closing,
        )
        self._acceptor = Acceptor(
            pool,
            self._identify,
            secret,
            options,
            self._admit,
            self._on_accepted,
            self._on_abandoned,
        )
        self._joined = threading.Event()
        # Guards all below: callers, threads that accept or lose a peer, the monitor.
        self._lock = threading.RLock()
        self._peers: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._links: dict[Link, Peer] = {}
        self.peer_of: Callable[[Link], Peer | None] = self._links.get
        """Who is at the other end of a connection; None if that is over."""
        # Those who came by themselves and are not connected yet, and whose places they
        # have taken.
        self._guests: dict[Peer, Peer | None] = {}
        self._closed = False
        self._introduction = b""  # what those whom we dial are told
        self._told_of: set[int] = set()  # incarnations with a stranger at their address

    # ------------------------------------------------------------------- beginning

    def start(self) -> WorkerRecord:
        """Begins to listen; returns what others need to find us."""
        addresses = {}
        listeners: list[Listener] = []
        label = f"gradwire-{self.incarnation:016x}"
        try:
            for scheme, transport in self._transports.items():
                host = ""
                if transport.capabilities.crosses_hosts:
                    advertised = find_address(
                        self._options, rendezvous_host(self._options)
                    )
                    host = self._options.bind_address or advertised
                    warn_if_readable(transport, host)
                listener = transport.listen(host, self._options.port, label)
                listeners.append(listener)
                addresses[scheme] = listener.address
                if transport.capabilities.crosses_hosts:
                    _, port = parse_address(listener.address)
                    addresses[scheme] = format_address(advertised, port)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        for listener in listeners:
            self._acceptor.listen(listener)
        record = WorkerRecord(
            name=self._info.name,
            rank=self._info.id,
            incarnation=self.incarnation,
            world_size=self._world_size,
            boot_id=self._host.boot_id,
            network_namespace=self._host.network_namespace,
            addresses=addresses,
            serializer=self._options.serializer,
        )
        self._introduction = bytes(encode(Introduction(encode_record(record))).head)
        self._connect_to_self(record)
        return record

    def _connect_to_self(self, record: WorkerRecord) -> None:
        """Calls to oneself take the same way as all others."""
        peer = Peer(
            self._info, self.incarnation, self._options.max_inflight_bytes, record
        )
        self._enter(peer)
        limits = limits_of(self._options)
        ours, theirs = (c.upgrade(limits, b"") for c in channel_pair())
        self._add_link(theirs, peer, 0.0)
        peer.attach(self._add_link(ours, peer, 0.0))

    def set_members(self, records: Sequence[WorkerRecord]) -> None:
        """Learns who belongs to the group."""
        with self._lock:
            for record in records:
                known = self._peers.get(record.rank)
                if known is not None and known.incarnation == record.incarnation:
                    known.record = record
                    self._guests.pop(known, None)
                    continue
                info = WorkerInfo(record.name, record.rank)
                self._enter(
                    Peer(
                        info,
                        record.incarnation,
                        self._options.max_inflight_bytes,
                        record,
                    )
                )
        if len(self._peers) == self._world_size:
            self.is_complete()

    def is_complete(self) -> None:
        """Nobody is waited for any more; who comes from now on is a newcomer."""
        self._joined.set()

    def _enter(self, peer: Peer) -> None:
        with self._lock:
            old = self._peers.get(peer.info.id)
            self._peers[peer.info.id] = peer
            if old is not None:
                self._free_name(old)
            # What a dead worker has left behind may have the name of a living one.
            namesake = self._by_name.get(peer.info.name)
            if namesake is None or not namesake.is_connected:
                self._by_name[peer.info.name] = peer

    def _remove(self, peer: Peer) -> None:
        """Forgets a peer. The caller holds the lock."""
        del self._peers[peer.info.id]
        self._free_name(peer)

    def _free_name(self, gone: Peer) -> None:
        """Gives the name of a peer to another one that has it. The caller holds the lock."""
        name = gone.info.name
        if self._by_name.get(name) is not gone:
            return
        del self._by_name[name]
        for peer in self._peers.values():
            if peer.info.name == name and (
                peer.is_connected or name not in self._by_name
            ):
                self._by_name[name] = peer

    # ----------------------------------------------------------------- connections

    def _identify(self) -> PeerIdentity:
        features = (_handshake.SAFE,) if self._options.serializer == "safe" else ()
        return PeerIdentity(*self._info, self.incarnation, time.monotonic(), features)

    def _admit(self, identity: PeerIdentity) -> _handshake.Refusal | None:
        with self._lock:
            known = self._peers.get(identity.rank)
            refusal = refusal_for(
                identity,
                own_rank=self._info.id,
                own_name=self._info.name,
                known=known,
                namesake=self._by_name.get(identity.name),
                is_closing=self.is_closing,
                world_size=self._world_size,
            )
            if refusal is not None:
                return refusal
            record = None
            if known is not None and known.incarnation == identity.incarnation:
                overtakes = self._info.id > identity.rank
                if not known.claim_accepting(overtakes=overtakes):
                    return _handshake.Refusal(_handshake.GLARE, "it dials you as well")
                if known.is_usable:
                    return None
                record = known.record
            info = WorkerInfo(identity.name, identity.rank)
            peer = Peer(
                info, identity.incarnation, self._options.max_inflight_bytes, record
            )
            peer.is_newcomer = self._joined.is_set()
            peer.is_accepting = True
            before = known
            if known is not None and known in self._guests:
                before = self._guests.pop(known)
            self._guests[peer] = before
            self._enter(peer)
            return None

    def _on_abandoned(self, identity: PeerIdentity) -> None:
        """One that was let in has gone before it was connected."""
        with self._lock:
            peer = self._peers.get(identity.rank)
            if peer is None or peer.incarnation != identity.incarnation:
                return
            peer.end_accepting()
            if peer not in self._guests or peer.is_dialing:
                return
            # All is as if it had never come.
            before = self._guests.pop(peer)
            peer.end("it went before it was connected")
            self._remove(peer)
            if before is not None:
                before.end_accepting()
                self._enter(before)

    def _on_accepted(self, connection: Connection, identity: PeerIdentity) -> None:
        peer = self._peers.get(identity.rank)
        if peer is None or peer.incarnation != identity.incarnation:
            connection.close()  # it was replaced while it shook hands
            return
        try:
            self._attach(connection, peer, identity.clock - time.monotonic())
        except GradwireError as error:
            # One of the two has gone since the handshake: nobody waits for this one.
            _log.debug("dropped a connection from %s: %s", identity.name, error)
            self._on_abandoned(identity)
            return
        except BaseException:
            self._on_abandoned(identity)
            raise
        peer.end_accepting()
        if peer.is_newcomer:
            peer.is_newcomer = False
            self._owner.peer_joined(peer)

    def _attach(self, connection: Connection, peer: Peer, offset: float) -> Link:
        link = self._add_link(connection, peer, offset, start=False)
        if not peer.attach(link):
            self.drop_link(link)
            existing = peer.link
            if existing is None:
                raise peer.error()
            return existing
        with self._lock:
            self._guests.pop(peer, None)
        link.start()
        return link

    def _add_link(
        self, connection: Connection, peer: Peer, offset: float, *, start: bool = True
    ) -> Link:
        try:
            with self._lock:  # `close` needs it, too, and the pool is open until then
                if self._closed:
                    raise ClosedError("the agent is shut down")
                link = Link(connection, self._pool, self._owner)
                link.worker = peer.info.name
                if get_transport(connection.scheme).capabilities.crosses_hosts:
                    link.clock_offset = offset
                    link.shares_clock = False
                self._links[link] = peer
        except BaseException:
            connection.close()
            raise
        if start:
            link.start()
        return link

    def drop_link(self, link: Link) -> None:
        """Closes a connection and forgets it."""
        with self._lock:
            self._links.pop(link, None)
        link.close()

    def link_to(self, peer: Peer, deadline: float, dial_until: float = _NEVER) -> Link:
        """The connection to a peer; opened here and now if there is none.

        Args:
            peer: Whom to connect to.
            deadline: When to stop waiting, 0 for never. The connection may come later.
            dial_until: When to stop dialing; at the latest after ``connect_timeout``.

        Raises:
            PeerLostError: It is gone, or about to go.
            NotInitialized: This worker is shut down, or was meanwhile.
        """
        name, rank = peer.info
        try:
            return self._open_link(peer, deadline, dial_until)
        except (TransportError, ConnectTimeout) as error:
            if not self.is_closing:
                raise
            raise NotInitialized(
                f"worker {self._info.name!r} was shut down while it connected to worker "
                f"{name!r}"
            ) from error
        except HandshakeRefused as error:
            if error.code != _handshake.CLOSING:
                raise
            # To a caller it is all the same whether it has said goodbye already.
            raise PeerLostError(
                f"worker {name!r} (rank {rank}) is leaving the group: it is shutting down",
                worker=name,
            ) from error

    def _open_link(self, peer: Peer, deadline: float, dial_until: float) -> Link:
        if self._closed:
            raise NotInitialized(
                f"worker {self._info.name!r} is shut down; calls are no longer possible"
            )
        dial_limit = self._dial_limit(dial_until)
        limit = min(dial_limit, deadline) if deadline else dial_limit
        while not peer.claim_dialing():
            # Another thread dials, or there is nothing to dial any more.
            if not wait_in_slices(peer.wait_while_dialing, limit):
                raise self._connect_timeout(peer)
            if peer.fate is not None:
                raise peer.error()
            if peer.link is not None:
                return peer.link
        if limit == dial_limit:
            return self._dial(peer, limit)
        # A handshake that is broken off looks like a death to the other side. So it goes
        # on, for later calls, when this one has reached its deadline.
        dialled = Outcome()

        def dial() -> None:
            try:
                dialled.finish(self._dial(peer, dial_limit), None)
            except Exception as error:
                dialled.finish(None, error)

        self._pool.submit(dial)
        if not dialled.wait(max(0.0, limit - time.monotonic())):
            raise self._connect_timeout(peer)
        link: Link = dialled.result()
        return link

    def _dial_limit(self, dial_until: float) -> float:
        return min(time.monotonic() + self._options.connect_timeout, dial_until)

    def _dial(self, peer: Peer, limit: float) -> Link:
        """Opens the connection to a peer; the caller has claimed the dialing."""
        try:
            record = self._record_of(peer, limit)
            if record is not None:
                connection, offset = self._dialer.dial(record, limit)
                return self._attach_dialled(connection, peer, offset)
        except HandshakeRefused as error:
            if error.code != _handshake.GLARE:
                raise
        finally:
            peer.end_dialing()
        # It dials us at this very moment, and its connection is the one that is kept. (We
        # may know it from its handshake only: then there is nowhere to dial.)
        if not wait_in_slices(peer.wait_for_link, limit) or peer.link is None:
            raise peer.error() if peer.fate is not None else self._connect_timeout(peer)
        return peer.link

    def _attach_dialled(
        self, connection: Connection, peer: Peer, offset: float
    ) -> Link:
        link = self._attach(connection, peer, offset)
        with contextlib.suppress(GradwireError):  # its reader notices, and knows why
            link.send(self._introduction)
        return link

    def introduced(self, peer: Peer, data: bytes) -> None:
        """A worker that has dialled us says where it listens itself."""
        record = parse_introduction(data, peer.info, peer.incarnation)
        if peer.record is None:
            peer.record = record

    def seek_again(self, lost: Peer) -> None:
        """Looks, on another thread, whether a lost worker lives after all.

        Two workers that lose each other may both live: the network between them was cut,
        or one of them was stopped. Nothing of what they had of each other is left, on
        either side; so they may begin anew. `NetworkOwner.peer_joined` tells if they do.
        """
        if lost.claim_second_dialing():
            self._pool.submit(lambda: self._seek(lost))

    def _seek(self, lost: Peer) -> None:
        record = lost.record
        try:
            if record is None or self._peers.get(record.rank) is not lost:
                return
            limit = time.monotonic() + self._options.connect_timeout
            connection, offset = self._dialer.dial(record, limit)
            peer = Peer(
                lost.info, lost.incarnation, self._options.max_inflight_bytes, record
            )
            peer.is_dialing = True  # as the other: nobody comes in between
            with self._lock:
                is_first = self._peers.get(record.rank) is lost
                if is_first:
                    self._enter(peer)
            if not is_first:
                connection.close()
                return
            try:
                self._attach_dialled(connection, peer, offset)
            finally:
                peer.end_dialing()
            self._owner.peer_joined(peer)
        except GradwireError as error:
            _log.debug("worker %s does not answer: %s", lost.info.name, error)
        finally:
            lost.end_dialing()

    def _record_of(self, peer: Peer, limit: float) -> WorkerRecord | None:
        if peer.record is None and not self._joined.is_set():
            about_to_block()  # it called us before we knew the whole group
            wait_in_slices(self._joined.wait, limit)
        return peer.record

    def _connect_timeout(self, peer: Peer) -> ConnectTimeout:
        return ConnectTimeout(
            f"no connection to worker {peer.info.name!r} (rank {peer.info.id}) could be "
            f"opened within the limit (option connect_timeout, or the call's deadline)",
            worker=peer.info.name,
        )

    def connect(
        self, peer: Peer, deadline: float = 0.0, dial_until: float = _NEVER
    ) -> None:
        """Opens the connection to a peer if there is none; see `link_to`."""
        if not peer.is_connected:
            self.link_to(peer, deadline, dial_until)

    def contact(self, record: WorkerRecord, dial_until: float = _NEVER) -> bool:
        """Whether the worker of a record lives; connects to it, so that it knows us."""
        limit = min(time.monotonic() + self._options.lost_after + 5.0, dial_until)
        while True:
            try:
                self.meet(record, dial_until)
            except HandshakeRefused as error:
                if error.code in (_handshake.CLOSING, _handshake.IDENTITY):
                    return False
                if error.code == _handshake.SERIALIZER:
                    return True  # it lives; the rendezvous says what is wrong
                if error.code == _handshake.CERTIFICATE:
                    self._tell_of_stranger(record, error)
                    return False
                if error.code != _handshake.TAKEN or time.monotonic() > limit:
                    raise
                # It has not noticed yet that our earlier life is over.
                time.sleep(_AGAIN_S)
            except RemoteProtocolError as error:
                self._tell_of_stranger(record, error)
                return False
            except (ConnectError, ConnectTimeout, PeerLostError):
                return False
            else:
                return True

    def _tell_of_stranger(self, record: WorkerRecord, error: GradwireError) -> None:
        """Somebody answers for a worker who is none of the group: it may be long dead."""
        if record.incarnation not in self._told_of:
            self._told_of.add(record.incarnation)
            _log.warning(
                "worker %s takes worker %s (rank %d) for gone, for it is somebody else "
                "who answers at its address: %s",
                self._info.name,
                record.name,
                record.rank,
                error,
            )

    def meet(self, record: WorkerRecord, dial_until: float = _NEVER) -> None:
        """Connects to the worker of a record."""
        self.set_members([record])
        self._open_link(self._peers[record.rank], 0.0, dial_until)

    def is_connected_to_another_life(self, record: WorkerRecord) -> bool:
        """Whether the worker of this rank is connected, but not in this incarnation."""
        peer = self._peers.get(record.rank)
        return (
            peer is not None
            and peer.incarnation != record.incarnation
            and peer.is_connected
        )

    def forget(self, record: WorkerRecord) -> None:
        """The worker of a record is not there; it was never connected."""
        with self._lock:
            peer = self._peers.get(record.rank)
            if peer is None or peer.incarnation != record.incarnation:
                return
            if peer.link is None and peer.end("it does not answer"):
                self._remove(peer)

    def miss(self, record: WorkerRecord, why: Exception) -> None:
        """The worker of a record may live, but is out of reach: it can be sought later."""
        with self._lock:
            peer = self._peers.get(record.rank)
            if peer is None or peer.incarnation != record.incarnation:
                return
            if peer.link is None and peer.end(f"it does not answer ({why})"):
                peer.is_mourned = True  # there was nothing between us yet

    def probe(self, record: WorkerRecord, dial_until: float = _NEVER) -> bool:
        """Whether somebody who holds our own rank or name answers."""
        try:
            connection, _ = self._dialer.dial(record, self._dial_limit(dial_until))
        except HandshakeRefused as error:
            if error.code in (_handshake.IDENTITY, _handshake.CLOSING):
                return False
            if error.code == _handshake.TAKEN:
                return True
            # It lives, but we are not of its kind: another secret, user or serializer.
            raise
        except GradwireError:
            return False
        connection.close()
        return True

    # ------------------------------------------------------------------ destinations

    def find(self, to: object) -> Peer:
        """The peer that a destination means.

        Raises:
            ValueError: It is neither name, rank nor WorkerInfo.
            UnknownWorker: There is no such worker.
        """
        if isinstance(to, WorkerInfo):  # as mostly
            peer = self._peers.get(to.id)
            if peer is not None and peer.info.name != to.name:
                peer = None
        elif type(to) is str:
            peer = self._by_name.get(to)
        elif type(to) is int:
            peer = self._peers.get(to)
        elif isinstance(to, str):
            return self.find(str(to))
        else:
            raise ValueError(
                "a destination is a worker's name (str), rank (int) or WorkerInfo, not "
                f"{type(to).__name__}: {to!r}"
            )
        if peer is not None:
            return peer
        if not self._joined.is_set():
            # Others may call us before we know the whole group; their handlers wait.
            about_to_block()
            limit = time.monotonic() + self._options.init_timeout
            if wait_in_slices(self._joined.wait, limit):
                return self.find(to)
        peers = list(self._peers.values())
        count, known = len(peers), ", ".join(repr(p.info.name) for p in peers[:16])
        raise UnknownWorker(
            f"worker {self._info.name!r} could not find destination {to!r}; the group "
            f"has {count} worker{'s' if count > 1 else ''}: {known}"
            f"{self._similar_to(to)}"
        )

    def _similar_to(self, to: object) -> str:
        close = difflib.get_close_matches(str(to), list(self._by_name), n=1)
        return f". Did you mean {close[0]!r}?" if close else ""

    def peers(self) -> list[Peer]:
        """All members, this one too, by rank."""
        with self._lock:
            return sorted(self._peers.values(), key=lambda p: p.info.id)

    def links(self) -> list[tuple[Link, Peer]]:
        """All connections."""
        with self._lock:
            return list(self._links.items())

    # ---------------------------------------------------------------------------- end

    def keep_house(self, now: float) -> None:
        """See `Acceptor.keep_house`."""
        self._acceptor.keep_house(now)

    def close(self) -> None:
        """Closes everything; no connection is opened or accepted any more."""
        self.is_closing = True
        with self._lock:
            self._closed = True
        self._joined.set()
        self._acceptor.close()
        for link, _ in self.links():
            self.drop_link(link)
