"""Speculation of an engine: which tokens a decode step checks, and what came of it.

    propose ──> a proposal a sequence, as far as its rule allows ──> all as long as pays
    judge   ──> time of the step, tokens that were right

Whatever fails here is a missing proposal, which is counted; no answer depends on one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager

from penstock.engine.model.proposals import (
    LONGEST_NGRAM,
    NOTHING,
    NgramProposer,
    PredictionProposer,
    Proposal,
    Proposer,
)
from penstock.engine.model.sampling import Rule
from penstock.engine.model.shared_text import SharedProposer, SharedText
from penstock.engine.model.step_costs import StepCosts
from penstock.engine.model.tree_proposer import TreeProposer
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.sequence import Sequence

logger = logging.getLogger(__name__)


class Speculator:
    """Proposes tokens for an engine's sequences. Not thread-safe: the engine's thread.

    Args:
        stores: of keys and values; proposals end with their tails and blocks.
        most: proposed tokens of a sequence in a step; 0 is none.
    """

    def __init__(self, stores: KVStores, most: int) -> None:
        self.most = most
        self._stores = stores
        self._counters = stores.counters
        self._costs = StepCosts()
        self._shared = SharedText() if most else None

    def forget(self) -> None:
        """Forget the text of sequences."""
        if self._shared is not None:
            self._shared.clear()

    def propose(self, sequences: Items[Sequence]) -> list[Proposal]:
        """Return the tokens to check for each sequence in the next step."""
        checked = [NOTHING] * len(sequences)
        if not self.most:
            return checked
        with self._guarded():
            proposals = [self._proposal(sequence) for sequence in sequences]
            expected = [
                (len(proposal.tokens), sequence.speculation.share(proposal.agreement))
                for sequence, proposal in zip(sequences, proposals, strict=True)
            ]
            width = self._costs.best_width(expected)
            checked = [Proposal(tokens[:width], agreement) for tokens, agreement in proposals]
        return checked

    def judge(
        self,
        sequences: Items[Sequence],
        proposals: Items[Proposal],
        accepted: Items[int | None],
        seconds: float,
    ) -> None:
        """Count the proposals that were right, and learn of them and of the step's time.

        Args:
            sequences: of the step.
            proposals: of each.
            accepted: how many first tokens of each were right; None for a row that failed.
            seconds: of the step.
        """
        if not self.most:
            return
        with self._guarded():
            width = max(len(proposal.tokens) for proposal in proposals)
            self._costs.add(len(sequences), width, seconds)
            for sequence, (tokens, agreement), right in zip(
                sequences, proposals, accepted, strict=True
            ):
                if right is not None:
                    sequence.speculation.judged(len(tokens), right, agreement)
                    self._counters.proposed_tokens += len(tokens)
                    self._counters.accepted_tokens += right

    # ---- parts

    def _proposal(self, sequence: Sequence) -> Proposal:
        """Return a sequence's proposal; none where it fails."""
        with self._guarded():
            most = self._room(sequence)
            if not sequence.speculation.proposers:
                sequence.speculation.proposers = self._proposers(sequence)
            tokens, agreement = sequence.speculation.propose(sequence.tokens, most)
            return _allowed(sequence.sampler.constraint, Proposal(tokens[:most], agreement), most)
        return NOTHING

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Go on without a proposal where one fails, and count that."""
        try:
            yield
        # A boundary: a proposal may be missing, an answer may not.
        except Exception:
            logger.warning("a proposal failed", exc_info=True)
            self._counters.failed_proposals += 1

    def _room(self, sequence: Sequence) -> int:
        """Return the most tokens that can be proposed; they end with the tail and the block."""
        kv, size = sequence.kv, self._stores.block_size
        room = min(
            self._stores.tails.columns - kv.tail,
            size - kv.position % size,
            sequence.reserved_tokens - kv.position,
        )
        left = sequence.request.max_tokens - sequence.generated_tokens
        return max(0, min(self.most, room - 1, left - 1))

    def _proposers(self, sequence: Sequence) -> list[Proposer]:
        """Return the proposers of a sequence; the first of those with the same agreement counts."""
        assert self._shared is not None
        kv, request = sequence.kv, sequence.request
        root = self._stores.prefixes.root(request.salt)
        shared = SharedProposer(self._shared, sequence.id, root, kv.matched_tokens)
        proposers: list[Proposer] = [NgramProposer(), TreeProposer(kv), shared]
        if request.prediction:
            proposers.insert(0, PredictionProposer(request.prediction, sequence.prompt_tokens))
        return proposers


def _allowed(rule: Rule | None, proposal: Proposal, most: int) -> Proposal:
    """Return a proposal as far as the answer's rule allows it; tokens that it forces come first."""
    if rule is None:
        return proposal
    if forced := rule.forced()[:most]:
        return Proposal(forced, LONGEST_NGRAM)
    return Proposal(proposal.tokens[: rule.allowed_tokens(proposal.tokens)], proposal.agreement)
