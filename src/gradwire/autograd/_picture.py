"""From the parts of a graph to an SVG picture; pure.

Each worker is a lane, from top to bottom in the order of events. A message has a row of
its own in all lanes that its arrow crosses, so no two arrows meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

from gradwire.autograd._outline import Block, Event, MessageId, Part

__all__ = [
    "Arrow",
    "describe_operations",
    "has_messages",
    "order_lanes",
    "place",
    "render",
]

_MAX_SORTED = 7  # lanes; more of them are left in the order of ranks
_MAX_LINES = 2  # for the operations of a block


@dataclass
class Arrow:
    """A message in the picture; both ends are in the same row, if that is possible."""

    sender: int
    receiver: int
    function: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    block: Block
    send_row: int = 0
    recv_row: int = 0


# ------------------------------------------------------------------------ where things go


class _End(NamedTuple):
    rank: int
    number: int  # of the event in the part


class _Message(NamedTuple):
    arrow: Arrow
    send: _End | None  # None: the worker has not told
    recv: _End | None


def has_messages(parts: Mapping[int, Part]) -> bool:
    """Whether there is a message of which both ends are there."""
    return any(m.send and m.recv for m in _messages_of(parts))


def order_lanes(parts: Mapping[int, Part]) -> list[int]:
    """An order of the workers in which arrows are short."""
    ranks = sorted(parts)
    if len(ranks) > _MAX_SORTED:
        return ranks
    arrows = [message.arrow for message in _messages_of(parts)]

    def length(order: Iterable[int]) -> int:
        at = {rank: lane for lane, rank in enumerate(order)}
        return sum(abs(at[arrow.sender] - at[arrow.receiver]) for arrow in arrows)

    return list(min(itertools.permutations(ranks), key=length))


def place(parts: Mapping[int, Part], lanes: Sequence[int]) -> list[Arrow]:
    """Gives every message a row, below all that came before it."""
    grid = _Grid(parts, lanes)
    waiting = list(_messages_of(parts))
    arrows = [message.arrow for message in waiting]
    while waiting:
        for message in waiting:
            if grid.is_ready(message.send) and grid.is_ready(message.recv):
                grid.put(message)
                waiting.remove(message)
                break
        else:
            # Messages have overtaken each other: one leaves before it can arrive.
            grid.put_send(next(m for m in waiting if grid.can_leave(m)))
    return sorted(arrows, key=lambda arrow: (arrow.recv_row, arrow.send_row))


class _Grid:
    """Which row of each lane is free, and where the ends of messages are."""

    def __init__(self, parts: Mapping[int, Part], lanes: Sequence[int]) -> None:
        self._parts = parts
        self._lanes = {rank: lane for lane, rank in enumerate(lanes)}
        self._free = [0] * len(lanes)
        self._rows: dict[_End | None, int] = {}

    def is_ready(self, end: _End | None) -> bool:
        """Whether all that came before it has its place."""
        if end is None:
            return True
        after = self._parts[end.rank].events[end.number].after
        return all(_End(end.rank, number) in self._rows for number in after)

    def can_leave(self, message: _Message) -> bool:
        return message.send not in self._rows and self.is_ready(message.send)

    def put(self, message: _Message) -> None:
        arrow = message.arrow
        arrow.recv_row = self._take(arrow.sender, arrow.receiver)
        self._rows[message.recv] = arrow.recv_row
        if message.send is None or message.send not in self._rows:
            arrow.send_row = arrow.recv_row
            self._rows[message.send] = arrow.send_row

    def put_send(self, message: _Message) -> None:
        sender = message.arrow.sender
        self._rows[message.send] = message.arrow.send_row = self._take(sender, sender)

    def _take(self, one: int, other: int) -> int:
        ends = sorted((self._lanes[one], self._lanes[other]))
        span = range(ends[0], ends[1] + 1)
        row = max(self._free[lane] for lane in span)
        for lane in span:
            self._free[lane] = row + 1
        return row


def _messages_of(parts: Mapping[int, Part]) -> Iterator[_Message]:
    sends: dict[MessageId, tuple[_End, Event]] = {}
    recvs: dict[MessageId, tuple[_End, Event]] = {}
    for rank in sorted(parts):
        for number, event in enumerate(parts[rank].events):
            (sends if event.is_send else recvs)[event.message] = (
                _End(rank, number),
                event,
            )
    for message in sends | recvs:
        send, sent = sends.get(message, (None, None))
        recv, received = recvs.get(message, (None, None))
        known = received or sent
        if known is None or {message.sender, known.peer} - set(parts):
            continue
        receiver = known.peer if recv is None else recv.rank
        arrow = Arrow(
            message.sender,
            receiver,
            known.function,
            known.tensors,
            Block() if sent is None else sent.block,
        )
        yield _Message(arrow, send, recv)


# ------------------------------------------------------------------------------- drawing

_LANE, _GAP, _ROW = 200, 200, 108
_LEFT, _TOP, _HEAD = 32, 88, 44
_BLOCK, _BLOCK_CHARS = 180, 28  # its width, and what fits in
_FORWARD, _BACKWARD = 78, 90  # how far down in a row the arrows are
_COLOURS = ("#2563eb", "#059669", "#d97706", "#7c3aed", "#db2777", "#0891b2", "#65a30d")
_INK, _FAINT, _GRADIENT = "#1f2937", "#6b7280", "#dc2626"
_TIMES, _DOTS = "\u00d7", "\u2026"

_STYLE = f"""
text {{ font-family: system-ui, "DejaVu Sans", Helvetica, Arial, sans-serif; fill: {_INK} }}
.title {{ font-size: 20px; font-weight: 600 }}
.worker {{ font-size: 15px; font-weight: 600; fill: white; text-anchor: middle }}
.label {{ font-size: 12px; font-weight: 600; text-anchor: middle }}
.small {{ font-size: 11px; text-anchor: middle }}
.faint {{ font-size: 12px; fill: {_FAINT} }}
.grad {{ font-size: 11px; fill: {_GRADIENT}; text-anchor: middle }}
.forward {{ stroke-width: 2; fill: none }}
.back {{ stroke: {_GRADIENT}; stroke-width: 1.5; stroke-dasharray: 5 4; fill: none }}
.life {{ stroke-width: 2; opacity: 0.35 }}
"""


def render(parts: Mapping[int, Part], title: str = "") -> str:
    """The picture, as the text of an SVG file."""
    lanes = order_lanes(parts)
    return "".join(_Canvas(parts, lanes, place(parts, lanes)).draw(title))


class _Canvas:
    def __init__(
        self, parts: Mapping[int, Part], lanes: Sequence[int], arrows: list[Arrow]
    ) -> None:
        self._parts = parts
        self._lanes = {rank: lane for lane, rank in enumerate(lanes)}
        self._arrows = arrows
        self._num_rows = 1 + max((arrow.recv_row for arrow in arrows), default=0)
        self._bottom = _TOP + _HEAD + self._num_rows * _ROW + 84

    def draw(self, title: str) -> Iterator[str]:
        width = 2 * _LEFT + len(self._lanes) * (_LANE + _GAP) - _GAP
        width, height = max(width, 660), self._bottom + 64
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">\n<style>{_STYLE}</style>\n<defs>'
        )
        for rank in self._lanes:
            yield _arrow_head(f"to{rank}", self._colour(rank))
        yield _arrow_head("back", _GRADIENT)
        yield f'</defs>\n<rect width="{width}" height="{height}" fill="white"/>\n'
        yield _text("title", _LEFT, 40, title or "One graph on several workers")
        yield _text(
            "faint",
            _LEFT,
            62,
            f"{_count(len(self._lanes), 'worker')}, {_count(len(self._arrows), 'message')} "
            "with tensors that get gradients; time runs downwards",
        )
        for rank in self._lanes:
            yield from self._lane(rank)
        for arrow in self._arrows:
            yield from self._arrow(arrow)
        for rank, part in self._parts.items():
            if part.result is not None:
                yield from self._block(rank, self._bottom - 12, part.result, "result")
        yield from self._legend()
        yield "</svg>\n"

    def _lane(self, rank: int) -> Iterator[str]:
        x, colour = self._left(rank), self._colour(rank)
        middle, height = x + _LANE // 2, self._bottom - _TOP
        yield (
            f'<rect x="{x}" y="{_TOP}" width="{_LANE}" height="{height}" rx="12" '
            f'fill="{colour}" fill-opacity="0.06" stroke="{colour}" stroke-width="1.5"/>\n'
            f'<path d="M{x} {_TOP + 34}v-22q0 -12 12 -12h{_LANE - 24}q12 0 12 12v22z" '
            f'fill="{colour}"/>\n'
        )
        yield _text("worker", middle, _TOP + 23, self._parts[rank].worker)
        rows = [
            row
            for arrow in self._arrows
            for end, row in (
                (arrow.sender, arrow.send_row),
                (arrow.receiver, arrow.recv_row),
            )
            if end == rank
        ]
        end = self._y(max(rows)) + _FORWARD if rows else _TOP + _HEAD
        if self._parts[rank].result is not None:
            end = self._bottom - 54
        yield (
            f'<line class="life" x1="{middle}" y1="{_TOP + 34}" x2="{middle}" y2="{end}" '
            f'stroke="{colour}"/>\n'
        )

    def _arrow(self, arrow: Arrow) -> Iterator[str]:
        colour = self._colour(arrow.sender)
        if arrow.sender == arrow.receiver:
            yield from self._own_arrow(arrow)
            return
        goes_right = self._lanes[arrow.sender] < self._lanes[arrow.receiver]
        start = self._left(arrow.sender) + (_LANE if goes_right else 0)
        end = self._left(arrow.receiver) + (0 if goes_right else _LANE)
        step = 1 if goes_right else -1
        y1, y2 = self._y(arrow.send_row), self._y(arrow.recv_row)
        for rank, x, y in ((arrow.sender, start, y1), (arrow.receiver, end, y2)):
            middle = self._left(rank) + _LANE // 2
            yield (
                f'<line class="life" x1="{middle}" y1="{y + _FORWARD}" x2="{x}" '
                f'y2="{y + _FORWARD}" stroke="{self._colour(rank)}"/>\n'
                f'<circle cx="{x}" cy="{y + _FORWARD}" r="4" fill="{colour}"/>\n'
            )
        yield (
            f'<line class="forward" x1="{start}" y1="{y1 + _FORWARD}" '
            f'x2="{end - 6 * step}" y2="{y2 + _FORWARD}" stroke="{colour}" '
            f'marker-end="url(#to{arrow.sender})"/>\n'
            f'<line class="back" x1="{end}" y1="{y2 + _BACKWARD}" '
            f'x2="{start + 6 * step}" y2="{y1 + _BACKWARD}" marker-end="url(#back)"/>\n'
        )
        # In the gap beside the sender, which no other arrow crosses in this row.
        x = start + step * _GAP // 2
        y = y1 + (y2 - y1) * (x - start) // (end - start)
        yield _text("label", x, y + _FORWARD - 24, _short(arrow.function))
        yield _text("small", x, y + _FORWARD - 8, _describe_tensors(arrow))
        yield _text("grad", x, y + _BACKWARD + 14, "gradient")
        yield from self._block(arrow.sender, y1 + _FORWARD - 14, arrow.block)

    def _own_arrow(self, arrow: Arrow) -> Iterator[str]:
        """A call to oneself: a note in the lane."""
        middle = self._left(arrow.sender) + _LANE // 2
        y = self._y(arrow.send_row)
        yield from self._block(arrow.sender, y + _FORWARD - 14, arrow.block)
        yield (
            f'<rect x="{middle - _BLOCK // 2}" y="{y + _FORWARD - 10}" width="{_BLOCK}" '
            f'height="24" rx="12" fill="white" stroke="{self._colour(arrow.sender)}"/>\n'
        )
        text = f"to itself: {_describe_tensors(arrow)}"
        yield _text("small", middle, y + _FORWARD + 6, text)

    def _block(self, rank: int, y: int, block: Block, name: str = "") -> Iterator[str]:
        """What was computed, in a box whose lower edge is at ``y``."""
        lines = [("label", name)] if name else []
        lines += [("small", line) for line in describe_operations(block, _BLOCK_CHARS)]
        if block.num_leaves:
            leaves = _count(block.num_leaves, "leaf", "leaves")
            lines.append(("small", f"{leaves}, {block.num_values:,} numbers"))
        if not lines:
            return
        colour = self._colour(rank)
        middle = self._left(rank) + _LANE // 2
        height = 12 + 15 * len(lines)
        shape = (
            f'x="{middle - _BLOCK // 2}" y="{y - height}" width="{_BLOCK}" '
            f'height="{height}" rx="6"'
        )
        yield f'<rect {shape} fill="white"/>\n'  # over the line through the lane
        yield (
            f'<rect {shape} fill="{colour}" fill-opacity="{0.18 if name else 0}" '
            f'stroke="{colour}"/>\n'
        )
        for number, (style, line) in enumerate(lines):
            yield _text(style, middle, y - height + 17 + 15 * number, line)

    def _legend(self) -> Iterator[str]:
        y = self._bottom + 32
        yield (
            f'<line class="forward" x1="{_LEFT}" y1="{y}" x2="{_LEFT + 44}" y2="{y}" '
            f'stroke="{_FAINT}"/>\n'
        )
        yield _text(
            "faint", _LEFT + 54, y + 4, "forward: tensors, in the sender's colour"
        )
        x = _LEFT + 330
        yield f'<line class="back" x1="{x}" y1="{y}" x2="{x + 44}" y2="{y}"/>\n'
        yield _text("faint", x + 54, y + 4, "backward: their gradients")

    def _left(self, rank: int) -> int:
        return _LEFT + self._lanes[rank] * (_LANE + _GAP)

    def _y(self, row: int) -> int:
        return _TOP + _HEAD + row * _ROW

    def _colour(self, rank: int) -> str:
        return _COLOURS[sorted(self._lanes).index(rank) % len(_COLOURS)]


# ---------------------------------------------------------------------------------- texts


def describe_operations(block: Block, width: int) -> list[str]:
    """The operations of a block in a few lines; the least frequent ones only counted."""
    lines = [""]
    kinds = list(block.operations)
    while kinds:
        name, count = kinds[0]
        text = f"{count} {name}" if count > 1 else name
        text = text if len(text) <= width else text[: width - 1] + _DOTS
        joined = f"{lines[-1]}, {text}" if lines[-1] else text
        if len(joined) <= width:
            lines[-1] = joined
        elif len(lines) < _MAX_LINES:
            lines.append(text)
        else:
            more = f", +{sum(count for _, count in kinds)}"
            lines[-1] = lines[-1][: width - len(more)] + more
            break
        kinds.pop(0)
    return [line for line in lines if line]


def _describe_tensors(arrow: Arrow) -> str:
    texts = [
        f"{_TIMES.join(map(str, shape)) or 'scalar'} {dtype}"
        for shape, dtype in arrow.tensors
    ]
    more = f", +{len(texts) - 1}" if len(texts) > 1 else ""
    return "".join(texts[:1]) + more


def _short(function: str) -> str:
    """The name of a function, without its module."""
    return function.rpartition(":")[2].rpartition(".")[2]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _text(style: str, x: int, y: int, text: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{escape(text)}</text>\n'


def _arrow_head(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
    )
