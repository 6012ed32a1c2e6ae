"""Bytes to messages and back: no sockets, no threads, no event loop.

``encode`` makes a head and raw buffers of a message and its value. ``decode_control``
and ``decode_value`` are the way back. ``register_message`` adds kinds of messages.
"""

from __future__ import annotations

from gradwire.wire._allowed import AllowedModules
from gradwire.wire._codec import (
    NO_VALUE,
    PLAIN_TYPES,
    Outgoing,
    decode_control,
    decode_small,
    decode_value,
    describe_small,
    encode,
    encode_small,
    encode_tensors,
    is_bare,
    peek_kind,
    plain_body,
    tracked_tensors,
)
from gradwire.wire._devices import move
from gradwire.wire._functions import name_of, resolve
from gradwire.wire._messages import (
    FLAT_TUPLE,
    Body,
    Call,
    Failure,
    Goodbye,
    Heartbeat,
    Introduction,
    Message,
    Reply,
    TensorMeta,
    kind_of,
    register_message,
)
from gradwire.wire._pickle import Packer
from gradwire.wire._serializers import (
    PICKLE,
    PickleSerializer,
    SafeSerializer,
    Serializer,
)
from gradwire.wire._tensors import INLINE_BYTES, TRACKED, Buffer, any_overlap
from gradwire.wire._torch_private import (
    clean_thread_state,
    set_compiler,
    thread_state_is_clean,
)

__all__ = [
    "FLAT_TUPLE",
    "INLINE_BYTES",
    "NO_VALUE",
    "PICKLE",
    "PLAIN_TYPES",
    "TRACKED",
    "AllowedModules",
    "Body",
    "Buffer",
    "Call",
    "Failure",
    "Goodbye",
    "Heartbeat",
    "Introduction",
    "Message",
    "Outgoing",
    "Packer",
    "PickleSerializer",
    "Reply",
    "SafeSerializer",
    "Serializer",
    "TensorMeta",
    "any_overlap",
    "clean_thread_state",
    "decode_control",
    "decode_small",
    "decode_value",
    "describe_small",
    "encode",
    "encode_small",
    "encode_tensors",
    "is_bare",
    "kind_of",
    "move",
    "name_of",
    "peek_kind",
    "plain_body",
    "register_message",
    "resolve",
    "set_compiler",
    "thread_state_is_clean",
    "tracked_tensors",
]
