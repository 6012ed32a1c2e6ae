"""References at work: how they travel, are counted and end, for one agent.

Decisions are in `_rref_table`; what users hold is in `_rref`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import secrets
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from gradwire._ids import WorkerInfo
from gradwire.errors import (
    DecodeError,
    GradwireError,
    LimitExceeded,
    OwnerLost,
    PeerLostError,
    RemoteError,
    UsageError,
)
from gradwire.rpc._interceptors import Interceptor, Note, Scope
from gradwire.rpc._leftovers import Leftovers
from gradwire.rpc._rref_calls import (
    CallNote,
    CallScope,
    CreationScope,
    Reaching,
    Transfer,
)
from gradwire.rpc._rref_dialing import OwnerDialer
from gradwire.rpc._rref_parts import (
    Arrived,
    Creation,
    Deleted,
    Forked,
    ForkRequest,
    Handle,
    Owned,
    Packed,
    User,
    decode_header,
    read_packed,
)
from gradwire.rpc._rref_table import (
    AskFork,
    Instruction,
    RefId,
    RefTable,
    TellArrived,
    TellDelete,
    TellForked,
)
from gradwire.wire import Message, encode

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent
    from gradwire.rpc._peer import Peer
    from gradwire.transport import Frame

__all__ = ["FETCH", "RefService"]


FETCH = "gradwire.rpc._rref:fetch"
"""Name of the function that fetches the value of a reference."""

_MOST_BURIED = 8192
_TENSOR_TYPES = (Tensor, Parameter)


class RefService(Interceptor):
    """The references of one agent."""

    name = "rref"
    sees_all_calls = False
    handle_class: type[Handle] = Handle

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.me = agent.info.id
        self._life = agent.network.incarnation
        self.leftovers = Leftovers(agent.info.name, self._drop)
        self.messages = {
            ForkRequest: self._on_fork_request,
            Forked: self._on_forked,
            Arrived: self._on_arrived,
            Deleted: self._on_deleted,
        }
        self.packs = {self.handle_class: self._pack}
        self.lookups = {FETCH: self._look_up}
        self._ids = itertools.count()
        self._id_key = secrets.token_bytes(32)
        self.transfer = Transfer()
        self._dialer = OwnerDialer(agent.network)
        # Guards all below: any thread that sends, receives or drops references. And
        # finalisers of the program, which may send some wherever memory is allocated.
        self._lock = threading.RLock()
        self._table = RefTable(self.me)
        self._owned: dict[RefId, Owned] = {}
        # Values that are gone, or that their creators gave up before the calls that make
        # them had come.
        self._buried: dict[RefId, None] = {}
        self._users: dict[RefId, User] = {}

    def new_id(self) -> RefId:
        """An id that nobody else uses.

        Whoever has the id of a value can ask its owner for it. Where workers do not trust
        each other it must not be guessed, so it is a keyed hash of the number.
        """
        number = next(self._ids)
        if self.agent.is_safe:
            digest = hashlib.blake2b(
                number.to_bytes(8, "big"), key=self._id_key, digest_size=8
            ).digest()
            number = int.from_bytes(digest, "big") >> 1
        return RefId(self.me, self.agent.network.incarnation, number)

    # ------------------------------------------------------------------------- values

    def own(self, value: Any) -> Owned:
        """A value of ours that can be referred to."""
        owned = Owned(self.new_id())
        owned.settle(value, None)
        return owned

    def create_here(self) -> tuple[Owned, Creation]:
        """A value that a call to ourselves will make."""
        owned = Owned(self.new_id())
        creation = Creation(owned.id, owned.id)
        with self._lock:
            self._owned[owned.id] = owned
            self._table.add_fork(owned.id, owned.id, self.me)
        return owned, creation

    def create_there(self, owner: WorkerInfo) -> tuple[User, Creation]:
        """A value that a call to another worker will make."""
        self.leftovers.ensure_thread()
        life = self.agent.network.find(owner.id).incarnation
        user = User(self.new_id(), self.new_id(), owner, life)
        with self._lock:
            self._users[user.fork] = user
            self._table.create(user.id, user.fork, owner.id)
        return user, Creation(user.id, user.fork)

    def find(self, rref: tuple[int, ...]) -> Owned:
        """A value of ours. If the call that makes it is still to come, it is awaited."""
        # A plain tuple is as good a key, and mostly there is nothing to enter.
        owned: Owned | None = self._owned.get(rref)  # type: ignore[call-overload]
        if owned is None:
            with self._lock:
                owned = self._find_or_await(RefId(*rref))
        if owned is None:
            raise OwnerLost(
                f"worker {self.agent.info.name!r} does not have the value of an RRef any "
                "more",
                worker=self.agent.info.name,
            )
        return owned

    def _look_up(self, rref: list[Any]) -> Tensor | None:
        """The tensor that is the value of a reference, if it is there, and is one."""
        try:
            # A plain tuple is as good a key, and costs less.
            outcome = self._owned[tuple(rref)].outcome  # type: ignore[index]
        except (KeyError, TypeError):  # it is not here, or no id at all
            return None
        if not outcome.done:
            return None
        value = outcome.value
        return value if type(value) in _TENSOR_TYPES else None

    def _find_or_await(self, rref: RefId) -> Owned | None:
        """None if nobody will make it. The caller holds the lock.

        Messages of different connections, and of one if they are served by different
        threads, come in any order: also before the call that makes the value.
        """
        owned = self._owned.get(rref)
        if owned is None and rref.created_on != self.me:
            creator = self.agent.network.find(rref.created_on)
            if creator.fate is None and rref not in self._buried:
                owned = self._owned[rref] = Owned(rref, is_begun=False)
        return owned

    # ---------------------------------------------------------------------- travelling

    def _pack(self, handle: Handle, peer: Peer) -> Packed:
        ref = handle._ref
        fork = self.new_id()
        if handle._service is not self:
            raise UsageError(
                "an RRef can only be sent by the worker that it belongs to: it was made "
                f"on {handle._service.agent.info.name!r} before a shutdown, or in another "
                "agent"
            )
        if isinstance(ref, Owned):
            packed = Packed(self.me, ref.id, fork, self.me, self._life)
            with self._lock:
                if peer.fate is None:
                    self._owned[ref.id] = ref
                    self._table.add_fork(ref.id, fork, peer.info.id)
        else:
            ref.check()
            packed = Packed(ref.owner.id, ref.id, fork, self.me, ref.life)
            with self._lock:
                is_held = ref.fork in self._users
                if is_held and peer.fate is None:
                    self._table.send(ref.fork, fork, peer.info.id)
            if not is_held:  # the owner was lost just now, and `ref` is told next
                owner = self.agent.network.find(ref.owner.id)
                raise ref.confirmation.error or self.owner_lost(owner)
        self.transfer.packed.append(packed)
        return packed

    def unpack(self, packed: Any, peer: Peer) -> Any:
        """See `Interceptor`."""
        if type(packed) is list:  # in safe mode it comes as msgpack made it
            packed = read_packed(packed)
        if not isinstance(packed, Packed):
            raise DecodeError(
                f"expected a reference, found a value of type {type(packed).__name__}"
            )
        self.leftovers.ensure_thread()
        rref, fork = packed.rref, packed.fork
        ref: Owned | User
        # First: if there is no such worker, nothing may be entered.
        owner = self.agent.network.find(packed.owner)
        with self._lock:
            instructions = self._table.arrive(rref, fork, packed.owner, packed.parent)
            if packed.owner == self.me:
                ref = self._arrive_home(rref, packed.life)
            else:
                ref = self._users[fork] = User(rref, fork, owner.info, packed.life)
                if owner.fate is not None:
                    instructions = self._table.fail(fork)
                    del self._users[fork]
                    ref.confirmation.finish(None, self.owner_lost(owner))
        if isinstance(ref, User) and not ref.confirmation.done:
            if packed.parent == packed.owner:
                ref.confirmation.finish(None, None)
            else:
                self.transfer.unconfirmed.append(ref)
        if all(map(self._is_connected, instructions)):
            self._perform(instructions)
        else:
            # Not here: a signal can end the wait for a connection, and what is in the
            # middle of being read would be read again. The references in it would then
            # be held twice, and end when the first of them does.
            self.agent.run_soon(functools.partial(self._perform, instructions))
        return self.handle_class._bind(self, ref)

    def _is_connected(self, instruction: Instruction) -> bool:
        """Whether what is to be said needs no wait."""
        try:
            return self.agent.network.find(instruction.to).link is not None
        except GradwireError:
            return True  # there is no such worker, and nobody is told

    def _arrive_home(self, rref: RefId, life: int) -> Owned:
        """A reference has come to the owner; the caller holds the lock."""
        owned = self._find_or_await(rref) if life == self._life else None
        if owned is None:
            owned = Owned(rref)
            _give_up(owned)
        elif rref not in self._table.forks and owned.is_begun:
            del self._owned[rref]  # only the program holds it now
        return owned

    def _enter(self, rref: RefId, fork: RefId, peer: Peer) -> Owned:
        """A call came that makes a value; its first fork is entered before it begins."""
        with self._lock:
            owned = self._owned.get(rref) or Owned(rref)
            owned.is_begun = True
            # Its creator may have given up meanwhile, or died.
            if peer.fate is None and rref not in self._buried:
                self._owned[rref] = owned
                self._table.add_fork(rref, fork, peer.info.id)
        return owned

    # --------------------------------------------------------------- calls and replies

    def sending_call(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        tensors: list[Tensor],
        of_modules: set[int],
        is_grad_enabled: bool,
        making: object | None = None,
    ) -> Note:
        """See `Interceptor`."""
        creation = making if isinstance(making, Creation) else None
        return CallNote(self, self.transfer.take_packed(), creation)

    def received_reply(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        note: Note | None,
        header: bytes | None,
        tracked: list[Tensor],
        is_clean: bool = False,
    ) -> None:
        """See `Interceptor`."""
        self.transfer.take_unpacked()
        if isinstance(note, CallNote) and note.creation is not None:
            self.created(note.creation, None)

    def dropped_reply(self, peer: Peer, call_id: int, header: bytes) -> None:
        """See `Interceptor`."""
        self._settle_unseen(header)

    def received_call(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        header: bytes,
        tracked: list[Tensor],
    ) -> Scope:
        """See `Interceptor`."""
        unconfirmed = self.transfer.take_unpacked()
        made = decode_header(header).made
        if made is None:
            return CallScope(self, peer, unconfirmed)
        if made[0].created_on != peer.info.id:
            raise DecodeError("the id of a new value is not one of its creator's")
        with self._lock:
            self._check_limit(peer)
        return CreationScope(self, peer, unconfirmed, self._enter(*made, peer))

    def packed_reply(self, peer: Peer) -> Scope:
        """See `Interceptor`."""
        return CallScope(self, peer, [])

    def dropped_call(
        self, peer: Peer, call_id: int, header: bytes, error: BaseException
    ) -> None:
        """See `Interceptor`."""
        made = self._settle_unseen(header)
        if made is None:
            return
        rref, fork = made
        # Whoever asks for the value is told, until its creator has heard of it as well.
        # A call to ourselves may have been given up already.
        if fork == rref:
            owned = self._owned.get(rref)
        else:
            with self._lock:
                is_over = self._is_over_limit(peer) or rref.created_on != peer.info.id
            owned = None if is_over else self._enter(*made, peer)
        if owned is not None:
            self.keep(owned, None, error)

    def discarded(self, error: BaseException) -> None:
        """See `Interceptor`."""
        self.cancel(self.transfer.take_packed())
        self.transfer.take_unpacked()

    def keep(self, owned: Owned, value: Any, error: BaseException | None) -> None:
        """A value is made, or will never be."""
        if error is not None:
            # Described at once: with its traceback it would keep the handler's frame.
            error = self.agent.rebuild(self.agent.describe(error))
        owned.settle(value, error)

    def check_sent(self, peer: Peer) -> None:
        """Raises if the references that a reply is to take to a peer are too many."""
        with self._lock:
            self._check_limit(peer, more=0)

    def cancel(self, packed: Iterable[Packed]) -> None:
        """References that we packed were not sent."""
        instructions: list[Instruction] = []
        with self._lock:
            for item in packed:
                if item.owner == self.me:
                    self._remove_fork(item.rref, item.fork)
                else:
                    instructions += self._table.on_arrived(item.fork)
            self._forget(instructions)
        self._perform(instructions)

    def _settle_unseen(self, header: bytes) -> tuple[RefId, RefId] | None:
        """A message came that nobody will read; some of it may have been unpacked.

        Returns:
            What it should have made.
        """
        instructions: list[Instruction] = []
        references = decode_header(header)
        for item in references.packed:
            owner, rref, fork, parent = item.owner, item.rref, item.fork, item.parent
            with self._lock:
                if fork in self._users:
                    continue  # it was unpacked, and dies as others do
                if parent == self.me == owner:
                    self._remove_fork(rref, fork)
                elif parent == owner:
                    instructions.append(TellDelete(owner, rref, fork))
                else:
                    instructions.append(TellArrived(parent, fork))
        self._perform(instructions)
        return references.made

    def created(
        self,
        creation: Creation,
        error: BaseException | None,
        *,
        was_sent: bool = True,
    ) -> None:
        """The call that makes a value has ended."""
        if creation.fork == creation.rref:  # a call to ourselves
            with self._lock:
                owned = self._owned.get(creation.rref)
                self._remove_fork(creation.rref, creation.fork)
            if owned is not None and error is not None:
                owned.settle(None, error)
            return
        with self._lock:
            user = self._users.get(creation.fork)
        if user is None:
            return
        if error is None:
            self._confirm(user.fork)
            return
        owner = self.agent.network.find(user.owner.id)
        if isinstance(error, PeerLostError) and not isinstance(error, RemoteError):
            error = self.owner_lost(owner, error)
        if not was_sent:
            self._fail(user.fork, error)
            return
        with self._lock:
            instructions = self._table.give_up(user.fork)
            self._forget(instructions)
        user.confirmation.finish(None, error)
        self._perform(instructions)

    # ----------------------------------------------------------------------- messages

    def _on_fork_request(self, peer: Peer, message: ForkRequest, frame: Frame) -> None:
        rref, fork = message.rref, message.fork
        with self._lock:
            if peer.fate is not None:
                return
            is_over = self._is_over_limit(peer)
            # The value of an earlier life of ours is gone, and nobody will make it again.
            is_ours = message.life == self._life and not is_over
            is_known = is_ours and self._find_or_await(rref) is not None
            instructions = self._table.on_fork_request(
                rref, fork, peer.info.id, is_known
            )
        if is_over:
            limit = self.agent.limits.rrefs
            self._send(peer.info.id, Forked(fork, False, limit))
            return
        self._perform(instructions)

    def _on_forked(self, peer: Peer, message: Forked, frame: Frame) -> None:
        if message.is_known:
            self._confirm(message.fork)
            return
        error: GradwireError
        if message.limit:
            error = LimitExceeded(
                f"worker {peer.info.name!r} does not enter another reference to a value of "
                f"its own for worker {self.agent.info.name!r}: it grants each peer "
                f"{message.limit} (its option max_peer_rrefs); drop some first",
                worker=peer.info.name,
                limit="max_peer_rrefs",
                value=message.limit,
                peer=self.agent.info.name,
            )
        else:
            error = OwnerLost(
                f"worker {peer.info.name!r} no longer has the value of an RRef: it was "
                "restarted, or all workers that held it were lost, while this reference "
                "was on its way",
                worker=peer.info.name,
            )
        self._fail(message.fork, error)

    def _on_arrived(self, peer: Peer, message: Arrived, frame: Frame) -> None:
        instructions: list[Instruction] = []
        with self._lock:
            for fork in message.forks:
                instructions += self._table.on_arrived(fork)
            self._forget(instructions)
        self._perform(instructions)

    def _on_deleted(self, peer: Peer, message: Deleted, frame: Frame) -> None:
        for rref, fork, is_given_up in message.forks:
            unmade = None
            with self._lock:
                if self._is_of_another(rref, fork, is_given_up, peer.info.id):
                    continue
                freed = self._remove_fork(rref, fork)
                owned = self._owned.get(rref)
                if is_given_up:
                    if freed is None and not (owned and owned.is_begun):
                        unmade = owned  # the call that makes it has not come
                    self._bury(rref)
            _give_up(unmade)  # others may wait for it
            del freed, owned  # the value may die here, outside of the lock

    def _is_of_another(
        self, rref: RefId, fork: RefId, is_given_up: bool, rank: int
    ) -> bool:
        """Whether a worker wants to delete what is not its own; under the lock."""
        holder = self._table.forks.get(rref, {}).get(fork, rank)
        return holder != rank or (is_given_up and rref.created_on != rank)

    def peer_lost(self, peer: Peer) -> None:
        """See `Interceptor`."""
        rank = peer.info.id
        if rank == self.me:
            return
        with self._lock:
            free, orphans, instructions = self._table.lose(rank)
            freed = [
                self._owned.pop(rref)
                for rref in free
                if rref in self._owned and self._owned[rref].is_begun
            ]
            # Those that it was about to make are awaited in vain.
            unmade = [
                owned
                for rref, owned in self._owned.items()
                if rref.created_on == rank and not owned.is_begun
            ]
            for owned in unmade:
                if owned.id not in self._table.forks:
                    del self._owned[owned.id]
            users = [self._users.pop(fork, None) for fork in orphans]
            self._forget(instructions)
        for doomed in (*freed, *unmade):
            _give_up(doomed)
        for user in users:
            if user is not None:
                error = self.owner_lost(peer)
                # One that was confirmed has an outcome; the last word is this one.
                if not user.confirmation.finish(None, error):
                    user.confirmation.error = error
        self._perform(instructions)

    # -------------------------------------------------------------------------- inside

    def _is_over_limit(self, peer: Peer, more: int = 1) -> bool:
        """Whether a peer would have too many references; the caller holds the lock."""
        rank = peer.info.id
        held = self._table.held.get(rank, 0)
        return held + more > self.agent.limits.rrefs and rank != self.me

    def _check_limit(self, peer: Peer, more: int = 1) -> None:
        if self._is_over_limit(peer, more):
            raise self.agent.limits.over_rrefs(peer.info.name)

    def _confirm(self, fork: RefId) -> None:
        with self._lock:
            user = self._users.get(fork)
            instructions = self._table.confirm(fork)
            self._forget(instructions)
        if user is not None:
            user.confirmation.finish(None, None)
        self._perform(instructions)

    def _fail(self, fork: RefId, error: BaseException) -> None:
        with self._lock:
            user = self._users.pop(fork, None)
            instructions = self._table.fail(fork)
        if user is not None:
            user.confirmation.finish(None, error)
        self._perform(instructions)

    def _drop(self, forks: list[RefId]) -> None:
        """The program dropped its handles."""
        instructions: list[Instruction] = []
        with self._lock:
            for fork in forks:
                instructions += self._table.drop(fork)
            self._forget(instructions)
        self._perform(instructions)

    def _remove_fork(self, rref: RefId, fork: RefId) -> Owned | None:
        """The caller holds the lock; the value, if nobody refers to it any more.

        One that is still to be made stays: its creator will need it.
        """
        if self._table.remove_fork(rref, fork):
            owned = self._owned.get(rref)
            if owned is not None and (owned.is_begun or owned.outcome.done):
                del self._owned[rref]
                if rref.created_on != self.me:
                    # A call that was given up may still come, and would wait for a value.
                    self._bury(rref)
                return owned
        return None

    def _forget(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, TellDelete):
                self._users.pop(instruction.fork, None)

    def _perform(self, instructions: list[Instruction]) -> None:
        arrived: dict[int, list[RefId]] = {}
        deleted: dict[int, list[Any]] = {}
        for instruction in instructions:
            if isinstance(instruction, TellArrived):
                arrived.setdefault(instruction.to, []).append(instruction.fork)
            elif isinstance(instruction, TellDelete):
                _, *entry = instruction
                deleted.setdefault(instruction.to, []).append(tuple(entry))
            elif isinstance(instruction, AskFork):
                self._ask(instruction)
            elif isinstance(instruction, TellForked):
                self._send(
                    instruction.to, Forked(instruction.fork, instruction.is_known)
                )
        for to, forks in arrived.items():
            self._send(to, Arrived(forks))
        for to, entries in deleted.items():
            self._send(to, Deleted(entries))

    def _bury(self, rref: RefId) -> None:
        """The caller holds the lock."""
        if rref not in self._table.forks:
            self._owned.pop(rref, None)
        self._buried[rref] = None
        while len(self._buried) > _MOST_BURIED:  # most are never asked for
            del self._buried[next(iter(self._buried))]

    def owner_lost(self, owner: Peer, error: PeerLostError | None = None) -> OwnerLost:
        # By now it may have come back: then the call that failed knows the reason.
        return OwnerLost(
            f"worker {owner.info.name!r} (rank {owner.info.id}), which owned the value of "
            f"an RRef, is lost, and the value with it: {owner.fate or error}",
            worker=owner.info.name,
        )

    def reaching(self, owner: WorkerInfo) -> Reaching:
        """Around a call to an owner: if that is lost, the error says what it means."""
        return Reaching(self, owner)

    def _ask(self, instruction: AskFork) -> None:
        owner = self.agent.network.find(instruction.to)
        with self._lock:
            user = self._users.get(instruction.fork)
        if user is None:
            return  # the owner was lost meanwhile
        try:
            self._dialer.connect(owner)
            request = ForkRequest(instruction.rref, instruction.fork, user.life)
            self.agent.send(owner, encode(request))
        except GradwireError as error:
            lost = OwnerLost(
                f"worker {owner.info.name!r} (rank {owner.info.id}), which owns the value "
                f"of an RRef, cannot be reached: {error}",
                worker=owner.info.name,
            )
            self._fail(instruction.fork, lost)

    def _send(self, rank: int, message: Message) -> None:
        """Sends to a worker; if that is lost, `peer_lost` does the rest."""
        try:
            peer = self.agent.network.find(rank)
            self.agent.network.connect(peer)
            self.agent.send(peer, encode(message))
        except GradwireError:
            pass

    # ----------------------------------------------------------------------------- end

    def debug_info(self) -> dict[str, Any]:
        """See `Interceptor`."""
        self.leftovers.work_off()
        with self._lock:
            counts: dict[str, Any] = self._table.counts()
            awaited = sum(not owned.outcome.done for owned in self._owned.values())
        return {**counts, "awaited_values": awaited}

    def drop_everything(self) -> None:
        """The worker is about to leave: nothing is referred to from here any more."""
        with self._lock:
            forks = list(self._users)
        self._drop(forks)

    def close(self) -> None:
        """See `Interceptor`."""
        self.leftovers.close()
        with self._lock:
            doomed = list(self._owned.values())
            users = list(self._users.values())
            self._owned.clear()
            self._users.clear()
            self._table = RefTable(self.me)
        for owned in doomed:
            _give_up(owned)
        for user in users:  # handlers may wait until the owner knows their arguments
            user.confirmation.finish(
                None,
                OwnerLost(
                    f"worker {self.agent.info.name!r} was shut down before worker "
                    f"{user.owner.name!r} knew of a reference to a value of its own",
                    worker=user.owner.name,
                ),
            )


def _give_up(owned: Owned | None) -> None:
    """Nobody refers to a value any more; if it was never made, nobody will make it."""
    if owned is not None and not owned.outcome.done:
        owned.is_begun = True  # nobody will make it any more
        owned.settle(
            None,
            OwnerLost("nobody refers to this value any more, and it was never made"),
        )
