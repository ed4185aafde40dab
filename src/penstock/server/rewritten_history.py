"""Detection of earlier turns rewritten by the chat template, whose tokens are computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import PenstockError
from penstock.server.prompts import Message, Prompts
from penstock.server.remembered_answers import SHOWN, Opening
from penstock.server.templates import shared

NO_OPENING = Opening("", "")


def rewritten_in_front(
    prompts: Prompts, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
) -> str | None:
    """Describe the text that the template rewrites before a conversation's last answer.

    Returns None if nothing is rewritten or there is no answer. Blocking: renders the prompt twice.
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers or not answers[-1]:
        return None
    try:
        before = prompts.template_text(messages[: answers[-1]], tools)
        after = prompts.template_text(messages, tools)
    except PenstockError:
        return None
    common = shared(before, after)
    for text, bare in (*prompts.openings, NO_OPENING):
        if before.endswith(text) and common >= len(before) - len(text) + len(bare):
            return None
    ours, theirs = (text[common : common + SHOWN] for text in (before, after))
    return (
        f"The chat template rewrites the text before messages.{answers[-1]}, from "
        f"character {common:,} on: {ours!r} became {theirs!r}"
    )
