"""How much a model is to reason, in the words of its own chat template."""

from __future__ import annotations

from typing import Any

from penstock.server.prompts import Prompts

LEAST_EFFORTS = ("none", "minimal")
"""Efforts that turn reasoning off where the template can."""
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts as templates know them: low, medium, high."""


def effort_switches(effort: str | None, prompts: Prompts) -> dict[str, Any]:
    """Return the template's own switches for how much the model reasons."""
    if effort is None:
        return {}
    reasons = effort not in LEAST_EFFORTS
    switches: dict[str, Any] = thinking_switch(prompts, reasons)
    if prompts.reasoning_marks is not None:
        switches["enable_thinking"] = reasons
    if prompts.traits.reasoning_effort:
        switches["reasoning_effort"] = EFFORTS.get(effort, effort)
    return switches


def thinking_switch(prompts: Prompts, reasons: bool) -> dict[str, Any]:
    """Return `thinking` for a template that reads it; nothing for others, which may raise on it."""
    return {"thinking": reasons} if prompts.traits.thinking else {}
