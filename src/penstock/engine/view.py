"""`EngineView`: read-only queries to an engine, answered between two steps.

    server, command line, Ray ──Engine.ask──> engine thread ──> EngineView ──> stats, explain, tree

Code outside of `engine` uses this class, never the engine's components.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from penstock.config import EngineSettings
from penstock.engine.draft.draft import Draft, NoDraft
from penstock.engine.handle import Handle
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.retention.spilling import Spilling
from penstock.engine.schedule import restoring
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.budget import MemoryBudget
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.scheduler import Scheduler, State
from penstock.engine.stats import COUNTED, Stats, StepTimes
from penstock.kv.states import nbytes
from penstock.ledger import Kind
from penstock.prefix.divergence import explain, tokens_held_at
from penstock.prefix.explanation import Explanation
from penstock.prefix.node import NodeView
from penstock.prefix.volatile import Volatile, name_volatile

SHOWN_STATES = [state for state in State if state is not State.DONE]
NEAR_TOKENS = 32
"""Number of tokens on each side of the first difference of two prompts used to classify it."""

NOT_SHARED = (
    "prefixes of this model are not shared: the KV of a token depends on how the prompt is split, "
    "so every prompt is prefilled as a whole"
)


@dataclass(frozen=True, slots=True)
class SequenceBytes:
    per_sequence: int
    """Bytes of every sequence: its KV, its part of a decode step and its index."""
    shared: int
    """Bytes that all such sequences need together: the buffers of one prefill chunk."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Bytes that an engine holds in a ledger shared by several models."""

    fixed_bytes: int
    """Bytes held whether or not a sequence runs."""
    cold_bytes: int
    """Bytes that can be evicted now."""
    cold_seconds: float
    """Estimated seconds to recompute all cached tokens."""
    missing_bytes: int
    """Bytes that the first waiting request lacks if no request is running; else 0."""


@dataclass(frozen=True, slots=True)
class SpilledBytes:
    tokens: int
    active_tokens: int
    """Maximum number of tokens whose keys and values are in memory."""
    index_bytes: int
    place_bytes: int
    """Bytes in memory of the other tokens: places, checksums, and layers that are not spilled."""
    active_bytes: int
    """Bytes of the keys and values in memory."""
    tree_bytes: int
    """Bytes of the prefix tree's index for all tokens."""
    cache_bytes: int
    """Bytes reserved for the block cache and for reads, for all sequences together."""


class EngineView:
    """Read-only view of memory, cache and prefix matches. Not thread-safe: see `Engine.ask`.

    Args:
        count_weights: counts the bytes of the model's weights.
        count_features: counts the bytes of inputs other than tokens.
        decode: returns the text of tokens; empty without a tokenizer.
    """

    def __init__(
        self,
        *,
        limits: EngineSettings,
        count_weights: Callable[[], int],
        stores: KVStores,
        tiers: TierGroup,
        scheduler: Scheduler[Any],
        admission: Admission,
        budget: MemoryBudget,
        estimator: MemoryEstimator,
        decode: Callable[[Sequence[int]], str],
        draft: Draft | NoDraft,
        count_features: Callable[[], int],
    ) -> None:
        self.limits = limits
        self._count_features = count_features
        self._draft = draft
        self._count_weights = count_weights
        self._stores = stores
        self._tiers = tiers
        self._prefixes = stores.prefixes
        self._ledger = stores.prefixes.ledger
        self._scheduler = scheduler
        self._admission = admission
        self._budget = budget
        self._estimator = estimator
        self._decode = decode

    # ---- names

    @property
    def fingerprint(self) -> str:
        """Identifies everything besides the tokens that must be equal for KV to be reusable."""
        return self._prefixes.fingerprint

    @property
    def vocabulary_size(self) -> int:
        return self._stores.figures.vocabulary_size

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._stores.figures.adapters.fingerprints)

    def salted(self, salt: str, adapter: str | None) -> str:
        """Combine a client's cache salt and an adapter into one salt; None is the base model.

        Raises:
            SettingError: there is no such adapter.
        """
        return self._stores.figures.adapters.salted(salt, adapter)

    @property
    def codec_name(self) -> str | None:
        """Name of the codec of cached KV; None if it is not quantized."""
        names = (part.codec_name for part in self._stores.retentions)
        return next((name for name in names if name is not None), None)

    # ---- what fits

    @property
    def token_bytes(self) -> float:
        """Bytes of a token's KV in all layers before quantization."""
        return self._stores.figures.token_bytes

    @property
    def index_token_bytes(self) -> int:
        """Bytes of a token's entries in the key index, in all layers; 0 without an index."""
        return self._stores.figures.index_token_bytes

    @property
    def coded_token_bytes(self) -> float:
        """Bytes of a token's KV in all layers, as stored in the prefix tree."""
        nbytes: float = self._stores.figures.token_bytes
        for part in self._stores.retentions:
            nbytes = part.coded_token_bytes(nbytes)
        return nbytes

    @property
    def context_tokens(self) -> int | None:
        """Maximum tokens of prompt and answer that the model supports; None if not specified."""
        return self._stores.figures.context_tokens

    @property
    def fitting_tokens(self) -> int:
        """Maximum tokens of prompt and answer of a sequence that runs alone; at most 2**31."""
        return self._budget.most_tokens()

    def sequence_bytes(self, tokens: int) -> SequenceBytes:
        """Return the memory that a sequence of `tokens` needs in addition to the fixed memory."""
        estimator = self._estimator
        index = self._prefixes.index_bytes(-(-tokens // self._prefixes.block_size) + 1)
        if self._stores.spills:  # most of it is reserved
            index = max(0, index - estimator.path_bytes(tokens))
        per_sequence = estimator.sequence_bytes(tokens) + estimator.decode_bytes(tokens) + index
        return SequenceBytes(per_sequence, estimator.prefill_bytes(tokens))

    def spilled_bytes(self, tokens: int) -> SpilledBytes | None:
        """Return the memory of a sequence of `tokens` by purpose; None if KV is never spilled.

        Its admission reserves these bytes.
        """
        spilling, figures = self._stores.all_of(Spilling), self._stores.figures
        if not spilling:
            return None
        gone = self._estimator.spilled_tokens(tokens)
        places = self._estimator.spilled_token_bytes - figures.index_token_bytes
        return SpilledBytes(
            tokens=tokens,
            active_tokens=tokens - gone,
            index_bytes=tokens * figures.index_token_bytes,
            place_bytes=gone * places,
            active_bytes=(tokens - gone) * figures.token_bytes,
            tree_bytes=self._estimator.path_bytes(tokens),
            cache_bytes=sum(part.nbytes for part in spilling),
        )

    @property
    def claimed_share(self) -> float:
        """Share of the KV memory that cannot be evicted: in use or reserved."""
        bytes_by_kind = self._ledger.by_class()
        fixed = sum(bytes_by_kind[kind] for kind in (Kind.WEIGHTS, Kind.TAILS, Kind.BUFFERS))
        fixed += self._draft.fixed_bytes
        room = max(1, self._ledger.limit_bytes - fixed)
        claimed = self._ledger.used_bytes - fixed - self._prefixes.evictable_bytes
        return max(0, claimed) / room

    def generated(self, handle: Handle) -> list[list[int]]:
        """Return the tokens of a request's open answers so far, delivered or not."""
        sequences = self._admission.sequences.values()
        return [list(s.generated) for s in sequences if s.handle is handle]

    # ---- cached KV

    @property
    def idle(self) -> bool:
        return not self._admission.sequences

    @property
    def held_bytes(self) -> int:
        sequences = self._admission.sequences.values()
        own_spans = self._stores.own_bytes(span for s in sequences for span in s.kv.own_spans)
        fixed = self._budget.weights_bytes + self._stores.tails.nbytes
        fixed += self._draft.held_bytes
        return fixed + self._prefixes.tree.nbytes + own_spans + self._state_bytes()

    def _state_bytes(self) -> int:
        """Return the bytes of open sequences' recurrent states, excluding those of checkpoints."""
        states = (s.kv.recurrent_state for s in self._admission.sequences.values())
        nbytes_by_id = {id(state.states): nbytes(state.states) for state in states if state}
        if nbytes_by_id:
            for node in self._prefixes.tree:
                for checkpoint in node.segment.checkpoints:
                    nbytes_by_id.pop(id(checkpoint.states), None)
        return sum(nbytes_by_id.values())

    def holdings(self) -> Holdings:
        line = [] if self._scheduler.placed() else self._scheduler.in_line()
        tokens = self._prefixes.tree.tokens
        return Holdings(
            fixed_bytes=self._budget.fixed_bytes,
            cold_bytes=self._prefixes.evictable_bytes,
            cold_seconds=tokens * self._estimator.prefill_token_seconds,
            missing_bytes=self._budget.missing_bytes(line[0]) if line else 0,
        )

    def tree(self) -> list[NodeView]:
        return self._prefixes.views()

    def block_hashes(self) -> list[bytes]:
        nodes = (node for node in self._prefixes.tree if not node.partial)
        return [block_hash for node in nodes for block_hash in node.block_hashes]

    def held_tokens(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the number of a prompt's leading tokens in the tree, in whole blocks."""
        return self._prefixes.find(tokens, salt).tokens

    def stats(self) -> Stats:
        counters, tree, counts = self._stores.counters, self._prefixes.tree, self._prefixes.counts
        spilling = [part.stats() for part in self._stores.all_of(Spilling)]
        by_client = self.waiting_by_client()
        return Stats(
            limit_bytes=self._ledger.limit_bytes,
            used_bytes=self._ledger.used_bytes,
            held_bytes=self.held_bytes,
            by_kind={kind.value: size for kind, size in self._ledger.by_class().items()},
            active_bytes=mx.get_active_memory(),
            **{state.value: len(self._scheduler.sequences(state)) for state in SHOWN_STATES},
            waiting_clients=len(by_client),
            most_waiting=max(by_client.values(), default=0),
            **{name: getattr(counters, name) for name in COUNTED},
            nodes=len(tree),
            held_tokens=tree.tokens,
            evicted_nodes=counts.evicted_nodes,
            evicted_bytes=counts.evicted_bytes,
            copied_bytes=counts.copied_bytes,
            decode=StepTimes.of(counters.decode_steps, counters.decode_seconds),
            prefill=StepTimes.of(counters.prefill_steps, counters.prefill_seconds),
            tiers=self._tiers.stats(),
            spilling=spilling[0] if spilling else None,
        )

    def waiting_by_client(self) -> dict[str | int, int]:
        return self._scheduler.waiting_by_client

    # ---- one prompt

    def explain(
        self,
        tokens: Sequence[int],
        salt: str = "",
        *,
        ask_tiers: bool = False,
        block_hashes: Sequence[bytes] = (),
    ) -> Explanation:
        """Return how far a prompt would match now, and why no further."""
        if len(block_hashes) != len(tokens) // self._prefixes.block_size:
            block_hashes = self._prefixes.block_hashes(tokens, salt)
        explanation = explain(self._prefixes, tokens, salt, block_hashes)
        tier_tokens = self._tier_tokens(block_hashes) if ask_tiers else None
        reusable_tokens, why = self._stores.explain(tokens, block_hashes, salt)
        reason = NOT_SHARED if self._stores.figures.whole else explanation.reason
        volatile = self._volatile(explanation, tokens, block_hashes, salt)
        if volatile is not None:
            reason += f". Kind of the changed text: {volatile.kind}"
            explanation = replace(
                explanation,
                volatile=volatile.kind,
                volatile_held=volatile.held,
                volatile_given=volatile.given,
            )
        return replace(
            explanation,
            reason=reason + why + self._tier_reason(explanation.held_tokens, tier_tokens),
            reusable_tokens=reusable_tokens,
            tier_tokens=tier_tokens,
            held_text=self._token_text(explanation.held_token),
            given_text=self._token_text(explanation.given_token),
        )

    def _volatile(
        self,
        explanation: Explanation,
        tokens: Sequence[int],
        block_hashes: Sequence[bytes],
        salt: str,
    ) -> Volatile | None:
        """Classify the difference between a prompt and the nearest cached one; None if unknown."""
        position = explanation.diverges_at
        if position is None:
            return None
        cached = tokens_held_at(self._prefixes, tokens, position, block_hashes, salt)
        before = list(tokens[max(0, position - NEAR_TOKENS) : position])
        runs = (cached[:NEAR_TOKENS].tolist(), list(tokens[position : position + NEAR_TOKENS]))
        return name_volatile(*(self._decode([*before, *run]) for run in runs))

    def _tier_tokens(self, block_hashes: Sequence[bytes]) -> int | None:
        """Wait for the length of a prompt's prefix in the cold tiers; None if it is not known."""
        return self._tiers.held_tokens(block_hashes, restoring.ASK_SECONDS)

    def _tier_reason(self, held_tokens: int, tier_tokens: int | None) -> str:
        """Return the explanation's part on cold tiers."""
        reason = ""
        if tier_tokens is not None and tier_tokens > held_tokens:
            where = self._tiers.where
            reason = f". {tier_tokens:,} tokens are {where}, from where they would be read back"
        for name, tier in self._tiers.stats().items():
            if tier.full is not None:
                reason += f". The {name} cache writes no new blocks: {tier.full}"
        return reason

    def _token_text(self, token: int | None) -> str | None:
        return None if token is None else self._decode([token]) or None

    # ---- checks

    def check(self) -> None:
        """Recount all bytes, pins and slots from the arrays; AssertionError if a count differs."""
        self._prefixes.check()
        self._scheduler.check()
        self._draft.check()
        self._budget.check(
            self._admission.sequences.values(),
            self._stores.tails,
            weights=self._count_weights(),
            draft=self._draft.used_bytes,
            reading=self._tiers.paid_bytes,
            scored=self._stores.scored.recount(),
            features=self._count_features(),
        )
        self._admission.check()
