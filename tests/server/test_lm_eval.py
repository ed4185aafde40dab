"""A multiple-choice task of `lm-eval` on the server matches mlx-lm alone.

`lm-eval` is looked for in this environment, or behind PENSTOCK_LM_EVAL, the Python of another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from servers import serving

from penstock import load
from penstock.recall import MODEL_PATH

PYTHON = os.environ.get("PENSTOCK_LM_EVAL") or (sys.executable if find_spec("lm_eval") else "")
TASK = """
task: falcons
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{questions}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""
FACT = "The code of the amber falcon is 4821. The code of the quiet dolphin is 9064. "
QUESTIONS: list[dict[str, Any]] = [
    {
        "question": FACT * 2 + f"The code of the {animal} is",
        "choices": ["4821", "9064", "the amber falcon"],
        "answer": answer,
    }
    for animal, answer in (("amber falcon", 0), ("quiet dolphin", 1), ("wild heron", 0))
]
NEAR = 5e-3
"""Largest difference of two log-likelihoods; weights of four bits, sums in other orders."""


@pytest.mark.skipif(not PYTHON, reason="lm-eval is not installed; see PENSTOCK_LM_EVAL")
def test_lm_eval_scores_match_mlx_lm(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "falcons.yaml").write_text(TASK.format(questions=data))
    with serving(engine={"block_size": 16}) as server:
        subprocess.run(
            [
                *(PYTHON, "-m", "lm_eval", "--model", "local-completions", "--tasks", "falcons"),
                *("--model_args", f"model=recall,base_url={server.url}/v1/completions"),
                *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "results")),
                *("--batch_size", "3", "--log_samples"),
            ],
            check=True,
            timeout=300,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        )
        stats = server.service.engine.stats()
        assert stats.hit_tokens > stats.prefilled_tokens
    (samples,) = (tmp_path / "results").rglob("samples_falcons_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    model, tokenizer = load(MODEL_PATH)
    for row, question in zip(sorted(rows, key=lambda one: one["doc_id"]), QUESTIONS, strict=True):
        found = [(float(value), greedy) for ((value, greedy),) in row["resps"]]
        for (value, greedy), choice in zip(found, question["choices"], strict=True):
            expected, likeliest = likelihood(model, tokenizer, question["question"], f" {choice}")
            assert value == pytest.approx(expected, abs=NEAR)
            assert str(greedy) == str(likeliest)
        best = max(range(len(found)), key=lambda index: found[index][0])
        assert row["acc"] == float(best == question["answer"])
    assert {row["acc"] for row in rows} == {0.0, 1.0}, "some are right, and some are wrong"


def likelihood(model: Any, tokenizer: Any, context: str, text: str) -> tuple[float, bool]:
    """Return the log-likelihood of a text by the model alone, and whether it is greedy."""
    whole = tokenizer.encode(context + text, add_special_tokens=False)
    start = len(tokenizer.encode(context, add_special_tokens=False))
    logits = model(mx.array([whole]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    total, greedy = 0.0, True
    for at in range(start, len(whole)):
        total += logprobs[at - 1, whole[at]].item()
        greedy &= int(mx.argmax(logprobs[at - 1]).item()) == whole[at]
    return total, greedy
