"""Verification of proposed tokens: those that the sampler would generate are accepted.

A draw depends only on seed, choice and position, so the sampler chooses the same token from the
same logits with and without proposals. The distribution remains the model's, and seeded answers are
reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx

from penstock.engine.model.sampling import SampledToken, TokenSampler, sample_all, without_frames

Choice: TypeAlias = SampledToken | Exception


def verified_greedy(
    chosen: Sequence[Choice], proposals: Sequence[Sequence[int]]
) -> list[list[SampledToken] | Exception]:
    """Return the tokens of each row up to the first that was not proposed.

    Args:
        chosen: argmax after each new token, flattened; each row is padded to the length of the
            longest proposal, plus one.
        proposals: proposed tokens of each row, which may be none.

    Returns:
        The accepted tokens of each row and the one after them, or the error of its first token.
    """
    width = 1 + max(map(len, proposals))
    return [
        _accepted(chosen[row * width : row * width + len(proposal) + 1], proposal)
        for row, proposal in enumerate(proposals)
    ]


def _accepted(chosen: Sequence[Choice], proposal: Sequence[int]) -> list[SampledToken] | Exception:
    tokens: list[SampledToken] = []
    for index, choice in enumerate(chosen):
        if isinstance(choice, Exception):
            return tokens or choice
        tokens.append(choice)
        if index < len(proposal) and choice.token != proposal[index]:
            break
    return tokens


def verified(
    logits: mx.array,
    proposals: Sequence[Sequence[int]],
    samplers: Sequence[TokenSampler],
    generated: Sequence[Sequence[int]],
) -> list[list[SampledToken] | Exception]:
    """Sample the tokens of each row up to the first that was not proposed.

    Args:
        logits: evaluated logits, (rows, width, vocabulary); width is 1 plus the length of the
            longest proposal.
        proposals: proposed tokens of each row, which may be none.
        samplers: sampler of each row.
        generated: all tokens that each row has generated before.

    Returns:
        The accepted tokens of each row and the one after them, or the error of its first token.
    """
    first = sample_all(logits[:, 0], samplers, generated)
    rows: list[list[SampledToken] | Exception] = []
    for row, choice in enumerate(first):
        if isinstance(choice, Exception):
            rows.append(choice)
            continue
        rows.append(_go_on([choice], logits[row], proposals[row], samplers[row], generated[row]))
    return rows


def _go_on(
    tokens: list[SampledToken],
    logits: mx.array,
    proposal: Sequence[int],
    sampler: TokenSampler,
    generated: Sequence[int],
) -> list[SampledToken]:
    ahead = sampler.ahead() if proposal else sampler
    for index, proposed in enumerate(proposal):
        if tokens[index].token != proposed:
            break
        before = [*generated, *(token.token for token in tokens)]
        try:
            if ahead.accept(proposed):  # the answer is complete
                break
            tokens.append(ahead.choose(logits[index + 1], before))
        # If the error persists, the next step raises it for its first token.
        except Exception as error:  # noqa: BLE001
            without_frames(error)
            break
    return tokens
