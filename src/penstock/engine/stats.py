"""Statistics of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import median

from penstock.engine.counters import Counters
from penstock.tiers.worker import TierStats


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of the last steps of one kind; 0 without steps."""

    count: int
    """Number of steps since the start."""
    median_seconds: float
    p95_seconds: float
    worst_seconds: float

    @classmethod
    def of(cls, count: int, seconds: Sequence[float]) -> StepTimes:
        """Summarize the durations of the last of `count` steps."""
        if not seconds:
            return cls(count, 0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return cls(count, median(ordered), p95, ordered[-1])


@dataclass(slots=True)
class SpillCounts:
    """Counts of spilled blocks since the start: 16 tokens of one side, head and layer each."""

    cached_blocks: int = 0
    """Blocks chosen by steps and found in the block cache in memory."""
    read_blocks: int = 0
    """Blocks chosen by steps and read from a tier."""
    streamed_blocks: int = 0
    """Blocks read from a tier for prefill chunks."""
    read_bytes: int = 0
    requests: int = 0
    """Read requests to tiers: one per layer and step, more if a tier lacks blocks."""
    lost_blocks: int = 0
    """Blocks that no tier could deliver: damaged, missing or late."""


@dataclass(frozen=True, slots=True)
class SpillStats:
    """Statistics of KV spilled to a cold tier while in use, see `--active-kv-size`."""

    active_tokens: int
    """Tokens of the prefix tree whose keys and values are in memory."""
    spilled_tokens: int
    """Tokens of the prefix tree with at least one layer stored only in a tier."""
    counts: SpillCounts

    @property
    def hit_rate(self) -> float:
        """Share of the blocks chosen by steps that were in the block cache; 0 before the first."""
        chosen = self.counts.cached_blocks + self.counts.read_blocks
        return self.counts.cached_blocks / chosen if chosen else 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of an engine, taken between two steps."""

    limit_bytes: int
    used_bytes: int
    """Bytes in the ledger: allocated, or reserved for admitted sequences."""
    held_bytes: int
    """Bytes allocated in arrays."""
    by_kind: dict[str, int]
    """Bytes in the ledger by `ledger.Kind`; their sum is `used_bytes`."""
    active_bytes: int
    """Bytes allocated by MLX in this process."""
    waiting: int
    """Sequences in the queue that have never been admitted."""
    waiting_clients: int
    most_waiting: int
    """Waiting sequences of the client that has the most."""
    prefilling: int
    """Admitted sequences in prefill."""
    restoring: int
    """Admitted sequences that wait for blocks from a cold tier."""
    running: int
    """Admitted sequences that decode."""
    preempted: int
    """Preempted sequences that wait to be admitted again."""
    requests: int
    """Answers requested since the start."""
    finished: int
    """Answers that have ended, including failed ones."""
    failed: int
    """Answers that ended with an error."""
    prompt_tokens: int
    """Prompt tokens of admitted sequences."""
    hit_tokens: int
    """Prompt tokens whose KV was in the cache and was not computed."""
    restored_tokens: int
    """Hit tokens whose KV was read from a cold tier."""
    prefilled_tokens: int
    """Prompt tokens computed."""
    generated_tokens: int
    proposed_tokens: int
    """Tokens proposed and verified, see `--speculative-tokens`."""
    accepted_tokens: int
    """Accepted proposed tokens."""
    drafted_tokens: int
    """Tokens proposed by the draft model, see `--draft-model`."""
    accepted_draft_tokens: int
    """Accepted tokens of the draft model."""
    failed_proposals: int
    """Number of times that proposing failed and the step ran without proposals."""
    nodes: int
    held_tokens: int
    """Tokens in the prefix tree."""
    evicted_nodes: int
    """Nodes evicted since the start."""
    evicted_bytes: int
    """KV bytes of the evicted nodes."""
    preemptions: int
    """Number of preemptions of running sequences."""
    out_of_memory: int
    """Number of times that MLX ran out of memory."""
    copied_bytes: int
    """KV bytes copied since the start by splits and merges of nodes."""
    decode: StepTimes
    prefill: StepTimes
    model_seconds: float
    """Seconds spent in the model and in sampling since the start."""
    tiers: dict[str, TierStats]
    """Statistics of the cold tiers by name, `disk` and `remote`, nearest first."""
    spilling: SpillStats | None
    """Statistics of spilled KV; None if KV is never spilled."""

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache; 0 before the first."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


COUNTED = {total.name for total in fields(Counters)} & {total.name for total in fields(Stats)}
"""Names of the fields of `Counters` that `Stats` copies."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """Prefixes evicted by one call of `clear`."""

    nodes: int
    """Nodes evicted from the prefix tree."""
    nbytes: int
    """Bytes of keys and values."""
    tier_blocks: dict[str, int] = field(default_factory=dict)
    """Blocks removed from each cold tier, by name."""
    pending: dict[str, str] = field(default_factory=dict)
    """Reasons why a tier still has blocks, by the tier's name."""
