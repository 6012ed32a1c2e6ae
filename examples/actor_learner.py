"""Actors play, a learner answers them in batches: ``python examples/actor_learner.py``.

Two actors have eight cart-poles each, poles that stand on carts and must not fall (a small
simulation in this file; there is no data). At every moment an actor asks the learner what
to do. The learner waits until both have asked, and runs its network once for all sixteen:
no thread waits meanwhile, for the answers are futures. After a game the actors send what
they have seen, and the learner improves its network (REINFORCE).

Every actor draws its random numbers itself, so the same games can be played in one
process, and the result must be the same network, to the last bit. ``--short`` plays a few
games only.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gradwire import launch, rpc

ROLES = {"learner": 1, "actor": 2}
ACTORS = ("actor:0", "actor:1")
NUM_POLES = 8  # of each actor
RATE = 0.05
DISCOUNT = 0.98
LIMIT_S = 300.0


class Plan(NamedTuple):
    num_games: int
    num_moves: int  # of a game, at most
    threshold: float  # how long poles must stand at the end, on average


FULL = Plan(num_games=30, num_moves=200, threshold=180.0)
SHORT = Plan(num_games=3, num_moves=40, threshold=0.0)


# --------------------------------------------------------------------------- at an actor


class CartPoles:
    """Several at once. A state is place, speed, angle and turning speed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.states = torch.empty(0)

    def draw(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def reset(self) -> Tensor:
        self.states = 0.1 * (self.draw(NUM_POLES, 4) - 0.5)
        return self.states

    def move(self, is_right: Tensor) -> tuple[Tensor, Tensor]:
        """Pushes the carts for 20 ms; returns states, and which poles still stand."""
        _, speed, angle, turning = self.states.unbind(1)
        force = 20.0 * is_right.double() - 10.0
        push = (force + 0.05 * turning**2 * angle.sin()) / 1.1
        torque = 9.8 * angle.sin() - angle.cos() * push
        turn = torque / (0.5 * (4 / 3 - angle.cos() ** 2 / 11))
        drive = push - turn * angle.cos() / 22
        change = torch.stack([speed, drive, turning, turn], dim=1)
        self.states = self.states + 0.02 * change
        stands = (self.states[:, 0].abs() < 2.4) & (self.states[:, 2].abs() < 0.21)
        return self.states, stands


class Game(NamedTuple):
    states: Tensor  # move, pole, 4
    moves: Tensor
    alive: Tensor  # which poles stood before the move


class Player:
    """An actor: its poles, and a game that is played move by move."""

    def __init__(self, number: int) -> None:
        self.poles = CartPoles(seed=number)
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def begin(self) -> Tensor:
        self.rows = []
        self.alive = torch.ones(NUM_POLES, dtype=torch.bool)
        self.states = self.poles.reset()
        return self.states

    def go_on(self, chances: Tensor) -> Tensor:
        """Moves to the right with the given chances."""
        is_right = self.poles.draw(NUM_POLES) < chances
        self.rows.append((self.states, is_right, self.alive))
        self.states, stands = self.poles.move(is_right)
        self.alive = self.alive & stands
        return self.states

    def end(self) -> Game:
        return Game(*map(torch.stack, zip(*self.rows, strict=True)))


_players: dict[str, Player] = {}


def play(num_moves: int) -> Game:
    """One game of this actor; every move is a call to the learner."""
    number = launch.this_worker().index
    player = _players.setdefault("here", Player(number))
    states = player.begin()
    for _ in range(num_moves):
        states = player.go_on(rpc.rpc_sync("learner", choose, args=(number, states)))
    return player.end()


# ------------------------------------------------------------------------ at the learner


class Learner:
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)
        self.network = nn.Sequential(*layers).double()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=RATE)

    @torch.no_grad()
    def choose(self, states: list[Tensor]) -> tuple[Tensor, ...]:
        """Chances to move to the right, for all actors at once."""
        chances = self.network(torch.cat(states)).sigmoid().squeeze(1)
        return chances.split(NUM_POLES)

    def learn(self, games: list[Game]) -> float:
        """Makes moves after which poles stood long more likely; returns how long."""
        states = torch.cat([game.states for game in games], dim=1)
        moves = torch.cat([game.moves for game in games], dim=1).double()
        alive = torch.cat([game.alive for game in games], dim=1).double()
        following = torch.zeros(alive.shape[1], dtype=torch.float64)
        values = []
        for row in alive.flip(0):
            following = row * (1 + DISCOUNT * following)
            values.append(following)
        value = torch.stack(values[::-1])
        seen = value[alive.bool()]
        advantage = (value - seen.mean()) / (seen.std() + 1e-8) * alive
        logits = self.network(states).squeeze(2)
        cost = binary_cross_entropy_with_logits(logits, moves, reduction="none")
        self.optimizer.zero_grad()
        ((cost * advantage).sum() / alive.sum()).backward()
        self.optimizer.step()
        return alive.sum(0).mean().item()


class Desk:
    """Where questions of actors wait for each other."""

    def __init__(self, answer: Callable[[list[Tensor]], tuple[Tensor, ...]]) -> None:
        self._answer = answer
        # Guards the dictionary: each question is brought by a thread of its own.
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Tensor, rpc.Future[Tensor]]] = {}
        self.num_batches = 0

    def ask(self, actor: int, states: Tensor) -> rpc.Future[Tensor]:
        future: rpc.Future[Tensor] = rpc.Future()
        with self._lock:
            self._waiting[actor] = states, future
            if len(self._waiting) < len(ACTORS):
                return future
            asked = [self._waiting.pop(number) for number in range(len(ACTORS))]
        self.num_batches += 1
        answers = self._answer([states for states, _ in asked])
        for (_, waiting), answer in zip(asked, answers, strict=True):
            waiting.set_result(answer)
        return future


_desks: list[Desk] = []


@rpc.functions.async_execution
def choose(actor: int, states: Tensor) -> rpc.Future[Tensor]:
    """What to do next; returns a future, so the answer goes when all have asked."""
    return _desks[0].ask(actor, states)


def learn(plan: Plan) -> None:
    learner = Learner()
    _desks[:] = [Desk(learner.choose)]
    print("Two actors play, the learner answers and learns:")
    history = []
    for number in range(1, plan.num_games + 1):
        futures = [
            rpc.rpc_async(name, play, args=(plan.num_moves,), timeout=0)
            for name in ACTORS
        ]
        history.append(learner.learn([future.wait() for future in futures]))
        note = f"poles stand for {history[-1]:.0f} moves"
        show_progress(number, plan.num_games, note)
    print(
        f"    {_desks[0].num_batches} batches, each for {len(ACTORS) * NUM_POLES} poles"
    )
    mean = sum(history[-5:]) / len(history[-5:])
    check(mean >= plan.threshold, f"{mean:.0f} moves on average in the last games")

    print("The same games in one process:")
    alone, history_alone = learn_alone(plan)
    same = history == history_alone and all(
        map(torch.equal, learner.network.parameters(), alone.network.parameters())
    )
    check(same, "the same games, and the same network, to the last bit")


def learn_alone(plan: Plan) -> tuple[Learner, list[float]]:
    """What they are compared with."""
    learner = Learner()
    players = [Player(number) for number in range(len(ACTORS))]
    history = []
    for _ in range(plan.num_games):
        states = [player.begin() for player in players]
        for _ in range(plan.num_moves):
            chances = learner.choose(states)
            states = [
                player.go_on(one) for player, one in zip(players, chances, strict=True)
            ]
        history.append(learner.learn([player.end() for player in players]))
    return learner, history


# ------------------------------------------------------------------------------- the rest


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
    parser.add_argument("--short", action="store_true", help="a few games only")
    plan = SHORT if parser.parse_args().short else FULL
    launch.main({"learner": learn}, ROLES, (plan,), timeout=LIMIT_S)


if __name__ == "__main__":
    main()
