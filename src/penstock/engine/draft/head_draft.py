"""Tokens that a multi-token head, EAGLE drafter or block drafter of the model proposes.

Their keys and values are those of the model's last layers: each pass of the model writes them for
the tokens it reads. A proposal uses columns of the tail that the next pass overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import mlx.core as mx

from penstock.attention.attention_plan import in_order
from penstock.engine.draft.draft import NoDraft, chosen_token
from penstock.engine.model.runner import Runner
from penstock.engine.model.sampling import likeliest
from penstock.engine.schedule.sequence import Sequence
from penstock.kv.tails import Tails


class HeadDraft(NoDraft):
    """Proposals by a head or EAGLE drafter, token by token. Engine thread only.

    Its hidden state is among the recurrent states of a sequence.
    """

    proposes = True

    def __init__(self, runner: Runner, tails: Tails) -> None:
        self._runner = runner
        self._tails = tails

    def follow(self, sequences: Items[Sequence], worth_seconds: Items[float]) -> list[bool]:
        return [sequence.kv.recurrent_state is not None for sequence in sequences]

    def draft(self, sequences: Items[Sequence], limits: Items[int]) -> list[list[int]]:
        """Propose up to `limits[i]` tokens for sequence i, in one batched pass per token."""
        starts = [sequence.row() for sequence in sequences]
        hidden = [_hidden(sequence) for sequence in sequences]
        drafts: list[list[int]] = [[] for _ in sequences]
        for depth in range(max(limits, default=0)):
            members = [i for i, limit in enumerate(limits) if depth < limit]
            ahead = [
                replace(starts[i], position=starts[i].position + depth, tail=starts[i].tail + depth)
                for i in members
            ]
            order = in_order(ahead)
            members, rows = [members[i] for i in order], [ahead[i] for i in order]
            tokens = [(drafts[i] or sequences[i].tokens)[-1] for i in members]
            before = mx.concatenate([hidden[i] for i in members])
            logits, after = self._runner.predict(tokens, before, rows, self._tails)
            best = likeliest(logits)
            mx.eval(best.tokens, best.values, after, self._tails.buffers())
            for row, (i, choice) in enumerate(zip(members, best.read(), strict=True)):
                drafts[i].append(chosen_token(choice))
                hidden[i] = after[row : row + 1]
        return drafts


def _hidden(sequence: Sequence) -> mx.array:
    """Return the hidden state of a sequence's last computed token, (1, 1, width)."""
    state = sequence.kv.recurrent_state
    assert state is not None
    (hidden,) = state.states[-1]
    assert hidden is not None
    return hidden[state.row : state.row + 1]


class BlockDraft(NoDraft):
    """Proposals by a block drafter (DFlash), all in one pass. Engine thread only."""

    proposes = drafts_at_once = True

    def __init__(self, runner: Runner, tails: Tails) -> None:
        self._runner = runner
        self._tails = tails
        self.most_tokens = runner.block_tokens - 1

    def follow(self, sequences: Items[Sequence], worth_seconds: Items[float]) -> list[bool]:
        return [True] * len(sequences)

    def draft(self, sequences: Items[Sequence], limits: Items[int]) -> list[list[int]]:
        """Propose `limits[i]` tokens for sequence i, in one pass per limit."""
        drafts: list[list[int]] = [[] for _ in sequences]
        for limit in sorted({limit for limit in limits if limit}):
            members = [i for i, other in enumerate(limits) if other == limit]
            rows = [sequences[i].row() for i in members]
            order = in_order(rows)
            members, rows = [members[i] for i in order], [rows[i] for i in order]
            tokens = [sequences[i].tokens[-1] for i in members]
            logits = self._runner.predict_block(tokens, limit + 1, rows, self._tails)
            best = likeliest(logits.flatten(0, 1))
            mx.eval(best.tokens, best.values, self._tails.buffers())
            chosen = [chosen_token(choice) for choice in best.read()]
            for number, i in enumerate(members):
                drafts[i] = chosen[number * limit : (number + 1) * limit]
        return drafts
