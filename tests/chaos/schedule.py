"""Which faults come when: all of it drawn from a seed, and nothing else.

A fault is bound to a step of the training, not to the clock, so the same seed breaks the
same things at the same places on any machine, as far as threads allow.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill", "pause", "freeze", "disconnect", "glitch", "cut", "slow", "lossy"
]
"""What happens to a worker.

kill: SIGKILL, later a new process of the same name.
pause: SIGSTOP for less than the limit for silence: nobody may mind.
freeze: SIGSTOP for longer: the others lose it, and it is told when it is back.
disconnect: all its connections end, as if their kernel had reset them.
glitch: its host is cut off for less than the limit: nobody may mind.
cut: its host is cut off for longer.
slow, lossy: so is its network for a while: nobody may mind.
"""

HARMLESS: frozenset[Kind] = frozenset({"pause", "glitch", "slow", "lossy"})
LOCAL_KINDS: tuple[Kind, ...] = (
    "kill",
    "kill",
    "kill",
    "pause",
    "freeze",
    "disconnect",
)
HOST_KINDS: tuple[Kind, ...] = (*LOCAL_KINDS, "glitch", "cut", "slow", "lossy")

LONGEST_PAUSE = 0.4
"""As a part of the limit for silence. TCP may need as long again to go on."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        step: It happens in this step of the training,
        delay_s: so long after the step began.
        kind: What happens.
        worker: To whom.
        lasts_s: How long until it is undone: the process restarted or continued, the
            network mended. (0: at once.)
    """

    step: int
    delay_s: float
    kind: Kind
    worker: str
    lasts_s: float

    def __str__(self) -> str:
        return (
            f"step {self.step} + {self.delay_s * 1e3:.1f} ms: {self.kind} {self.worker} "
            f"for {self.lasts_s:.2f} s"
        )


def draw_round(
    seed: str,
    first: int,
    num_steps: int,
    num_faults: int,
    *,
    victims: list[str],
    others: list[str],
    lost_after_s: float,
    step_s: float,
    hosts: bool,
) -> list[Fault]:
    """The faults of some steps, in order.

    Args:
        seed: Decides everything.
        first: The first step.
        num_steps: How many.
        num_faults: How many faults.
        victims: Whom anything may happen to.
        others: Who only ever suffers what is harmless.
        lost_after_s: The limit for silence.
        step_s: About how long a step takes; faults come at any moment of it.
        hosts: Whether workers have a network of their own.
    """
    draw = random.Random(seed)
    faults = []
    for _ in range(num_faults):
        kind = draw.choice(HOST_KINDS if hosts else LOCAL_KINDS)
        worker = draw.choice([*victims, *others] if kind in HARMLESS else victims)
        faults.append(
            Fault(
                step=first + draw.randrange(num_steps),
                delay_s=draw.uniform(0, step_s),
                kind=kind,
                worker=worker,
                lasts_s=_draw_duration(draw, kind, lost_after_s),
            )
        )
    return sorted(faults, key=lambda fault: (fault.step, fault.delay_s))


def _draw_duration(draw: random.Random, kind: Kind, lost_after_s: float) -> float:
    if kind in ("pause", "glitch"):
        return draw.uniform(0.02, LONGEST_PAUSE) * lost_after_s
    if kind in ("slow", "lossy"):
        return draw.uniform(0.2, 1.0) * lost_after_s
    if kind in ("freeze", "cut"):
        # A round of the monitor comes on top of the limit.
        return draw.uniform(1.5, 2.0) * lost_after_s
    return draw.choice([0.0, draw.uniform(0, 0.5)])
