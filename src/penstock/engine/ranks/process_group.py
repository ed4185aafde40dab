"""One engine on several processes, which run the same steps and synchronize before each.

A model may be sharded among processes (`mlx_lm`'s `shard`), each with its part of every layer's
weights, keys and values. Each process, a *rank*, has its own core, with scheduler, tree, ledger and
cold tier. The cores stay equal, because everything a core does is determined by its commands, the
time, and a few local facts, on which the ranks agree:

    rank 0   enqueue, cancel, clear ──noted──┐
                                             │  begin: one exchange before each step
    rank 1   ────────────────────────────────┴─> the same commands, the same time
    ...
    tokens                 sampled by rank 0
    restored blocks        counted once every rank has them; the minimum of all ranks
    memory                 the minimum of all ranks

A rank that cannot compute a step exits, and so must the group: the others wait for it in the middle
of a layer. `watch.Watch` ensures that they do not wait for long.
"""

from __future__ import annotations

import json
import platform
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn
from zlib import crc32

import mlx.core as mx
import numpy as np

from penstock.engine.model.sampling import SampledToken
from penstock.engine.prefill_rate import RunningMean
from penstock.errors import PenstockError, SettingError

NUMBERS = 16
"""Number of 64-bit integers that every rank sends in one exchange."""
INLINE_BYTES = 1_024
"""Bytes of rank 0's message sent in the same exchange; a second one sends the rest."""
NAME_BYTES = 64
PENDING, FAILED = -1, -2
"""Values sent instead of a result: not ready yet, or failed."""
_HEAD = struct.Struct(f"<{NUMBERS + 1}q")
"""Layout of the integers, and of a checksum of the exchange's name."""


class RanksBroken(PenstockError, RuntimeError):
    """The ranks of a group cannot continue together, and the group must end."""

    status = 503


@dataclass(frozen=True, slots=True)
class Command:
    """A command that rank 0 received between two steps."""

    name: str
    arguments: dict[str, Any]
    now: float
    """Time of the command on rank 0's clock, in seconds."""


class ProcessGroup:
    """Processes of one engine; this base class stands for a single process."""

    rank: int = 0
    size: int = 1

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = clock

    def clock(self) -> float:
        return self._source()

    def note(self, name: str, **arguments: Any) -> None:
        """Record a command on rank 0 for the other ranks, before it is executed."""

    def begin(self, state: Sequence[int], do: Callable[[Command], None]) -> None:
        """Synchronize before a step: other ranks execute the commands of rank 0 with `do`.

        Raises RanksBroken if `state`, integers after the last step, differs between ranks.
        """

    def least(self, number: int) -> int:
        return number

    def maximum(self, number: int) -> int:
        return number

    def chosen(self, local: Sequence[SampledToken | Exception]) -> list[SampledToken | Exception]:
        """Return the token sampled by rank 0 for each row."""
        return list(local)

    def answer(self, local: Future[int]) -> Future[int]:
        """Return a future of the minimum of all ranks' answers."""
        return local

    def mean(self, first: float) -> RunningMean:
        """Return a running mean of rank 0's measurements that is equal on all ranks.

        Args:
            first: initial value, such as seconds per token.
        """
        return RunningMean(first)

    def fault(self, doing: str, error: Exception) -> None:
        """Report that a step failed on this rank; raises RanksBroken if there are other ranks."""

    def check_equal(self, what: str, local: object) -> None:
        """Raise SettingError on every rank unless `local` is equal on all."""


class AgreedMean(RunningMean):
    """A running mean that is set to rank 0's value between two steps."""

    def __init__(self, first: float) -> None:
        super().__init__(first)
        self.local = RunningMean(first)

    def add(self, measured: float) -> None:
        self.local.add(measured)


class RankGroup(ProcessGroup):
    """Processes of an MLX group, each with a core that runs its part of one model.

    Used by the thread that owns the arrays, with the same sequence of calls on every rank. All
    ranks use rank 0's clock.
    """

    def __init__(
        self, group: mx.distributed.Group, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self._now = 0.0
        self._journal: list[Command] = []
        self._answers: list[tuple[Future[int], Future[int]]] = []
        self._means: list[AgreedMean] = []
        self.names = self._gather_names()
        """Names of the ranks for messages: number and machine."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which leads."""
        return self.rank == 0

    def clock(self) -> float:
        return self._now

    def note(self, name: str, **arguments: Any) -> None:
        if self.leads:
            self._now = self._source()
            self._journal.append(Command(name, arguments, self._now))

    def begin(self, state: Sequence[int], do: Callable[[Command], None]) -> None:
        digest = crc32(json.dumps(list(state)).encode())
        open_answers = self._answers[: NUMBERS - 2]
        numbers = [digest, len(open_answers), *(_reading(local) for local, _ in open_answers)]
        rows, message = self._exchange("begin", numbers, self._words() if self.leads else b"")
        self._check_same([row[0] for row in rows], state)
        # Answers that rank 0 has awaited since the last step are not awaited by others yet.
        common = min(row[1] for row in rows)
        for column, (local, agreed) in enumerate(open_answers[:common], 2):
            seen = [row[column] for row in rows]
            if PENDING not in seen:
                self._answers.remove((local, agreed))
                agreed.set_result(0 if FAILED in seen else min(seen))
        words = json.loads(message)
        for command in () if self.leads else [Command(*parts) for parts in words["commands"]]:
            self._now = command.now
            do(command)
        self._now = words["now"]
        for mean, value in zip(self._means, words["means"], strict=True):
            mean.value = value

    def least(self, number: int) -> int:
        return min(self._all("least", number))

    def maximum(self, number: int) -> int:
        return max(self._all("most", number))

    def chosen(self, local: Sequence[SampledToken | Exception]) -> list[SampledToken | Exception]:
        tokens = [FAILED if isinstance(token, Exception) else token.token for token in local]
        message = struct.pack(f"<{len(tokens)}q", *tokens)
        _, message = self._exchange("chosen", (), message if self.leads else b"")
        if self.leads:
            return list(local)
        return [
            RanksBroken("rank 0 could not choose its next token")
            if token < 0
            else SampledToken(token)
            for (token,) in struct.iter_unpack("<q", message)
        ]

    def answer(self, local: Future[int]) -> Future[int]:
        agreed: Future[int] = Future()
        agreed.set_running_or_notify_cancel()  # other ranks wait for it, so it cannot be cancelled
        self._answers.append((local, agreed))
        return agreed

    def mean(self, first: float) -> RunningMean:
        self._means.append(AgreedMean(self._first(first)))
        return self._means[-1]

    def fault(self, doing: str, error: Exception) -> NoReturn:
        text = str(error).strip().splitlines()
        reason = text[0] if text else type(error).__name__
        raise RanksBroken(f"{self.names[self.rank]} failed while {doing}: {reason}") from error

    def check_equal(self, what: str, local: object) -> None:
        digest = crc32(json.dumps(local, sort_keys=True, default=str).encode())
        digests = self._all("check_equal", digest)
        by_name = zip(self.names, digests, strict=True)
        others = [name for name, other in by_name if other != digests[0]]
        if others:
            raise SettingError(
                f"{what} must be the same on every rank; {', '.join(others)} differ from "
                f"{self.names[0]}"
            )

    def secret(self, local: bytes) -> bytes:
        return self._exchange("secret", (), local if self.leads else b"")[1]

    def _words(self) -> bytes:
        commands, self._journal = self._journal, []
        self._now = self._source()
        means = [mean.local.value for mean in self._means]
        rows = [[c.name, c.arguments, c.now] for c in commands]
        words = {"now": self._now, "means": means, "commands": rows}
        return json.dumps(words, default=lambda request: request.model_dump(mode="json")).encode()

    def _first(self, number: float) -> float:
        first: float = struct.unpack("<d", self.secret(struct.pack("<d", number)))[0]
        return first

    def _all(self, what: str, number: int) -> list[int]:
        return [row[0] for row in self._exchange(what, (number,))[0]]

    def _check_same(self, digests: Sequence[int], state: Sequence[object]) -> None:
        others = [
            self.names[rank] for rank, other in enumerate(digests) if other != digests[self.rank]
        ]
        if others:
            raise RanksBroken(
                f"{self.names[self.rank]} is not in the state of {', '.join(others)}: "
                f"{list(state)}; this is a bug of penstock's, and no answer can be trusted"
            )

    def _gather_names(self) -> tuple[str, ...]:
        name = platform.node().encode()[:NAME_BYTES].ljust(NAME_BYTES)
        rows = self._gather(name)
        return tuple(
            f"rank {rank} ({bytes(row).decode(errors='replace').strip()})"
            for rank, row in enumerate(rows)
        )

    def _exchange(
        self, what: str, numbers: Sequence[int], message: bytes = b""
    ) -> tuple[list[tuple[int, ...]], bytes]:
        """Exchange integers with all ranks; return those of each rank, and rank 0's message."""
        padded = (*numbers, *(0,) * (NUMBERS - len(numbers)), crc32(what.encode()))
        size = len(message).to_bytes(8, "little")
        inline = message[:INLINE_BYTES].ljust(INLINE_BYTES, b"\0")
        rows = [bytes(row) for row in self._gather(_HEAD.pack(*padded) + size + inline)]
        heads = [_HEAD.unpack(row[: _HEAD.size]) for row in rows]
        self._check_same([head[-1] for head in heads], [what])
        first = rows[0][_HEAD.size :]
        length = int.from_bytes(first[:8], "little")
        text = first[8 : 8 + min(length, INLINE_BYTES)]
        if length > INLINE_BYTES:
            rest = message[INLINE_BYTES:] if self.leads else bytes(length - INLINE_BYTES)
            summed = mx.distributed.all_sum(
                mx.array(np.frombuffer(rest, np.uint8)), group=self.group
            )
            text += np.array(summed).tobytes()
        return heads, text

    def _gather(self, local: bytes) -> Any:
        """Return the bytes of every rank, (ranks, bytes); all must send the same number."""
        row = mx.array(np.frombuffer(local, np.uint8))[None]
        return np.array(mx.distributed.all_gather(row, group=self.group))


def _reading(answer: Future[int]) -> int:
    if not answer.done():
        return PENDING
    return FAILED if answer.cancelled() or answer.exception() else answer.result()
