"""What every transport must do, as tests that any backend can run.

A backend subclasses `TransportSuite` in its own test files and says which transport is
meant; pytest does the rest:

    class TestMyTransport(TransportSuite):
        def make_transport(self) -> Transport:
            return MyTransport()

The suite uses nothing but the interface in ``gradwire.transport.base``. It drives both
ends from one thread, which also shows that nothing in the interface blocks.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gradwire.errors import ClosedError, LocalProtocolError, RemoteProtocolError
from gradwire.testing._channel_suite import ChannelSuite
from gradwire.testing._driving import (
    IN_MEMORY,
    IN_STREAM,
    LIMIT_S,
    LOOK_S,
    MIB,
    Exchange,
    both_ways,
    bytes_of,
    fill,
    pattern,
    raw_buffer,
    receive_frames,
    wait_readable,
)
from gradwire.transport.base import Connection, Frame, Limits

__all__ = [
    "Exchange",
    "TransportSuite",
    "bytes_of",
    "fill",
    "raw_buffer",
    "receive_frames",
    "wait_readable",
]


class TransportSuite(ChannelSuite):
    """See the module's text. One instance runs one test."""

    # ------------------------------------------------------------------- heads

    @pytest.mark.parametrize(
        "size",
        [0, 1, 7, 4095, *(MIB // 4 + n for n in (-9, -8, 0, 1)), MIB + 3, 5 * MIB],
    )
    def test_head_of_any_size_arrives(self, size: int) -> None:
        """Empty, around common sizes of read buffers, and larger than any."""
        client, server = self.pair()
        head = random.Random(size).randbytes(size)

        client.send(head)
        client.send(b"next")

        frames = receive_frames(server, 2, client)
        assert frames == [Frame(head, []), Frame(b"next", [])]

    def test_frames_go_both_ways(self) -> None:
        """A connection has no direction."""
        client, server = self.pair()

        client.send(b"there")
        server.send(b"back")

        assert receive_frames(server, 1)[0].head == b"there"
        assert receive_frames(client, 1)[0].head == b"back"

    def test_receive_returns_nothing_if_there_is_nothing(self) -> None:
        """And says that it has to be polled for."""
        _, server = self.pair()

        assert server.receive() == []
        assert server.is_drained
        assert server.end is None

    def test_many_small_frames_arrive_in_order(self) -> None:
        """Many of them in one read."""
        client, server = self.pair()
        for number in range(5000):
            client.send(b"%d" % number, hold=True)

        frames = receive_frames(server, 5000, client)

        assert [int(frame.head) for frame in frames] == list(range(5000))

    def test_receive_in_small_steps_loses_nothing(self) -> None:
        """One call of receive per look, as the agent does it."""
        client, server = self.pair()
        heads = [b"x" * (n % 700) for n in range(1000)]
        for head in heads:
            client.send(head, hold=True)
        client.flush()

        found: list[bytes] = []
        deadline = time.monotonic() + LIMIT_S
        while len(found) < len(heads) and time.monotonic() < deadline:
            found += [frame.head for frame in server.receive()]
            client.flush()
            if server.is_drained and len(found) < len(heads):
                wait_readable(server, timeout_s=LOOK_S)

        assert found == heads

    # ----------------------------------------------------------------- buffers

    @both_ways
    @pytest.mark.parametrize("size", [0, 1, 100, 65_537, 3 * MIB + 1])
    def test_buffer_of_any_size_arrives(self, size: int, limits: Limits) -> None:
        """With the head that it was sent with."""
        client, server = self.pair(limits)
        tensor = pattern(size)

        client.send(b"head", [raw_buffer(tensor)])

        (frame,) = receive_frames(server, 1, client)
        assert frame.head == b"head"
        assert [bytes_of(b) for b in frame.buffers] == [bytes(tensor.numpy())]

    @both_ways
    def test_many_buffers_arrive_in_order(self, limits: Limits) -> None:
        """Empty ones among them; more of them than one system call takes."""
        client, server = self.pair(limits)
        tensors = [pattern(n % 7 * 100, seed=n) for n in range(300)]

        client.send(b"", [raw_buffer(tensor) for tensor in tensors])

        (frame,) = receive_frames(server, 1, client)
        assert [bytes_of(b) for b in frame.buffers] == [
            bytes(tensor.numpy()) for tensor in tensors
        ]

    @both_ways
    def test_long_head_and_buffers_arrive(self, limits: Limits) -> None:
        """A head that is larger than read buffers, with buffers behind it."""
        client, server = self.pair(limits)
        head = random.Random(1).randbytes(MIB)
        tensor = pattern(MIB)

        client.send(head, [raw_buffer(tensor), raw_buffer(tensor[:10])])
        client.send(b"next")

        frames = receive_frames(server, 2, client)
        assert frames[0].head == head
        assert [b.nbytes() for b in frames[0].buffers] == [MIB, 10]
        assert bytes_of(frames[0].buffers[0]) == bytes(tensor.numpy())
        assert frames[1] == Frame(b"next", [])

    @both_ways
    def test_mixed_frames_arrive_in_order(self, limits: Limits) -> None:
        """With and without buffers, held or not."""
        client, server = self.pair(limits)
        choice = random.Random(2)
        tensors = []
        for number in range(200):
            sizes = [choice.choice([0, 5, 70_000]) for _ in range(choice.randrange(3))]
            tensors.append([pattern(size, seed=number) for size in sizes])
            client.send(
                b"%d" % number,
                [raw_buffer(tensor) for tensor in tensors[-1]],
                hold=choice.random() < 0.5,
            )

        frames = receive_frames(server, 200, client)

        assert [int(frame.head) for frame in frames] == list(range(200))
        for frame, sent in zip(frames, tensors, strict=True):
            assert [bytes_of(b) for b in frame.buffers] == [
                bytes(tensor.numpy()) for tensor in sent
            ]

    @both_ways
    def test_received_buffer_is_independent_of_the_sender(self, limits: Limits) -> None:
        """Either side may write to its own afterwards."""
        client, server = self.pair(limits)
        tensor = torch.full((70_000,), 1, dtype=torch.uint8)
        ticket = client.send(b"", [raw_buffer(tensor)])
        (frame,) = receive_frames(server, 1, client)
        assert ticket is None or ticket.wait(LIMIT_S)

        tensor.fill_(2)
        received = torch.empty(0, dtype=torch.uint8)
        received.set_(frame.buffers[0])
        assert bool((received == 1).all())
        received.fill_(3)

        assert bool((tensor == 2).all())

    @both_ways
    def test_received_buffers_do_not_share_memory(self, limits: Limits) -> None:
        """Also if the same memory was sent twice."""
        client, server = self.pair(limits)
        tensor = pattern(70_000)

        client.send(b"", [raw_buffer(tensor), raw_buffer(tensor)])
        client.send(b"", [raw_buffer(tensor)])

        frames = receive_frames(server, 2, client)
        storages = [b for frame in frames for b in frame.buffers]
        assert len({storage.data_ptr() for storage in storages}) == 3
        assert all(bytes_of(s) == bytes(tensor.numpy()) for s in storages)

    @both_ways
    def test_received_buffer_outlives_the_connection(self, limits: Limits) -> None:
        """A tensor belongs to the program, whatever becomes of the peer."""
        client, server = self.pair(limits)
        tensor = pattern(70_000)
        client.send(b"", [raw_buffer(tensor)])
        (frame,) = receive_frames(server, 1, client)

        client.close()
        server.close()

        assert bytes_of(frame.buffers[0]) == bytes(tensor.numpy())

    @both_ways
    def test_large_buffers_both_ways_at_once(self, limits: Limits) -> None:
        """No side has to read before it may send."""
        client, server = self.pair(limits)
        tensors = [pattern(8 * MIB, seed=seed) for seed in range(4)]
        for there, back in (tensors[:2], tensors[2:]):
            client.send(b"there", [raw_buffer(there)])
            server.send(b"back", [raw_buffer(back)])

        exchange = Exchange(client, server)
        exchange.until(lambda: all(len(frames) == 2 for frames in exchange.frames))

        found = [f.buffers[0] for frames in exchange.frames for f in frames]
        expected = [tensors[1], tensors[3], tensors[0], tensors[2]]
        assert [bytes_of(b) for b in found] == [bytes(t.numpy()) for t in expected]

    @both_ways
    def test_threads_may_send_at_once(self, limits: Limits) -> None:
        """Frames stay whole, and those of one thread stay in order."""
        client, server = self.pair(limits)
        tensors = [pattern(3000, seed=thread) for thread in range(4)]

        def send(thread: int) -> None:
            for number in range(150):
                buffers = [raw_buffer(tensors[thread])] if number % 2 else []
                client.send(b"%d %d" % (thread, number), buffers)

        threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        frames = receive_frames(server, 600, client)
        for thread in threads:
            thread.join(LIMIT_S)

        order: list[list[int]] = [[] for _ in tensors]
        for frame in frames:
            sender, number = (int(part) for part in frame.head.split())
            order[sender].append(number)
            assert len(frame.buffers) == number % 2
            for buffer in frame.buffers:
                assert bytes_of(buffer) == bytes(tensors[sender].numpy())
        assert order == [list(range(150))] * 4

    # ---------------------------------------------------- holding, flushing, tickets

    def test_held_frames_wait_for_flush(self) -> None:
        """They are queued, and go out together."""
        client, server = self.pair()
        for head in (b"1", b"2", b"3"):
            client.send(head, hold=True)
        assert client.num_queued > 0
        assert server.receive() == []

        assert client.flush()

        assert client.num_queued == 0
        heads = [frame.head for frame in receive_frames(server, 3)]
        assert heads == [b"1", b"2", b"3"]

    def test_flush_tells_that_something_is_left(self) -> None:
        """A full connection never blocks the sender."""
        client, server = self.pair(IN_STREAM)
        count, _ = fill(client, pattern(4 * MIB))

        assert not client.flush()
        assert client.num_queued > 0

        receive_frames(server, count, client)
        assert client.flush()
        assert client.num_queued == 0

    def test_ticket_ends_when_the_memory_is_free(self) -> None:
        """Not before the peer reads, and then for certain."""
        client, server = self.pair(IN_STREAM)
        count, ticket = fill(client, pattern(4 * MIB))
        assert not ticket.wait(0.01)

        receive_frames(server, count, client)

        assert ticket.wait(LIMIT_S)
        assert ticket.wait(None)

    def test_detached_memory_may_change(self) -> None:
        """The bytes that were there before arrive."""
        client, server = self.pair(IN_STREAM)
        tensor = pattern(4 * MIB)
        expected = bytes(tensor.numpy())
        count, ticket = fill(client, tensor)

        ticket.detach()
        tensor.zero_()

        frames = receive_frames(server, count, client)
        assert all(bytes_of(frame.buffers[0]) == expected for frame in frames)

    def test_detach_of_finished_ticket_does_nothing(self) -> None:
        """The caller cannot know how far the writing is."""
        client, server = self.pair(IN_STREAM)
        tensor = pattern(100)
        ticket = client.send(b"", [raw_buffer(tensor)])
        receive_frames(server, 1, client)

        if ticket is not None:
            assert ticket.wait(LIMIT_S)
            ticket.detach()
            assert ticket.wait(0.0)

    @both_ways
    def test_memory_is_kept_alive_until_it_is_sent(self, limits: Limits) -> None:
        """And let go afterwards."""
        client, server = self.pair(limits)
        tensor = pattern(24 * MIB)
        expected = bytes(tensor.numpy())
        gone = weakref.ref(tensor)
        client.send(b"", [raw_buffer(tensor)])
        del tensor

        (frame,) = receive_frames(server, 1, client)

        assert bytes_of(frame.buffers[0]) == expected
        assert gone() is None

    def test_close_wakes_whoever_holds_a_ticket(self) -> None:
        """Else a caller would wait for a peer that nobody talks to any more."""
        client, _ = self.pair(IN_STREAM)
        _, ticket = fill(client, pattern(4 * MIB))
        woken: list[bool] = []
        waiter = threading.Thread(target=lambda: woken.append(ticket.wait(LIMIT_S)))
        waiter.start()

        client.close()

        waiter.join(LIMIT_S)
        assert woken == [True]

    def test_loss_of_the_peer_wakes_whoever_holds_a_ticket(self) -> None:
        """As soon as the sender tries to write again."""
        client, server = self.pair(IN_STREAM)
        _, ticket = fill(client, pattern(4 * MIB))

        server.close()
        deadline = time.monotonic() + LIMIT_S
        while not ticket.wait(LOOK_S) and time.monotonic() < deadline:
            client.flush()

        assert ticket.wait(0.0)

    # ------------------------------------------------------------------ limits

    def test_sending_head_over_the_limit_is_refused(self) -> None:
        """The limit is the last size that goes through; the connection lives on."""
        client, server = self.pair(Limits(max_head_bytes=1000))

        with pytest.raises(LocalProtocolError, match="max_head_bytes"):
            client.send(bytes(1001))
        client.send(bytes(1000))

        assert client.num_queued == 0
        assert receive_frames(server, 1) == [Frame(bytes(1000), [])]

    @both_ways
    def test_sending_frame_over_the_limit_is_refused(self, limits: Limits) -> None:
        """Head and buffers count together."""
        limits = Limits(
            max_frame_bytes=100_000,
            shared_memory_min_bytes=limits.shared_memory_min_bytes,
        )
        client, server = self.pair(limits)
        tensor = pattern(99_000)

        with pytest.raises(LocalProtocolError, match="max_frame_bytes"):
            client.send(bytes(1001), [raw_buffer(tensor)])
        client.send(bytes(1000), [raw_buffer(tensor)])

        (frame,) = receive_frames(server, 1, client)
        assert frame.head == bytes(1000)
        assert bytes_of(frame.buffers[0]) == bytes(tensor.numpy())

    def test_frame_limit_holds_without_buffers_too(self) -> None:
        """A whole frame may be nothing but its head."""
        client, _ = self.pair(Limits(max_frame_bytes=1000))

        with pytest.raises(LocalProtocolError, match="max_frame_bytes"):
            client.send(bytes(1001))

    def test_refused_frame_is_not_counted(self) -> None:
        """Nothing of it was sent."""
        client, _ = self.pair(Limits(max_frame_bytes=1000))
        before = client.counters()

        with pytest.raises(LocalProtocolError):
            client.send(b"", [raw_buffer(pattern(1001))])

        assert client.counters() == before

    def test_receiving_head_over_the_limit_is_refused(self) -> None:
        """Each side has limits of its own."""
        client, server = self.pair(Limits(), Limits(max_head_bytes=1000))
        client.send(bytes(1000))
        receive_frames(server, 1, client)

        client.send(bytes(1001))

        with pytest.raises(RemoteProtocolError, match="max_head_bytes"):
            receive_frames(server, 1, client)

    @both_ways
    def test_receiving_frame_over_the_limit_is_refused(self, limits: Limits) -> None:
        """Before memory is taken for it."""
        client, server = self.pair(limits, Limits(max_frame_bytes=100_000))

        client.send(bytes(1001), [raw_buffer(pattern(99_000))])

        with pytest.raises(RemoteProtocolError, match="max_frame_bytes"):
            receive_frames(server, 1, client)

    # --------------------------------------------------------------------- end

    def test_end_is_reported_after_the_last_frame(self) -> None:
        """What was sent before the end arrives."""
        client, server = self.pair()
        for number in range(300):
            client.send(b"%d" % number, hold=True)
        assert client.flush()
        client.close()

        exchange = Exchange(server)
        exchange.until(lambda: server.end is not None)

        assert [int(f.head) for f in exchange.frames[0]] == list(range(300))
        assert server.end
        assert server.is_drained

    def test_end_is_readable(self) -> None:
        """The poller learns of it."""
        client, server = self.pair()

        client.close()

        assert wait_readable(server)

    def test_end_in_the_middle_of_a_frame_is_an_end(self) -> None:
        """Half a frame is never handed out."""
        client, server = self.pair(IN_STREAM)
        count, _ = fill(client, pattern(4 * MIB))
        client.close()

        exchange = Exchange(server)
        exchange.until(lambda: server.end is not None)

        assert len(exchange.frames[0]) < count

    def test_end_is_none_while_the_peer_lives(self) -> None:
        """Also after frames."""
        client, server = self.pair()
        client.send(b"head")

        receive_frames(server, 1)

        assert server.end is None

    def test_close_is_idempotent(self) -> None:
        """Both sides, any number of times."""
        for connection in self.pair():
            connection.close()
            connection.close()

    def test_send_after_close_is_refused(self) -> None:
        """With the error that means: we closed it."""
        client, _ = self.pair()
        client.close()

        with pytest.raises(ClosedError):
            client.send(b"late")
        with pytest.raises(ClosedError):
            client.send(b"late", [raw_buffer(pattern(10))])

    def test_receive_after_close_reports_an_end(self) -> None:
        """A thread that reads while another one closes comes out."""
        client, _ = self.pair()
        client.close()

        assert client.receive() == []
        assert client.end is not None

    def test_sending_to_one_who_is_gone_raises_nothing_else(self) -> None:
        """The reader learns why; senders need not look at system errors."""
        client, server = self.pair()
        server.close()

        for _ in range(20):
            client.send(b"anybody there?", [raw_buffer(pattern(10_000))])
            client.flush()

        exchange = Exchange(client)
        exchange.until(lambda: client.end is not None)
        assert exchange.frames == [[]]

    def test_housekeeping_may_be_called_at_any_time(self) -> None:
        """With something under way, with nothing, and after the end."""
        client, server = self.pair(IN_MEMORY)
        with self._housekeeping_between(client, server):
            client.send(b"1", [raw_buffer(pattern(10_000))])
        with self._housekeeping_between(client, server):
            assert receive_frames(server, 1, client)[0].head == b"1"
        client.send(b"2", [raw_buffer(pattern(10_000))])
        assert receive_frames(server, 1, client)[0].head == b"2"
        client.close()
        server.close()
        with self._housekeeping_between(client, server):
            pass

    @contextmanager
    def _housekeeping_between(self, *connections: Connection) -> Iterator[None]:
        for connection in connections:
            connection.housekeeping(time.monotonic())
        yield
        for connection in connections:
            connection.housekeeping(time.monotonic() + 1000.0)

    # ---------------------------------------------------------------- counters

    def test_counters_of_both_sides_agree(self) -> None:
        """Whatever one has sent, the other has received."""
        client, server = self.pair(IN_STREAM)
        tensor = pattern(50_000)
        for number in range(10):
            client.send(b"x" * number, [raw_buffer(tensor)] if number % 2 else [])
        receive_frames(server, 10, client)

        sent, received = client.counters(), server.counters()

        assert sent["frames_sent"] == received["frames_received"] == 10
        assert sent["bytes_sent"] == received["bytes_received"]
        assert sent["bytes_sent"] >= 5 * tensor.nbytes + sum(range(10))
        assert sent["bytes_received"] == received["bytes_sent"] == 0

    def test_counters_can_be_read_after_close(self) -> None:
        """Debug information may be asked for at any time."""
        client, server = self.pair()
        client.send(b"head")
        receive_frames(server, 1)
        client.close()

        assert client.counters()["frames_sent"] == 1
