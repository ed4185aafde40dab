"""Records of other settings: never read, not counted as damaged, and still readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cold_engine import BLOCK, ask, files, running
from combinations import each

PROMPT = tuple(7 * i % 251 for i in range(200))
OTHERS: list[dict[str, Any]] = [
    {"block_size": 2 * BLOCK},
    {"block_size": BLOCK // 2},
    {"block_size": 6 * BLOCK, "prefill_chunk": 6 * BLOCK},
    {"keep": 32},
    {"max_kv_size": 512},
    {"attend_tokens": 128, "kernels": "off"},
    {"kv_cache_quantization": "turbo8"},
    {"kv_cache_quantization": "turbo8", "kv_cache_min_quantize_tokens": 0},
]


@pytest.mark.parametrize(("other", "fingerprint"), each(OTHERS, ["", "one model"]), ids=str)
def test_records_of_other_settings_are_misses(
    other: dict[str, Any], fingerprint: str, tmp_path: Path
) -> None:
    settings = {"fingerprint": fingerprint}
    with running(None, **{**settings, **other}) as core:
        expected = ask(core, PROMPT)
    with running(tmp_path, **settings) as core:
        answer = ask(core, PROMPT)
    written = files(tmp_path)
    with running(tmp_path, **{**settings, **other}) as core:
        assert core.preload() == 0
        core.view.check()
        assert ask(core, PROMPT) == expected
        assert core.view.stats().restored_tokens == 0
        counts = core.view.stats().tiers["disk"].counts
        assert counts.damaged_blocks == counts.missing_blocks == 0
    assert set(written) <= set(files(tmp_path))
    with running(tmp_path, **settings) as core:
        whole = (len(PROMPT + answer) - 1) // BLOCK * BLOCK
        assert core.preload() == whole
        core.view.check()
        assert ask(core, PROMPT) == answer
