"""Prompts whose log-probabilities are asked for: what is refused, and the memory that they take."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.server.problems import BadRequest
from penstock.server.prompt_memory import HOLD

TOKEN_SCORE_BYTES = 900
"""Bytes of one token's score, from the engine's numbers to the text of the response."""
TOP_SCORE_BYTES = 400
"""Bytes of each likely token beside it."""


def check_scores(top: int | None, *, stream: bool) -> None:
    """Refuse `prompt_logprobs` in a stream, as vLLM does.

    Raises:
        BadRequest: it is asked for.
    """
    if top is not None and stream:
        raise BadRequest(
            "prompt_logprobs do not come in a stream; leave stream out", param="prompt_logprobs"
        )


def hold_scores(prompts: Sequence[Sequence[int]], top: int, copies: int = 1) -> None:
    """Hold the memory of the scores of prompts until their response is written.

    Args:
        prompts: their tokens.
        top: likeliest tokens beside each.
        copies: of each prompt's scores in the response.

    Raises:
        TooLarge: it is more than there is for all prompts together.
        Unavailable: others hold it.
    """
    hold, tokens = HOLD.get(), sum(map(len, prompts))
    if hold is not None:
        hold.keep(tokens * copies * (TOKEN_SCORE_BYTES + top * TOP_SCORE_BYTES))
