"""`HeadDraft`: tokens that the model's multi-token head or EAGLE drafter proposes, one by one.

The head's keys and values are those of the model's last layer, and its hidden state is among the
recurrent states of a sequence: each pass of the model writes them for the tokens it reads. A
proposal goes on from there into columns of the tail that the next pass overwrites.
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
    """Proposals by a head whose weights, KV and states are the model's. Engine thread only."""

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
