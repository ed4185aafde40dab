"""What an engine tells about itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from penstock.tiers.worker import TierStats

REMEMBERED_STEPS = 512


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of the last steps of a kind, in seconds; 0 if there were none."""

    count: int
    """Since the start."""
    median_seconds: float
    p95_seconds: float
    worst_seconds: float

    @classmethod
    def of(cls, count: int, seconds: Sequence[float]) -> StepTimes:
        """Sum up what is remembered of `count` steps."""
        if not seconds:
            return cls(count, 0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return cls(count, median(ordered), p95, ordered[-1])


@dataclass(frozen=True, slots=True)
class Stats:
    """A view of the engine between two steps."""

    limit_bytes: int
    used_bytes: int
    """Held, or promised to who was let in."""
    held_bytes: int
    """Of those, what is there now."""
    by_kind: dict[str, int]
    """`used_bytes` by what it is for."""
    active_bytes: int
    """What MLX says is allocated in this process."""
    waiting: int
    prefilling: int
    restoring: int
    running: int
    preempted: int
    """Sequences in each state."""
    requests: int
    finished: int
    failed: int
    """Answers, since the start."""
    prompt_tokens: int
    """Tokens of the prompts that were let in."""
    hit_tokens: int
    """Of those, read from what was computed before: prefill avoided."""
    restored_tokens: int
    """Of the hits, read back from a cold tier."""
    prefilled_tokens: int
    generated_tokens: int
    nodes: int
    held_tokens: int
    """Tokens in the prefix tree."""
    evicted_nodes: int
    evicted_bytes: int
    preemptions: int
    out_of_memory: int
    copied_bytes: int
    """KV copied since the start by splits and merges of nodes."""
    decode: StepTimes
    prefill: StepTimes
    model_seconds: float
    """Seconds spent in the model and in the choice of tokens, since the start."""
    tiers: dict[str, TierStats]
    """Figures of the cold tiers by name, `disk` and `remote`, the nearest first."""

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were not computed again; 0 before the first."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Size of the prefixes that one call of `clear` evicted."""

    nodes: int
    """Nodes of the prefix tree."""
    nbytes: int
    """Bytes of keys and values."""


@dataclass(slots=True)
class Counters:
    """What is counted while the engine runs."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    restored_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    out_of_memory: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    model_seconds: float = 0.0
    decode_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    prefill_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
