"""Optimises a design through a remote simulator: ``python examples/differentiable_simulator.py``.

A beam is clamped at one end and loaded at the other. Where should its material be, so that
it bends as little as possible? One worker has the simulator: a finite element model,
written in torch. The other has the design, 20 thicknesses, and improves it with the
gradients that come back through the simulator; it knows nothing of elements and forces.

The result is compared with the same optimisation in one process, to the last bit, and
with theory: the thickness must grow with the square root of the distance from the load.
(There is no data here. ``--short`` takes a few steps only.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire import launch, rpc

ROLES = {"designer": 1, "simulator": 1}
NUM_ELEMENTS = 20
RATE = 0.01
LIMIT_S = 300.0


# ------------------------------------------------------------------------ the simulator


def bend(thickness: Tensor) -> Tensor:
    """How far the loaded end of a beam moves; a solver as others would write it.

    Every element has two nodes, with a deflection and a slope each. Its stiffness grows
    with the third power of its thickness. The beam is 1 long, the load is 1.
    """
    length = 1.0 / len(thickness)
    element = torch.tensor(
        [
            [12.0, 6 * length, -12, 6 * length],
            [6 * length, 4 * length**2, -6 * length, 2 * length**2],
            [-12, -6 * length, 12, -6 * length],
            [6 * length, 2 * length**2, -6 * length, 4 * length**2],
        ],
        dtype=torch.float64,
    ) / (length**3)
    size = 2 * len(thickness) + 2
    stiffness = torch.zeros(size, size, dtype=torch.float64)
    for number, one in enumerate(thickness):
        at = slice(2 * number, 2 * number + 4)
        padded = torch.zeros_like(stiffness)
        padded[at, at] = element
        stiffness = stiffness + one**3 * padded
    load = torch.zeros(size, dtype=torch.float64)
    load[-2] = 1.0
    # The first node is clamped: it neither moves nor turns.
    moved = torch.linalg.solve(stiffness[2:, 2:], load[2:])
    return moved[-2]


# -------------------------------------------------------------------------- the designer


def optimise(
    simulate: Callable[[Tensor], Tensor], num_steps: int, show: bool
) -> tuple[Tensor, list[float]]:
    """The best thicknesses of a beam with a given amount of material; what it took."""
    free = torch.zeros(NUM_ELEMENTS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([free], lr=RATE)
    bends = []
    for step in range(1, num_steps + 1):
        thickness = NUM_ELEMENTS * torch.softmax(free, dim=0)  # 1 on average
        result = simulate(thickness)
        optimizer.zero_grad()
        result.backward()  # through the simulator, wherever it is
        optimizer.step()
        bends.append(result.item())
        if show:
            show_progress(step, num_steps, f"the end moves by {bends[-1]:.5f}")
    return thickness.detach(), bends


def simulate_remotely(thickness: Tensor) -> Tensor:
    return rpc.rpc_sync("simulator", bend, args=(thickness,))


def design(num_steps: int) -> None:
    print("The designer asks the simulator, and follows the gradients:")
    thickness, bends = optimise(simulate_remotely, num_steps, show=True)
    for row in (3, 2, 1):
        line = "".join("#" if one > row * 0.4 else " " for one in thickness)
        print(f"    clamped |{line} <- load")
    check(bends[-1] < bends[0], f"it moved by {bends[0]:.5f} at first")

    print("The same in one process:")
    alone, bends_alone = optimise(bend, num_steps, show=False)
    same = torch.equal(thickness, alone) and bends == bends_alone
    check(same, "the same beam, to the last bit, and the same way there")

    print("In theory:")
    distance = (
        1 - (torch.arange(NUM_ELEMENTS, dtype=torch.float64) + 0.5) / NUM_ELEMENTS
    )
    best = distance.sqrt() / distance.sqrt().mean()
    limit = bend(best).item()
    print(
        f"    a beam like the root of the distance from the load moves by {limit:.5f}"
    )
    if num_steps >= 200:
        check(bends[-1] < 1.001 * limit, "ours is as good, up to a thousandth")


# ------------------------------------------------------------------------------ the rest


def show_progress(done: int, total: int, note: str) -> None:
    """A bar that grows in its place, or one line at the end if this is no terminal."""
    line = f"    [{'#' * (30 * done // total):<30}] {done}/{total}  {note}"
    if sys.stdout.isatty():
        print(f"\r{line}\033[K", end="\n" if done == total else "", flush=True)
    elif done == total:
        print(line)


def check(holds: bool, text: str) -> None:
    if not holds:
        raise SystemExit(f"    NOT so: {text}")
    print(f"    {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few steps only")
    num_steps = 20 if parser.parse_args().short else 300
    launch.main({"designer": design}, ROLES, (num_steps,), timeout=LIMIT_S)


if __name__ == "__main__":
    main()
