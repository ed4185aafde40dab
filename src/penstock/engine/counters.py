"""Running totals of an engine since its start."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

REMEMBERED_STEPS = 512


@dataclass(slots=True)
class Counters:
    requests: int = 0
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    restored_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
    failed_proposals: int = 0
    preemptions: int = 0
    out_of_memory: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    model_seconds: float = 0.0
    decode_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    prefill_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
