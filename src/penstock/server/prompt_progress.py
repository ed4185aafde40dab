"""Prompt progress, as objects in chunks and pings, and as text in comments."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sse_starlette import ServerSentEvent

from penstock.engine.handle import Handle, PromptProgress
from penstock.plurals import counted

MILLISECONDS = 1_000


def progress_of(handles: Iterable[Handle]) -> PromptProgress | None:
    """Sum the progress of several prompts; None while all wait for admission."""
    handles = list(handles)
    known = [handle.progress for handle in handles if handle.progress is not None]
    if not known:
        return None
    return PromptProgress(
        prompt_tokens=sum(len(handle.request.prompt) for handle in handles),
        cached_tokens=sum(progress.cached_tokens for progress in known),
        done_tokens=sum(progress.done_tokens for progress in known),
        seconds=max(progress.seconds for progress in known),
    )


def progress_object(progress: PromptProgress) -> dict[str, Any]:
    """Return llama.cpp's progress object, with an estimate of the rest.

    >>> progress_object(PromptProgress(1_000, 200, 600, 2.0))["left_ms"]
    2000
    """
    left = progress.seconds_left
    return {
        "total": progress.prompt_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.done_tokens,
        "time_ms": round(progress.seconds * MILLISECONDS),
        "left_ms": None if left is None else round(left * MILLISECONDS),
    }


def progress_words(progress: PromptProgress) -> str:
    """Describe the progress in a sentence, for a comment.

    >>> progress_words(PromptProgress(1_000, 200, 600, 2.0))
    'prompt: 600 of 1,000 tokens, about 2 s left'
    """
    words = f"prompt: {progress.done_tokens:,} of {counted(progress.prompt_tokens, 'token')}"
    left = progress.seconds_left
    return words if left is None else f"{words}, about {left:.0f} s left"


def ping_comment(progress: PromptProgress | None) -> ServerSentEvent:
    words = "ping" if progress is None or progress.done else progress_words(progress)
    return ServerSentEvent(comment=words, sep="\n")


def ping_event(progress: PromptProgress | None) -> ServerSentEvent:
    ping: dict[str, Any] = {"type": "ping"}
    if progress is not None and not progress.done:
        ping["prompt_progress"] = progress_object(progress)
    return ServerSentEvent(event="ping", data=json.dumps(ping, separators=(",", ":")), sep="\n")
