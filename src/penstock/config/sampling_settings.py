"""Sampling settings of answers generated in this process."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.config.defaults import MAX_TOKENS, TEMPERATURE
from penstock.config.setting import Setting, Settings


class SamplingSettings(Settings):
    max_tokens: Annotated[
        int, Field(ge=1), Setting("Generate at most this many tokens per answer.", "TOKENS")
    ] = MAX_TOKENS
    temperature: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        Setting("Sampling temperature; 0 selects the likeliest token.", "NUMBER"),
    ] = TEMPERATURE
    top_p: Annotated[
        float,
        Field(gt=0.0, le=1.0),
        Setting("Sample from the likeliest tokens with this total probability.", "SHARE"),
    ] = 1.0
    seed: Annotated[
        int | None,
        Field(ge=0, lt=2**64),
        Setting("Random seed of the sampling.", "NUMBER", unset="a new one each time"),
    ] = None
