"""Prompts whose log-probabilities are asked for: their refusals, and the memory that they take."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.memory import format_bytes
from penstock.server.problems import BadRequest
from penstock.server.prompt_memory import HOLD

MOST_TOP = 20
"""Most likely tokens that are asked for by their number."""
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


def top_of(given: int | None, vocabulary_size: int) -> int | None:
    """Return the likeliest tokens that `prompt_logprobs` asks for; -1 is the whole vocabulary.

    >>> top_of(-1, 4_096), top_of(5, 4_096), top_of(None, 4_096)
    (4096, 5, None)
    """
    return vocabulary_size if given == -1 else given


def hold_scores(prompts: Sequence[Sequence[int]], top: int, copies: int = 1) -> None:
    """Hold the memory of the scores of prompts until their response is written.

    Args:
        prompts: their tokens.
        top: likeliest tokens beside each.
        copies: of each prompt's scores in the response.

    Raises:
        BadRequest: the whole vocabulary is more than there is for all prompts together.
        TooLarge: fewer tokens are.
        Unavailable: others hold it.
    """
    hold, tokens = HOLD.get(), sum(map(len, prompts))
    if hold is None:
        return
    nbytes = tokens * copies * (TOKEN_SCORE_BYTES + top * TOP_SCORE_BYTES)
    if top > MOST_TOP and nbytes > hold.most_free_bytes:
        raise BadRequest(
            f"prompt_logprobs: all {top} tokens of the vocabulary beside each of {tokens} tokens "
            f"take {format_bytes(nbytes)}; there are {format_bytes(hold.most_free_bytes)} for all "
            f"prompts. Ask for at most {MOST_TOP}, send less, or raise --memory-limit",
            param="prompt_logprobs",
        )
    hold.keep(nbytes)
