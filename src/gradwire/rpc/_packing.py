"""How objects of the layers above travel inside the values of calls and replies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from torch import Tensor

from gradwire.errors import DecodeError
from gradwire.rpc._interceptors import Interceptor
from gradwire.rpc._peer import Peer

__all__ = ["Packing", "PeerPacker"]

_Packs: TypeAlias = dict[type, tuple[Interceptor, Callable[[Any, Peer], Any]]]


class Packing:
    """What the interceptors of an agent pack and unpack."""

    def __init__(self, interceptors: tuple[Interceptor, ...]) -> None:
        self._interceptors = interceptors
        self._packs: _Packs = {
            kind: (interceptor, pack)
            for interceptor in interceptors
            for kind, pack in interceptor.packs.items()
        }
        self._unpacks = {i.name: i.unpack for i in interceptors}

    def packer(self, peer: Peer) -> PeerPacker:
        """Packs what goes to a peer in one message."""
        return PeerPacker(self._packs, peer)

    def unpacker(self, peer: Peer) -> Callable[[Any], Any]:
        """What makes objects of what a peer has packed."""
        if peer.unpack is None:
            peer.unpack = functools.partial(self._unpack, peer)
        return peer.unpack

    def _unpack(self, peer: Peer, packed: Any) -> Any:
        name, content = packed
        unpack = self._unpacks.get(name)
        if unpack is None:
            raise DecodeError(f"an object of an unknown layer, {name!r:.40}, arrived")
        return unpack(content, peer)

    def discard(self, error: BaseException) -> None:
        """See `Interceptor.discarded`."""
        for interceptor in self._interceptors:
            interceptor.discarded(error)


class PeerPacker:
    """A `gradwire.wire.Packer` for one message; notes whose objects it has packed.

    Attributes:
        used: The interceptors whose objects they are.
        opaque: Tensors that require grad and go without their history.
    """

    __slots__ = ("_packs", "_peer", "opaque", "used")

    def __init__(self, packs: _Packs, peer: Peer) -> None:
        self._packs = packs
        self._peer = peer
        self.used: list[Interceptor] = []
        self.opaque: list[Tensor] = []

    @property
    def types(self) -> Collection[type]:
        """See `Packer`."""
        return self._packs

    def pack(self, obj: Any) -> Any:
        """See `Packer`."""
        interceptor, pack = self._packs[type(obj)]
        if interceptor not in self.used:
            self.used.append(interceptor)
        return interceptor.name, pack(obj, self._peer)

    def goes_without_history(self, tensor: Tensor) -> None:
        """See `Packer`."""
        self.opaque.append(tensor)
