"""Any two engine features work together, or the docs' table says why not."""

from __future__ import annotations

import functools
import itertools
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_faults import model_of
from tiny_families import build, uncompiled

from penstock.attention import devices
from penstock.config import EngineSettings
from penstock.engine.draft.draft_choice import open_draft
from penstock.engine.foundation import lay_foundation
from penstock.engine.model.runner import Runner
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.settings import checked, fitting
from penstock.errors import SettingError
from penstock.ledger import Ledger

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
TITLE = "## What does not go together, and why"
CODEC = {"kv_cache_quantization": "turbo8"}
CHOICE = {"attend_tokens": 128}
SETTINGS: dict[str, dict[str, Any]] = {
    "attend_tokens": CHOICE,
    "attend_rest": {**CHOICE, "attend_rest": True},
    "attend_prompt": {**CHOICE, "attend_prompt": 128},
    "attend_full_layers": {**CHOICE, "attend_full_layers": (0,)},
    "active_kv_size": {**CHOICE, "active_kv_size": 256, "ssd_cache_dir": "cold"},
    "speculative_tokens": {"speculative_tokens": 2},
    "draft_model": {"speculative_tokens": 2, "draft_model": "small"},
    "hot_cache_only": {"hot_cache_only": True},
    "ssd_cache_dir": {"ssd_cache_dir": "cold"},
    "remote_cache": {"remote_cache": "file:///cold"},
    "kv_cache_quantization": CODEC,
    "kv_cache_quantize_when": {**CODEC, "kv_cache_quantize_when": "active"},
    "kv_cache_skip_layers": {**CODEC, "kv_cache_skip_layers": (0,)},
    "kernels": {"kernels": "off"},
}
"""Settings that turn something on, or off."""
SIZES = {
    *("memory_limit", "memory_threshold", "max_kv_size", "keep", "max_batch_size"),
    *("prefill_chunk", "max_stall_ms", "block_size", "max_queue", "ssd_cache_limit"),
    *("ssd_write_budget", "remote_cache_ttl_seconds", "remote_cache_timeout_seconds"),
    *("kv_cache_min_quantize_tokens", "kv_cache_raw_first_tokens"),
}
"""Settings that say how much of something."""
CODECS = {"kivi": {"kv_cache_quantization": "kivi4"}}
MODELS = {
    "a model of joined keys and values": "gemma2",
    "a model of latents": "deepseek_v3",
    "a model with an index of its own": "deepseek_v32",
    "a model with recurrent layers": "falcon_h1",
    "a model with sliding windows": "cohere2",
    "a model whose layers compress": "deepseek_v41",
}
MACHINES = {"several machines": 2, "whole layers for each machine": 2}
NEEDS = {
    "attend_rest": ["attend_tokens"],
    "attend_prompt": ["attend_tokens"],
    "attend_full_layers": ["attend_tokens"],
    "active_kv_size": ["attend_tokens", "ssd_cache_dir"],
    "draft_model": ["speculative_tokens"],
    "kv_cache_quantize_when": ["kv_cache_quantization"],
    "kv_cache_skip_layers": ["kv_cache_quantization"],
    "kivi": ["kv_cache_quantization"],
    "whole layers for each machine": ["several machines"],
    "a model whose layers compress": ["a model of joined keys and values"],
    "a model with an index of its own": ["a model of latents"],
}
"""What has the limits of others as well, because it is nothing without them."""
FEATURES = [*SETTINGS, *CODECS, *MODELS, *MACHINES]
Pair = frozenset[str]


def rows() -> list[list[str]]:
    """Return the cells of the table's rows."""
    text = PAGE.read_text().partition(TITLE)[2].partition("\n|")[2].partition("\n\n")[0]
    lines = text.splitlines()[2:]
    return [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines
    ]


def outcomes_in_table() -> dict[Pair, str]:
    """Return the table's outcome of each pair: "refused", "off", or nothing."""
    said = {}
    for one, others, what, why in rows():
        assert what in ("refused", "off") and why
        for other in re.split(r", ", others):
            assert {one, other} <= set(FEATURES), f"{one} and {other}"
            said[frozenset((one, other))] = what
    return said


def expected_outcome(one: str, other: str) -> str:
    """Return the table's outcome of two features and their requirements."""
    said = outcomes_in_table()
    pairs = itertools.product((one, *NEEDS.get(one, ())), (other, *NEEDS.get(other, ())))
    found = {said.get(frozenset(pair), "") for pair in pairs}
    return next((what for what in ("refused", "off") if what in found), "")


@functools.cache
def runner_of(family: str) -> Runner:
    with uncompiled():
        model = model_of(family) if family in ("llama", "gemma2", "falcon_h1") else build(family)
        return Runner(model, devices.current(), max_kv_size=1_024, keep=0)


class TwoMachines(ProcessGroup):
    """A group of which this process is the first."""

    size = 2


def tried(*features: str) -> str:
    """Return the outcome of features together: "refused", "off", or nothing."""
    names = sorted(features, key=lambda name: name in CODECS)  # a codec's name comes last
    asked: dict[str, Any] = {"memory_limit": 10**9}
    for name in names:
        asked |= SETTINGS.get(name, CODECS.get(name, {}))
    family = next((MODELS[name] for name in names if name in MODELS), "llama")
    ranks = 2 if set(features) & set(MACHINES) else 1
    runner = runner_of(family)
    if "attend_full_layers" in asked:  # of those that read all tokens
        asked["attend_full_layers"] = (min(runner.selectable_layers),)
    by_layers, inner = "whole layers for each machine" in features, runner.model.model
    try:
        if by_layers:
            inner.pipeline_size = 2  # as mlx-lm says it of a part
        limits = fitting(checked(asked), runner, 10**9, ranks)
        if "draft_model" in features and ranks > 1:
            drafts(TwoMachines(time.monotonic))
    except SettingError:
        return "refused"
    finally:
        if by_layers:
            inner.pipeline_size = 1
    return "off" if "speculative_tokens" in asked and not limits.speculative_tokens else ""


def drafts(group: ProcessGroup) -> None:
    """Open a draft model beside a model."""
    ledger = Ledger(10**9)
    limits = checked({"memory_limit": 10**9}, drafts=True)
    base = lay_foundation(model_of("llama"), limits, ProcessGroup(time.monotonic), ledger)
    open_draft((model_of("llama"), None), None, replace(base, group=group), None)  # type: ignore[arg-type]


def test_every_setting_is_listed_as_feature_or_size() -> None:
    assert set(SETTINGS) | SIZES == set(EngineSettings.model_fields)
    assert not set(SETTINGS) & SIZES


@pytest.mark.parametrize("one", FEATURES)
def test_feature_pairs_work_unless_listed_in_docs(one: str) -> None:
    kinds = (MODELS, MACHINES)
    for other in FEATURES:
        if one != other and not any(one in kind and other in kind for kind in kinds):
            assert tried(one, other) == expected_outcome(one, other), f"{one} with {other}"


def test_check_detects_superfluous_table_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    row = ["attend_tokens", "speculative_tokens", "refused", "nothing"]
    said = rows()
    monkeypatch.setitem(globals(), "rows", lambda: [*said, row])
    with pytest.raises(AssertionError, match="attend_rest with speculative_tokens"):
        test_feature_pairs_work_unless_listed_in_docs("attend_rest")
