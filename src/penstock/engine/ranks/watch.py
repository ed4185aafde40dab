"""Heartbeats between the processes of a group, which end together if one of them is lost.

Otherwise the others would wait forever for its part of a layer.

    rank 1 ──┐  a heartbeat per second, both ways
    rank 2 ──┼──> rank 0: reports a rank that is silent for 8 s or disconnected; all end
    ...    ──┘

The connections are those of `multiprocessing.connection`, with a key that rank 0 generates and
sends through MLX's transport. Only bytes are exchanged; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

from penstock.engine.ranks.process_group import RankGroup, RanksBroken

BEAT_SECONDS = 1.0
SILENT_SECONDS = 8.0
"""Seconds of silence after which a rank counts as lost."""
JOIN_SECONDS = 60.0
"""Maximum wait at startup until all ranks have connected to rank 0."""
KEY_BYTES = 32
MOST_BYTES = 1_024
BEAT, END = b"beat", b"end"
ANY = "0.0.0.0"


class Watch:
    """Heartbeats of one rank; a context manager that stops them on exit.

    Args:
        ranks: process group; all ranks must create their `Watch` at the same time.
        gone: called once, on the watch's thread, with a line that names the lost rank. It should
            end the process, as its other threads may never return.
        silent_seconds: seconds of silence after which a rank counts as lost.
    """

    def __init__(
        self,
        ranks: RankGroup,
        gone: Callable[[str], None],
        *,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._ranks = ranks
        self._gone = gone
        self._silent_seconds = silent_seconds
        self._closing = threading.Event()
        self._group = self._meet()
        self._heard = dict.fromkeys(self._group, time.monotonic())
        self._thread = threading.Thread(target=self._run, name="penstock-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Announce a normal shutdown to the other ranks, and disconnect. Idempotent."""
        self._closing.set()
        self._thread.join(2 * BEAT_SECONDS)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- on the caller's thread

    def _meet(self) -> dict[int, Connection]:
        """Return this rank's connections by rank: to all others on rank 0, else to rank 0."""
        ranks = self._ranks
        if ranks.leads:
            key = secrets.token_bytes(KEY_BYTES)
            host = _own_host()
            bound = host if host.startswith("127.") else ANY
            connections: dict[int, Connection] = {}
            with Listener((bound, 0), backlog=ranks.size, authkey=key) as listener:
                port = listener.address[1]
                ranks.secret(json.dumps([host, port, key.hex()]).encode())
                accepting = threading.Thread(target=self._accept, args=(listener, connections))
                accepting.daemon = True  # a Listener has no timeout
                accepting.start()
                accepting.join(JOIN_SECONDS)
            missing = [
                ranks.names[rank] for rank in range(1, ranks.size) if rank not in connections
            ]
            if missing:
                raise RanksBroken(
                    f"{', '.join(missing)} did not reach {ranks.names[0]} at {host} port {port} "
                    f"within {JOIN_SECONDS:.0f} s"
                )
            return connections
        host, port, key_hex = json.loads(ranks.secret(b""))
        connection = Client((host, port), authkey=bytes.fromhex(key_hex))
        connection.send_bytes(str(ranks.rank).encode())
        return {0: connection}

    def _accept(self, listener: Listener, connections: dict[int, Connection]) -> None:
        while len(connections) < self._ranks.size - 1:
            try:
                connection = listener.accept()
                connections[int(connection.recv_bytes(MOST_BYTES))] = connection
            except (AuthenticationError, EOFError, ValueError):  # not a member of the group
                continue
            except OSError:  # the listener was closed after the timeout
                return

    # ---- the thread

    def _run(self) -> None:
        beat_at = 0.0
        while not self._closing.is_set() and self._group:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + BEAT_SECONDS
                self._send(BEAT)
            for ready in wait(list(self._group.values()), BEAT_SECONDS / 4):
                rank = next(r for r, other in self._group.items() if other is ready)
                if not self._hear(rank):
                    return
            for rank, heard in self._heard.items():
                silent = time.monotonic() - heard
                if silent > self._silent_seconds:
                    self._end(f"{self._ranks.names[rank]} has not been heard of for {silent:.0f} s")
                    return
        self._send(END)
        for connection in self._group.values():
            connection.close()

    def _hear(self, rank: int) -> bool:
        """Receive a rank's message; return False if it ends the group."""
        try:
            message = self._group[rank].recv_bytes(MOST_BYTES)
        except (EOFError, OSError):
            self._end(f"{self._ranks.names[rank]} has ended")
            return False
        self._heard[rank] = time.monotonic()
        if message == END:  # a normal shutdown
            self._group.pop(rank).close()
            del self._heard[rank]
        elif message != BEAT:
            self._end(message.decode(errors="replace"))
            return False
        return True

    def _send(self, message: bytes) -> None:
        for connection in self._group.values():
            with suppress(OSError):
                connection.send_bytes(message)

    def _end(self, why: str) -> None:
        self._send(why.encode()[:MOST_BYTES])
        self._gone(why)


def _own_host() -> str:
    """Return the host at which the other ranks can connect to rank 0."""
    file = os.environ.get("MLX_HOSTFILE")
    if file and Path(file).is_file():
        with suppress(ValueError, LookupError, TypeError):
            first = json.loads(Path(file).read_text())[0]
            address = first if isinstance(first, str) else first[0]
            return str(address).rpartition(":")[0]
    for name in ("NCCL_HOST_IP", "MLX_JACCL_COORDINATOR"):
        if value := os.environ.get(name):
            return value.rpartition(":")[0] or value
    return "127.0.0.1"
