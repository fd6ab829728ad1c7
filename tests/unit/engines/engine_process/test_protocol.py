"""Messages between the engine process and a stub, over a real socket pair."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from trtpipe.engines.engine_process.protocol import Connection


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    left, right = socket.socketpair()
    one, other = Connection(left), Connection(right)
    yield one, other
    one.close()
    other.close()


def test_messages_and_their_bytes_arrive_in_order(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    one.send({"type": "step", "text": "é\n"}, b"\x00\x01")
    one.send({"type": "stats"})
    assert other.receive() == ({"type": "step", "text": "é\n"}, b"\x00\x01")
    assert other.receive() == ({"type": "stats"}, b"")


def test_large_messages_from_many_threads_stay_whole(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    blobs = {number: bytes([number]) * 300_000 for number in range(8)}
    threads = [threading.Thread(target=one.send, args=({"id": number}, blob)) for number, blob in blobs.items()]
    for thread in threads:
        thread.start()
    got = {message["id"]: blob for message, blob in (other.receive() or ({}, b"") for _ in blobs)}
    for thread in threads:
        thread.join()
    assert got == blobs


def test_the_other_end_gone_is_the_end(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    one.close()
    assert other.receive() is None
    with pytest.raises(BrokenPipeError):
        other.send({"type": "step"})


def test_a_message_cut_short_is_the_end() -> None:
    left, right = socket.socketpair()
    left.sendall(b"\x00\x00\x00\x10\x00\x00\x00\x00{")
    left.close()
    connection = Connection(right)
    assert connection.receive() is None
    connection.close()
