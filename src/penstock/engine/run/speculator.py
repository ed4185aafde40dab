"""Speculative decoding: propose tokens for a decode step to verify.

    propose ──> a proposal per sequence, as far as its grammar allows ──> cut to the best width
        draft   ──> tokens of a draft model, if they pay for the time of drafting
        judge   ──> record the step time and the accepted tokens

An error here only costs a proposal and is counted; answers do not depend on proposals.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items

from penstock.engine.draft.draft import Draft, NoDraft
from penstock.engine.model.proposals import (
    DRAFTED,
    FIRST_SHARE,
    LONGEST_NGRAM,
    NOTHING,
    NgramProposer,
    PredictionProposer,
    Proposal,
    Proposer,
    outcomes,
)
from penstock.engine.model.sampling import Rule
from penstock.engine.model.shared_text import SharedProposer, SharedText
from penstock.engine.model.step_costs import FORGET_STEPS, StepCosts
from penstock.engine.prefill_rate import RunningMean
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.sequence import Sequence

logger = logging.getLogger(__name__)


class Speculator:
    """Proposes tokens for an engine's sequences. Not thread-safe: owned by the engine's thread.

    Args:
        stores: KV stores. A proposal fits into the sequence's tail and its current block.
        limit: maximum proposed tokens per sequence and step; 0 disables proposals.
    """

    def __init__(self, stores: KVStores, limit: int, draft: Draft | NoDraft) -> None:
        self.max_tokens = limit
        self._stores = stores
        self._counters = stores.counters
        self._costs = StepCosts(drafts_at_once=draft.drafts_at_once)
        self._shared = SharedText() if limit else SharedText(0)
        self._draft = draft
        self._draft_share = RunningMean(FIRST_SHARE)
        """Acceptance rate of drafted tokens, over all sequences."""
        self._undrafted = 0

    def forget(self) -> None:
        self._shared.clear()

    def propose(self, sequences: Items[Sequence]) -> list[Proposal]:
        checked = nothing = [NOTHING] * len(sequences)
        if not self.max_tokens:
            return nothing
        proposals = [self._proposal(sequence) for sequence in sequences]
        try:
            if self._draft.proposes:
                proposals = self._drafted(sequences, proposals)
            if proposals != nothing and (
                width := self._costs.best_width(_expected(sequences, proposals))
            ):
                checked = [Proposal(tokens[:width], agreement) for tokens, agreement in proposals]
        # Errors cost a proposal, never an answer.
        except Exception:  # noqa: BLE001
            self._note_fault()
        return checked

    def judge(
        self,
        sequences: Items[Sequence],
        proposals: Items[Proposal],
        accepted: Items[int | None],
        seconds: float | None,
    ) -> None:
        """Record the accepted tokens and the time of a step.

        Args:
            accepted: number of accepted tokens per sequence; None for a failed row.
            seconds: time of the step; None if it included other work.
        """
        if not self.max_tokens:
            return
        try:
            width = max([len(proposal.tokens) for proposal in proposals])
            if seconds is not None:
                self._costs.add(len(sequences), width, seconds)
            for sequence, (tokens, agreement), right in zip(
                sequences, proposals, accepted, strict=True
            ):
                if right is not None:
                    sequence.speculation.judged(len(tokens), right, agreement)
                    self._counters.proposed_tokens += len(tokens)
                    self._counters.accepted_tokens += right
                    if agreement == DRAFTED:
                        self._judge_draft(len(tokens), right)
            if self._draft.proposes:
                self._retry(sequences)
        # As in `propose`.
        except Exception:  # noqa: BLE001
            self._note_fault()

    def _drafted(self, sequences: Items[Sequence], proposals: list[Proposal]) -> list[Proposal]:
        rooms = [min(self._room(sequence), self._draft.most_tokens) for sequence in sequences]
        wanting = [i for i, s in enumerate(sequences) if rooms[i] and _wants(s, proposals[i])]
        texts = _expected(sequences, proposals)
        hoped = list(texts)
        for i in wanting:
            hoped[i] = (rooms[i], sequences[i].speculation.share(DRAFTED))
        width, speed = self._costs.best(hoped, len(wanting))
        if not wanting or speed <= self._costs.best(texts)[1]:
            return proposals
        try:
            saved = self._costs.saved_seconds(len(sequences), speed)
            ready = self._draft.follow(
                [sequences[i] for i in wanting],
                [saved * sequences[i].missing_tokens for i in wanting],
            )
            wanting = [i for i, is_ready in zip(wanting, ready, strict=True) if is_ready]
            limits = [min(width, rooms[i]) for i in wanting]
            drafts = self._timed([sequences[i] for i in wanting], limits)
            return _merged(sequences, proposals, dict(zip(wanting, drafts, strict=True)))
        # As in `propose`.
        except Exception:  # noqa: BLE001
            self._note_fault()
            self._draft.drop()
            return proposals

    def _timed(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return the draft model's tokens, and record the time per pass."""
        started = time.perf_counter()
        drafts = self._draft.draft(sequences, limits)
        if longest := max(map(len, drafts), default=0):
            self._costs.add_draft(len(sequences), longest, time.perf_counter() - started)
        return drafts

    def _judge_draft(self, proposed: int, right: int) -> None:
        self._counters.drafted_tokens += proposed
        self._counters.accepted_draft_tokens += right
        self._undrafted = 0
        for value in outcomes(proposed, right):
            self._draft_share.add(value)

    def _retry(self, sequences: Items[Sequence]) -> None:
        """Reset the draft model's acceptance rate after many steps without drafted tokens."""
        self._undrafted += 1
        if self._undrafted > FORGET_STEPS:
            self._undrafted = 0
            self._draft_share.value = max(self._draft_share.value, FIRST_SHARE)
            for sequence in sequences:
                sequence.speculation.expect(DRAFTED, self._draft_share.value)

    def _proposal(self, sequence: Sequence) -> Proposal:
        try:
            limit, speculation = self._room(sequence), sequence.speculation
            if not speculation.proposers:
                speculation.proposers = self._proposers(sequence)
                speculation.expect(DRAFTED, self._draft_share.value)
            proposal = self._known(speculation.propose(sequence.kv.tokens, limit))
            if len(proposal.tokens) > limit:
                proposal = Proposal(proposal.tokens[:limit], proposal.agreement)
            return _allowed(sequence.sampler.constraint, proposal, limit)
        # As in `propose`.
        except Exception:  # noqa: BLE001
            self._note_fault()
            return NOTHING

    def _known(self, proposal: Proposal) -> Proposal:
        """Return the part of a proposal before the first placeholder, such as an image's."""
        size = self._stores.figures.vocabulary_size
        unknown = (i for i, token in enumerate(proposal.tokens) if token >= size)
        first = next(unknown, None)
        return proposal if first is None else Proposal(proposal.tokens[:first], proposal.agreement)

    def _note_fault(self) -> None:
        logger.warning("proposing tokens failed; the step continues without them", exc_info=True)
        self._counters.failed_proposals += 1

    def _room(self, sequence: Sequence) -> int:
        """Return the maximum number of tokens to propose within the tail and the block."""
        return max(0, min(self.max_tokens, sequence.step_room - 1))

    def _proposers(self, sequence: Sequence) -> list[Proposer]:
        request = sequence.request
        root = self._stores.prefixes.root(request.salt)
        shared = SharedProposer(self._shared, sequence.id, root, sequence.kv.matched_tokens)
        proposers: list[Proposer] = [NgramProposer(), shared]
        if request.prediction:
            proposers.insert(0, PredictionProposer(request.prediction, sequence.prompt_tokens))
        return proposers


def _expected(sequences: Items[Sequence], proposals: Items[Proposal]) -> list[tuple[int, float]]:
    return [
        (len(proposal.tokens), sequence.speculation.share(proposal.agreement))
        for sequence, proposal in zip(sequences, proposals, strict=True)
    ]


def _wants(sequence: Sequence, proposal: Proposal) -> bool:
    """Return whether drafted tokens are expected to be accepted more often than a proposal."""
    speculation = sequence.speculation
    better = speculation.share(DRAFTED) > speculation.share(proposal.agreement)
    return better or not proposal.tokens


def _merged(
    sequences: Items[Sequence], proposals: Items[Proposal], drafts: dict[int, list[int]]
) -> list[Proposal]:
    """Return the proposals, with some replaced by drafted tokens, as far as grammars allow."""
    return [
        _allowed(sequences[i].sampler.constraint, Proposal(drafts[i], DRAFTED), len(drafts[i]))
        if drafts.get(i)
        else proposal
        for i, proposal in enumerate(proposals)
    ]


def _allowed(rule: Rule, proposal: Proposal, limit: int) -> Proposal:
    """Return the tokens that a constraint forces, else the part of a proposal that it allows."""
    if forced := rule.forced()[:limit]:
        return Proposal(forced, LONGEST_NGRAM)
    return Proposal(proposal.tokens[: rule.allowed_tokens(proposal.tokens)], proposal.agreement)
