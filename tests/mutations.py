"""Random damage to what others will read: to bytes, and to the values inside of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

EDGES = (
    *range(-2, 18),
    *(2**bits + off for bits in (7, 8, 15, 16, 31, 32, 48, 62) for off in (-1, 0, 1)),
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**31),
    -(2**63),
)
"""Numbers at which programs go wrong; all of them fit msgpack."""

_WIDTHS = (1, 2, 4, 8)
# Heads of msgpack values that announce more than follows: str, bin, array, map, ext.
_ANNOUNCEMENTS = b"\xc6\xc7\xc9\xdb\xdd\xdf\xdc\xde\xda\xc5\xd9\xc4"


def mutate(
    data: bytes, choice: random.Random, others: Sequence[bytes] = (b"",)
) -> bytes:
    """Changes, drops, repeats, inserts or splices something, one to four times.

    Args:
        data: What to damage.
        choice: Where the choices come from.
        others: More inputs of the same sort, to take pieces from.
    """
    damaged = bytearray(data)
    for _ in range(choice.choice((1, 1, 1, 2, 3, 4))):
        size = len(damaged)
        at = int(choice.random() * (size + 1))
        end = min(size, at + choice.choice((1, 1, 2, 8, 16, 40)))
        match int(choice.random() * 9):
            case 0:
                damaged[at:end] = choice.randbytes(end - at)
            case 1:
                del damaged[at:end]
            case 2:
                damaged[at:at] = damaged[at:end]
            case 3:
                damaged[at:at] = choice.randbytes(choice.choice((1, 2, 4, 20)))
            case 4 if damaged:
                damaged[at % size] ^= 1 << int(choice.random() * 8)
            case 5:
                width = choice.choice(_WIDTHS)
                number = choice.choice(EDGES) % (1 << 8 * width)
                damaged[at : at + width] = number.to_bytes(width, "big")
            case 6:
                del damaged[at:]
            case 7:
                other = choice.choice(others)
                damaged[at:] = other[int(choice.random() * (len(other) + 1)) :]
            case 8:
                number = choice.choice(EDGES) % (1 << 32)
                announcement = choice.choice(_ANNOUNCEMENTS).to_bytes(1, "big")
                damaged[at:end] = announcement + number.to_bytes(4, "big")
    return bytes(damaged)


def mutate_value(value: Any, choice: random.Random, deep: Any = None) -> Any:
    """Changes one to three places inside nested lists and dictionaries, in place.

    Args:
        value: What to damage.
        choice: Where the choices come from.
        deep: What stands for a value with thousands of levels in its encoding.
    """
    holder = [value]
    for _ in range(choice.choice((1, 1, 2, 3))):
        _mutate_one_place(holder, choice, deep)
    return holder[0] if holder else None


def _mutate_one_place(node: Any, choice: random.Random, deep: Any) -> None:
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        if not keys:
            return
        key = choice.choice(keys)
        inner = node[key]
        if not isinstance(inner, (list, dict)) or choice.random() < 0.15:
            break
        node = inner
    match int(choice.random() * 8):
        case 0:
            del node[key]
        case 1 if isinstance(node, list):
            node.insert(key, _make_value(choice, deep))
        case 2 if isinstance(node, list):
            node.extend([node[key]] * choice.choice((1, 2, 9)))
        case 3 if isinstance(node, dict):
            node[_make_text(choice)] = node[key]
        case 4 if type(inner) is int:
            node[key] = max(-(2**63), min(2**64 - 1, inner + choice.choice((-1, 1))))
        case 5 | 6 if type(inner) is int:
            node[key] = choice.choice(EDGES)
        case _:
            node[key] = _make_value(choice, deep)


def _make_value(choice: random.Random, deep: Any) -> Any:
    match int(choice.random() * 10):
        case 0 | 1 | 2:
            return choice.choice(EDGES)
        case 3:
            return choice.choice((None, True, False))
        case 4:
            return choice.choice((0.5, -0.0, 1e308, float("nan"), float("inf")))
        case 5:
            return _make_text(choice)
        case 6:
            return choice.randbytes(choice.choice((0, 1, 31, 32, 33, 300)))
        case 7:
            return [choice.choice(EDGES)] * choice.choice((0, 1, 2, 5, 70))
        case 8:
            return choice.choice(([[]], [[[None]]], deep))
        case _:
            return {_make_text(choice): choice.choice(EDGES)}


def _make_text(choice: random.Random) -> str:
    return choice.choice(
        (
            "",
            "w0",
            "w1",
            "torch:add",
            "os:system",
            "autograd",
            "rref",
            "\x00",
            "\n\r\x1b",
        )
    ) * choice.choice((1, 1, 1, 2, 200))
