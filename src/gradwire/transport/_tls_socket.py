"""A TLS connection that can be used like a plain, non-blocking socket.

`StreamConnection` moves frames over it as over any other socket. What differs:

1. OpenSSL does not let two threads into one connection, not even one that reads and one
   that writes. Each call into it is short, as nothing blocks, and made under a lock.
2. Bytes come in records of at most 16 KiB, and one call moves one record. So here one
   call moves as many as there are.
3. A record that was read only in part stays inside of OpenSSL, where no poller sees it.
   `has_more` tells; whoever stops reading must have emptied it before.
4. A read may have to write (the peer wants new keys). Then `is_stuck` is set until
   `resume` has written.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

__all__ = ["TlsSocket"]

_RECORD_BYTES = 16 << 10
_TURN_BYTES = 256 << 10  # how much is read before somebody else may write


class TlsSocket:
    """What `StreamConnection` needs of a socket, after the TLS handshake.

    Args:
        sock: The socket, which `close` closes.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        # One thread at a time inside of OpenSSL. Also guards all below.
        self._lock = threading.Lock()
        self._is_over = False  # closed on our side
        self._is_broken = False  # nothing can be written any more
        self._failure: OSError | None = None  # what the next read raises
        self.has_ended = False  # the peer will send nothing more
        self.is_stuck = False
        self.only_buffered = False
        """Set by the reader: read what is inside of OpenSSL, and nothing beyond."""

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """Does nothing: it never blocks."""

    @property
    def has_more(self) -> bool:
        """Whether there are bytes to read that no poller would report."""
        with self._lock:
            return not self._is_over and self._sock.pending() > 0

    def send(self, data: bytes | memoryview) -> int:
        """Writes as much as the socket takes.

        If it takes nothing, the next call must begin with the same bytes, be they
        elsewhere in memory: a part of their record may be on its way.
        """
        sent, size = 0, len(data)
        while sent < size:
            rest = data if size <= _RECORD_BYTES else _piece(data, sent)
            with self._lock:
                if self._is_over or self._is_broken:
                    # A second failure would keep OpenSSL from reading what has come.
                    raise BrokenPipeError("the connection was closed")
                try:
                    sent += self._sock.send(rest)
                except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    break
                except OSError:
                    self._is_broken = True
                    raise
        if not sent:
            raise BlockingIOError
        return sent

    def recv_into(self, target: memoryview) -> int:
        """Reads what is there; 0 at the end.

        Returns less than fits only if `has_more` is false then.
        """
        got, size = 0, len(target)
        while got < size:
            with self._lock:
                count, may_be_more = self._read_some(target[got:], is_first=not got)
            got += count
            if not may_be_more:
                break
        if not got and not self.has_ended:
            raise BlockingIOError
        return got

    def _read_some(self, target: memoryview, *, is_first: bool) -> tuple[int, bool]:
        """Reads some records; the caller has the lock.

        Returns:
            How many bytes came, and whether to go on.
        """
        if self._is_over:
            self.has_ended = True
        if self.has_ended:
            return 0, False
        if is_first and self._failure is not None:
            raise self._failure
        got, size = 0, min(len(target), _TURN_BYTES)
        read_into, pending = self._sock.recv_into, self._sock.pending
        try:
            while got < size:
                if self.only_buffered and not pending():
                    return got, False
                count = read_into(target[got:size], size - got)
                if not count:
                    self.has_ended = True
                    return got, False
                got += count
                # Most often a record that is not full was the last one: asking for more
                # would cost a system call, and the poller will tell.
                if count < _RECORD_BYTES and not pending():
                    return got, False
        except ssl.SSLWantReadError:
            return got, False
        except ssl.SSLWantWriteError:
            self.is_stuck = True
            return got, False
        except OSError as error:
            if is_first and not got:
                raise
            self._failure = error  # after the bytes that came before it
            return got, False
        return got, True

    def resume(self) -> bool:
        """Writes what a read has to write; False if the socket does not take it yet."""
        with self._lock:
            if not self._is_over:
                try:
                    self._sock.do_handshake()
                except ssl.SSLWantWriteError:
                    return False
                except OSError:
                    pass  # the reader finds it
            self.is_stuck = False
            return True

    def shutdown(self, how: int) -> None:
        """Says goodbye, as far as that is possible at once, and ends both directions."""
        with self._lock:
            if not self._is_broken and not self._is_over:
                # From here on nothing may go through the socket: without its TLS part it
                # would let plain bytes pass.
                self._is_over = True
                say_goodbye(self._sock)
            socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Closes the descriptor."""
        with self._lock:
            self._is_over = True
            self._sock.close()


def say_goodbye(sock: ssl.SSLSocket) -> None:
    """Tells the peer that nothing more comes; best effort, never blocks or raises."""
    with contextlib.suppress(OSError, ValueError):
        sock.unwrap()


def _piece(data: bytes | memoryview, start: int) -> memoryview:
    return memoryview(data)[start : start + _TURN_BYTES]
