"""Messages between processes of one server, over a socket that stays open as long as both live.

Each message has its length, its number and a checksum before it. So what arrives is what was sent, in order and whole,
or an error; and the end of either process is noticed by the other at once.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import zlib

HEAD = struct.Struct("!QII")  # bytes of the body, number of the message modulo 2**32, CRC-32 of the body


class ChannelError(ConnectionError):
    """A message was lost or damaged on its way, so the two ends no longer agree."""


class Channel:
    """One end. Any thread may send; one thread receives. `most`: bytes of a message that is taken; None: any number."""

    def __init__(self, end: socket.socket, most: int | None = None):
        self.most = most
        self._socket, self._file = end, end.makefile("rb", 2**18)
        self._sent = self._received = 0
        self._sending = threading.Lock()

    def send(self, body: bytes) -> None:
        """Send a message; waits while the other end has much to read. **Raises:** `OSError` if it is gone."""
        with self._sending:
            head = HEAD.pack(len(body), self._sent % 2**32, zlib.crc32(body))
            self._socket.sendall(head + body)
            self._sent += 1

    def receive(self) -> bytes:
        """The next message. **Raises:** `EOFError` once the other end is gone, `OSError`, `ChannelError`."""
        size, number, checksum = HEAD.unpack(self._read(HEAD.size))
        if number != self._received % 2**32:
            raise ChannelError(f"message {number} came where {self._received % 2**32} was due")
        if self.most is not None and size > self.most:
            raise ChannelError(f"a message of {size} bytes was announced, at most {self.most} are taken")
        body = self._read(size)
        if zlib.crc32(body) != checksum:
            raise ChannelError(f"message {number} was damaged: its checksum differs")
        self._received += 1
        return body

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the other process is gone")
        return data

    def close(self) -> None:
        """End the connection; whoever waits in `receive`, here or there, is woken with `EOFError`."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()  # its file keeps the descriptor until the reader is done with it
