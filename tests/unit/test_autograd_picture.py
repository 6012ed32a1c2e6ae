"""Pictures of graphs: where things go, and that the SVG is well-formed."""

from __future__ import annotations

from xml.etree import ElementTree

from gradwire.autograd._outline import Block, Event, MessageId, Part
from gradwire.autograd._picture import (
    describe_operations,
    has_messages,
    order_lanes,
    place,
    render,
)

TENSORS = (((2, 3), "float32"),)
NONE = Block()
SVG = "{http://www.w3.org/2000/svg}"


def send(number: int, me: int, to: int, *after: int, block: Block = NONE) -> Event:
    message = MessageId(7, 1, me, number)
    return Event(message, True, to, "", TENSORS, block, after)


def recv(number: int, sender: int, *after: int, function: str = "f") -> Event:
    message = MessageId(7, 1, sender, number)
    return Event(message, False, sender, function, TENSORS, NONE, after)


def call_and_reply() -> dict[int, Part]:
    return {
        0: Part("a", (send(0, 0, 1), recv(0, 1, 0)), Block((("Sum", 1),))),
        1: Part("b", (recv(0, 0), send(0, 1, 0, 0))),
    }


def rows_of(parts: dict[int, Part]) -> list[tuple[int, int, int, int]]:
    arrows = place(parts, order_lanes(parts))
    return [(a.sender, a.receiver, a.send_row, a.recv_row) for a in arrows]


def test_reply_is_below_its_request():
    assert rows_of(call_and_reply()) == [(0, 1, 0, 0), (1, 0, 1, 1)]


def test_who_talks_to_all_is_in_the_middle():
    parts = {
        0: Part("a", (recv(0, 1), recv(0, 2, 0))),
        1: Part("b", (send(0, 1, 0),)),
        2: Part("c", (send(0, 2, 0),)),
    }

    assert order_lanes(parts) == [1, 0, 2]


def test_arrow_over_a_lane_leaves_that_lane_no_event_in_its_row():
    parts = {
        0: Part("a", (send(0, 0, 1), send(1, 0, 2, 0))),
        1: Part("b", (recv(0, 0), send(0, 1, 2, 0))),
        2: Part("c", (recv(0, 1), recv(1, 0, 0))),
    }
    lanes = [0, 1, 2]

    arrows = place(parts, lanes)

    rows = [arrow.recv_row for arrow in arrows]
    assert len(set(rows)) == 3


def test_messages_that_overtake_each_other_cross():
    parts = {
        0: Part("a", (send(0, 0, 1), send(1, 0, 1, 0))),
        1: Part("b", (recv(1, 0), recv(0, 0, 0))),
    }

    first, second = sorted(place(parts, [0, 1]), key=lambda arrow: arrow.send_row)

    assert first.send_row < second.send_row
    assert first.recv_row > second.recv_row


def test_message_of_which_only_one_end_is_known_is_drawn():
    parts = {0: Part("a", (recv(0, 1),)), 1: Part("b", ())}

    assert rows_of(parts) == [(1, 0, 0, 0)]
    assert not has_messages(parts)
    assert has_messages(call_and_reply())


def test_more_workers_than_can_be_sorted_stay_in_the_order_of_ranks():
    parts = {rank: Part(str(rank), (send(0, rank, 0),)) for rank in range(9, 0, -1)}
    parts[0] = Part("0", tuple(recv(0, rank) for rank in range(1, 10)))

    assert order_lanes(parts) == list(range(10))
    assert len(place(parts, order_lanes(parts))) == 9


def test_picture_is_well_formed_and_says_what_is_in_the_graph():
    parts = call_and_reply()
    block = Block((("Addmm", 2), ("Tanh", 1)), 4, 1234)
    parts[1] = Part("b<&>", (recv(0, 0), send(0, 1, 0, 0, block=block)))

    root = ElementTree.fromstring(render(parts, "A & B"))

    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "A & B" in texts
    assert {"a", "b<&>"} < set(texts)
    assert "2 Addmm, Tanh" in texts
    assert "4 leaves, 1,234 numbers" in texts
    assert texts.count("2\u00d73 float32") == texts.count("gradient") == 2


def test_operations_that_do_not_fit_are_counted():
    block = Block((("Addmm", 12), ("NativeLayerNorm", 3), ("Softmax", 2), ("Add", 9)))

    lines = describe_operations(block, 18)

    assert all(len(line) <= 18 for line in lines)
    assert lines == ["12 Addmm", "3 NativeLayer, +11"]
    assert describe_operations(Block(), 18) == []
