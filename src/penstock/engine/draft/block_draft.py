"""`BlockDraft`: tokens that a block drafter (DFlash) proposes, all in one pass.

The drafter's layers come after the model's in every list of layers and caches, with keys and values
of their own: each pass of the model writes them for the tokens it reads. A proposal uses columns of
the tail that the next pass overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import mlx.core as mx

from penstock.attention.attention_plan import in_order
from penstock.engine.draft.draft import NoDraft, chosen_token
from penstock.engine.model.runner import Runner
from penstock.engine.model.sampling import likeliest
from penstock.engine.schedule.sequence import Sequence
from penstock.kv.tails import Tails


class BlockDraft(NoDraft):
    """Proposals by a drafter that is loaded as a part of the model. Engine thread only."""

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
