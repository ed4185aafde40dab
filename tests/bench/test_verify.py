"""`penstock bench verify`: answers cold, from memory and from disk are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from penstock.cli import main
from penstock.engine.offload import engine_tier as tier_module
from penstock_bench.replay import ReplayedAnswer, ReplayVerdict


def verified(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "verify", "--json", "--max-tokens", "6", *flags])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("reads_all")
def test_verify_bench_passes_on_own_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verified(capsys)
    assert code == 0 and found["same"]
    for prompt in found["prompts"]:
        assert prompt["same_tokens"] and prompt["difference"] < 1e-3
        assert prompt["cached_tokens"]["cold"] == 0
        whole = (prompt["prompt_tokens"] - 1) // 64 * 64
        assert prompt["cached_tokens"]["memory"] >= whole
        assert prompt["cached_tokens"]["disk"] >= whole
    assert len(found["prompts"]) == 8


def test_verify_bench_detects_corrupted_kv(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: corrupted keys and values."""

    class Wrong(tier_module.RestoreBuffer):
        def segment(self) -> Any:
            found = super().segment()
            layers = tuple((keys * 0.5, values * -1.0) for keys, values in found.layers)
            mx.eval(layers)
            return type(found)(layers)  # type: ignore[arg-type]

    monkeypatch.setattr(tier_module, "RestoreBuffer", Wrong)
    code, found = verified(capsys)
    assert code == 1 and not found["same"]


def test_verify_bench_reads_prompts_from_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "The code of the amber falcon is 4821. " * 20}]
    lines = [{"messages": messages}, {"prompt": "What is the code of the amber falcon?"}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    code, found = verified(capsys, "--prompts", str(file))
    assert code == 0
    assert len(found["prompts"]) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "holds no prompt"), ("nonsense", "line 1 is no JSON"), ("{}", "neither messages nor")],
)
def test_bad_prompt_file_gives_one_line_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    assert main(["bench", "verify", "--prompts", str(file)]) == 2
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1


def test_replay_verdict_reports_difference() -> None:
    cold = ReplayedAnswer((1, 2, 3), (-0.1, -0.2, -0.3), 0)
    near, far = (
        ReplayedAnswer((1, 2, 3), (-0.1, -0.21, -0.3), 2),
        ReplayedAnswer((1, 2, 4), (-0.1, -0.5, 0.0), 2),
    )
    assert ReplayVerdict(3, {"cold": cold, "memory": near}).is_within(0.02)
    assert not ReplayVerdict(3, {"cold": cold, "memory": near}).is_within(0.001)
    found = ReplayVerdict(3, {"cold": cold, "memory": near, "disk": far})
    assert not found.is_within(1.0)
    assert found.difference == pytest.approx(0.3), "up to the first other token"
    assert found.fault(1.0) == "OTHER TOKENS"
