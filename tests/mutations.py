"""Random damage to bytes, for tests that feed it to whoever reads them."""

from __future__ import annotations

import random


def mutate(data: bytes, choice: random.Random) -> bytes:
    """Changes, drops, repeats or inserts something, one to four times."""
    damaged = bytearray(data)
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(damaged) + 1)
        end = min(len(damaged), at + choice.choice([1, 1, 2, 8, 16, 40]))
        match choice.randrange(5):
            case 0:
                damaged[at:end] = choice.randbytes(end - at)
            case 1:
                del damaged[at:end]
            case 2:
                damaged[at:at] = damaged[at:end]
            case 3:
                damaged[at:at] = choice.randbytes(choice.randint(1, 20))
            case 4 if damaged:
                damaged[at % len(damaged)] ^= 1 << choice.randrange(8)
    return bytes(damaged)
