"""Log-probabilities of prompts: limits and memory estimates."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.memory.sizes import format_bytes
from penstock.plurals import counted
from penstock.server.problems import BadRequest
from penstock.server.prompt_memory import HOLD

MOST_TOP = 20
"""Maximum number of log-probabilities per prompt token, unless all are requested."""
TOKEN_SCORE_BYTES = 900
"""Estimated bytes per prompt token, from the engine's score to the response text."""
TOP_SCORE_BYTES = 400
"""Estimated bytes per additional token reported for a prompt token."""


def check_scores(top: int | None, *, stream: bool) -> None:
    if top is not None and stream:
        raise BadRequest(
            "prompt_logprobs cannot be streamed; leave stream out", param="prompt_logprobs"
        )


def top_of(prompt_logprobs: int | None, vocabulary_size: int) -> int | None:
    """Return the number of scores per token that `prompt_logprobs` asks for; -1 means all.

    >>> top_of(-1, 4_096), top_of(5, 4_096), top_of(None, 4_096)
    (4096, 5, None)
    """
    return vocabulary_size if prompt_logprobs == -1 else prompt_logprobs


def hold_scores(prompts: Sequence[Sequence[int]], top: int, copies: int = 1) -> None:
    """Reserve memory for the log-probabilities of prompts until the response is written.

    Args:
        prompts: tokens of each prompt.
        top: number of likeliest tokens per prompt token.
        copies: number of answers that report them.

    Raises:
        BadRequest: `top` exceeds `MOST_TOP`, and they exceed the memory for prompts.
        TooLarge, Unavailable: see `PromptHold.resize`.
    """
    hold, tokens = HOLD.get(), sum(map(len, prompts))
    if hold is None:
        return
    nbytes = tokens * copies * (TOKEN_SCORE_BYTES + top * TOP_SCORE_BYTES)
    if top > MOST_TOP and nbytes > hold.most_free_bytes:
        raise BadRequest(
            f"prompt_logprobs: all {counted(top, 'token')} of the vocabulary for each "
            f"of {counted(tokens, 'token')} take {format_bytes(nbytes)}; "
            f"there are {format_bytes(hold.most_free_bytes)} for all prompts. "
            f"Ask for at most {MOST_TOP}, send less, or raise --memory-limit",
            param="prompt_logprobs",
        )
    hold.keep(nbytes)
