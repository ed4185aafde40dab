"""Figures of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from penstock.tiers.worker import TierStats


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the last steps of one kind; 0 if there were none."""

    count: int
    """Number of steps since the start."""
    median_seconds: float
    p95_seconds: float
    worst_seconds: float

    @classmethod
    def of(cls, count: int, seconds: Sequence[float]) -> StepTimes:
        """Summarize the last of `count` steps."""
        if not seconds:
            return cls(count, 0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return cls(count, median(ordered), p95, ordered[-1])


@dataclass(slots=True)
class SpillCounts:
    """Counts of spilled blocks since the start: of 16 tokens, a side and a head of a layer."""

    cached_blocks: int = 0
    """Blocks that steps chose, and that the cache in memory had."""
    read_blocks: int = 0
    """Blocks that steps chose, and that were read from a tier."""
    streamed_blocks: int = 0
    """Blocks that were read from a tier for chunks of prompts."""
    read_bytes: int = 0
    """Bytes that were read from tiers."""
    requests: int = 0
    """Requests to tiers: one for all that a layer of a step lacks, unless a tier lacks some."""
    lost_blocks: int = 0
    """Blocks that were damaged, missing or late in all tiers."""


@dataclass(frozen=True, slots=True)
class SpillStats:
    """Keys and values that are in a cold tier while they are read, see `--active-kv-size`."""

    active_tokens: int
    """Tokens of the prefix tree whose keys and values are in memory."""
    spilled_tokens: int
    """Tokens of the prefix tree of which some layers are in a tier alone."""
    counts: SpillCounts

    @property
    def hit_rate(self) -> float:
        """Share of the blocks that steps chose that the cache had; 0 before the first."""
        chosen = self.counts.cached_blocks + self.counts.read_blocks
        return self.counts.cached_blocks / chosen if chosen else 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """A view of the engine between two steps."""

    limit_bytes: int
    """Memory limit."""
    used_bytes: int
    """Bytes in the ledger: held, or reserved for admitted sequences."""
    held_bytes: int
    """Bytes in arrays."""
    by_kind: dict[str, int]
    """Bytes in the ledger by `ledger.Kind`; their sum is `used_bytes`."""
    active_bytes: int
    """Bytes that MLX has allocated in this process."""
    waiting: int
    """Sequences that were never admitted."""
    waiting_clients: int
    """Clients to which they belong."""
    most_waiting: int
    """Those of the client with the most of them."""
    prefilling: int
    """Admitted sequences whose prompt is computed."""
    restoring: int
    """Admitted sequences that wait for blocks of a cold tier."""
    running: int
    """Admitted sequences that decode."""
    preempted: int
    """Sequences that were admitted, and wait to be admitted again."""
    requests: int
    """Answers that were asked for since the start."""
    finished: int
    """Answers that have ended, failed ones too."""
    failed: int
    """Answers that ended with an error."""
    prompt_tokens: int
    """Prompt tokens of admitted sequences."""
    hit_tokens: int
    """Prompt tokens that were not prefilled, because their KV was in the cache."""
    restored_tokens: int
    """Hit tokens whose KV was read from a cold tier."""
    prefilled_tokens: int
    """Prompt tokens that were computed."""
    generated_tokens: int
    """Tokens that were sampled."""
    proposed_tokens: int
    """Tokens that were proposed and checked, see `--speculative-tokens`."""
    accepted_tokens: int
    """Proposed tokens that were the tokens sampled."""
    drafted_tokens: int
    """Proposed tokens that a draft model has chosen, see `--draft-model`."""
    accepted_draft_tokens: int
    """Draft model's proposals that were the tokens sampled."""
    failed_proposals: int
    """Times that proposing failed; the step then went on without."""
    nodes: int
    """Nodes of the prefix tree."""
    held_tokens: int
    """Tokens in the prefix tree."""
    evicted_nodes: int
    """Nodes evicted since the start."""
    evicted_bytes: int
    """KV bytes of those nodes."""
    preemptions: int
    """Times that a running sequence was preempted."""
    out_of_memory: int
    """Times that MLX ran out of memory."""
    copied_bytes: int
    """KV bytes copied since the start by splits and merges of nodes."""
    decode: StepTimes
    prefill: StepTimes
    model_seconds: float
    """Seconds spent in the model and in the choice of tokens, since the start."""
    tiers: dict[str, TierStats]
    """Figures of the cold tiers by name, `disk` and `remote`, the nearest first."""
    spilling: SpillStats | None
    """Figures of the KV that has left memory for the tiers; None if all stays."""

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
    tier_blocks: dict[str, int] = field(default_factory=dict)
    """Blocks that were removed from each cold tier, by its name."""
    pending: dict[str, str] = field(default_factory=dict)
    """Tiers that still have blocks, and why."""
