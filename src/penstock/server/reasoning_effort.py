"""Mapping of reasoning efforts to arguments of chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.server.prompts import Prompts

LEAST_EFFORTS = ("none", "minimal")
"""Efforts that turn reasoning off if the template allows it."""
_LEVELS: Mapping[str, tuple[str, ...]] = {
    "none": ("low", "none"),
    "minimal": ("low", "none"),
    "low": ("low", "medium", "high"),
    "medium": ("medium", "high", "low"),
    "high": ("high", "medium", "xhigh"),
    "xhigh": ("high", "xhigh"),
    "max": ("high", "xhigh"),
}
"""Template levels by effort, nearest first.

Some templates raise on unknown levels: Mistral's accept none and high; Qwen 3.8's low, medium and
xhigh (above high).
"""
_STRENGTHS = {**_LEVELS, "xhigh": ("xhigh", "high"), "max": ("xhigh", "high")}
"""Levels of Muse Spark's `reasoning_strength` by effort, with a level above high."""


def effort_switches(effort: str | None, prompts: Prompts) -> dict[str, Any]:
    if effort is None:
        return {}
    reasons = effort not in LEAST_EFFORTS
    switches: dict[str, Any] = thinking_switch(prompts, reasons)
    if prompts.reasoning_marks is not None:
        switches["enable_thinking"] = reasons
    return switches | level_switch(effort, prompts)


def level_switch(effort: str | None, prompts: Prompts) -> dict[str, str]:
    efforts, strengths = prompts.traits.reasoning_effort, prompts.traits.reasoning_strength
    switches: dict[str, str] = {}
    if effort is not None and efforts:
        switches["reasoning_effort"] = _nearest(_LEVELS.get(effort, (effort,)), efforts)
    if effort is not None and strengths:
        switches["reasoning_strength"] = _nearest(_STRENGTHS.get(effort, (effort,)), strengths)
    return switches


def _nearest(levels: tuple[str, ...], taken: tuple[str, ...]) -> str:
    return next((level for level in levels if level in taken), levels[0])


def thinking_switch(prompts: Prompts, reasons: bool) -> dict[str, Any]:
    return {"thinking": reasons} if prompts.traits.thinking else {}
