"""A remote store without a server or a package; see `Objects`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from patience import SOON

from penstock.plugins.remote.objects import ObjectPiece


class InMemory:
    """Values in this process's memory; records requests, and delays or hangs if configured."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.asked: list[int] = []
        self.pieces: list[int] = []
        self.puts = 0
        self.takes = True
        self.seconds = 0.0
        self.closed = 0
        self.go = threading.Event()
        self.go.set()

    def wait(self) -> None:
        time.sleep(self.seconds)
        if not self.go.wait(SOON):
            raise TimeoutError("it hangs")

    def get(self, name: str, at: int, nbytes: int) -> ObjectPiece | None:
        self.wait()
        self.pieces.append(nbytes)
        raw = self.values.get(name)
        return None if raw is None else ObjectPiece(len(raw), raw[at : at + nbytes])

    def put(self, name: str, raw: bytes) -> bool:
        self.puts += 1
        if self.takes:
            self.values[name] = raw
        return self.takes

    def has(self, names: Sequence[str]) -> list[bool]:
        self.wait()
        self.asked.append(len(names))
        return [name in self.values for name in names]

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)

    def close(self) -> None:
        self.closed += 1
