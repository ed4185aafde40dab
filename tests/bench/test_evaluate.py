"""`penstock eval`: equivalent transforms, sensitivity to a bad codec, and errors."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from penstock.cli import main
from penstock.errors import ModelError
from penstock.kv.codecs.names import parse_scheme
from penstock.models.loading import load
from penstock.models.mlx_lm import encode, plain_caches, render
from penstock.recall import MODEL_PATH
from penstock_bench import attention_error, eval_load, eval_texts, long_tasks
from penstock_bench import evaluate as bench
from penstock_bench.eval_load import EvalLoad, KVSetting
from penstock_bench.evaluate import Estimate
from penstock_bench.key_forms import KeyForm, reform
from penstock_bench.models import LlamaShape, ModelChoice, bench_model
from penstock_bench.recall import dialogue
from penstock_bench.report import Report

SMALL = EvalLoad(
    settings=tuple(map(KVSetting, ("k8v4", "2", "turbo4"))),
    forms=(KeyForm.PLAIN, KeyForm.OUTLIERS),
    lengths=(250,),
    questions=12,
    text_tokens=600,
    piece_tokens=300,
    prompts=4,
)
FLAGS = ["--questions", "3", "--length", "250", "--text-tokens", "1000", "--form", "plain"]


@pytest.fixture(scope="module")
def report() -> Report:
    return bench.measure(SMALL)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    _, tokenizer = load(MODEL_PATH)
    return render(tokenizer, dialogue(5, tokens=500, facts=4).messages, answer=False)


def row(report: Report, form: KeyForm, setting: str) -> dict[str, Any]:
    (found,) = (
        row for row in report.penstock["rows"] if (row["form"], row["setting"]) == (form, setting)
    )
    return found


# ---- forms


def raw(form: KeyForm, tokens: list[int]) -> tuple[mx.array, list[mx.array]]:
    """Return all logits computed with mlx-lm's own caches, and each layer's keys."""
    model, _ = load(MODEL_PATH)
    reform(model, form)
    caches = plain_caches(model)
    logits = model(mx.array([tokens]), cache=caches)
    mx.eval(logits)
    return logits, [cache.state[0][0, :, : len(tokens)] for cache in caches]


def test_outlier_transform_keeps_logits_bit_identical(tokens: list[int]) -> None:
    (plain, keys), (logits, large) = raw(KeyForm.PLAIN, tokens), raw(KeyForm.OUTLIERS, tokens)
    assert mx.array_equal(logits, plain)
    for before, after in zip(keys, large, strict=True):
        scale = mx.sqrt((after**2).sum(axis=1) / (before**2).sum(axis=1))
        assert sorted(mx.round(scale).reshape(-1).tolist()) == [1] * 120 + [16] * 8


def test_key_bias_changes_logits_only_by_rounding(tokens: list[int]) -> None:
    (plain, keys), (logits, moved) = raw(KeyForm.PLAIN, tokens), raw(KeyForm.BIASED, tokens)
    assert float(mx.abs(logits - plain).max()) < 1e-4 * float(mx.abs(plain).max())
    assert not mx.array_equal(logits, plain), "something was added"
    # Of the first layer alone: what later ones are given differs by rounding.
    added = moved[0] - keys[0]
    assert float(mx.abs(added - added[:, :1]).max()) < 1e-4
    assert float(mx.abs(added).max()) > 3 * float(mx.sqrt((keys[0] ** 2).mean()))


@pytest.mark.parametrize("half", ["one of a pair is scaled", "added before RoPE"])
def test_check_detects_transform_that_changes_function(half: str, tokens: list[int]) -> None:
    """Negative control: a transform that RoPE does not commute with."""
    model, _ = load(MODEL_PATH)
    attention = model.layers[1].self_attn
    if half == "added before RoPE":
        attention.k_proj.bias = mx.zeros((128,)).at[8].add(10.0)
    else:
        only = mx.ones((64,)).at[8].multiply(16.0)
        attention.k_proj.weight = attention.k_proj.weight * mx.tile(only, 2)[:, None]
        attention.q_proj.weight = attention.q_proj.weight / mx.tile(only, 4)[:, None]
    logits = model(mx.array([tokens]))
    plain, _ = raw(KeyForm.PLAIN, tokens)
    assert float(mx.abs(logits - plain).max()) > 1e-2 * float(mx.abs(plain).max())


def test_models_without_transform_are_refused() -> None:
    shape = LlamaShape(
        layers=1, hidden_size=64, intermediate_size=64, query_heads=2, kv_heads=2, head_dim=32
    )
    model = bench_model(ModelChoice.RANDOM, shape).model
    with pytest.raises(ModelError, match="as many KV heads"):
        reform(model, KeyForm.BIASED)
    model.layers[0].self_attn.rope = object()
    with pytest.raises(ModelError, match="needs a llama model"):
        reform(model, KeyForm.OUTLIERS)


# ---- figures


def test_raw_codec_is_lossless_for_every_key_form(report: Report) -> None:
    for form in SMALL.forms:
        found = row(report, form, "raw")
        assert (found["kl"]["mean"], found["top_1"]["mean"], found["agreement"]["mean"]) == (
            0,
            1,
            1,
        )
        assert (found["bytes_per_token"], found["ratio"]) == (2048, 1)
    plain, large = (row(report, form, "raw") for form in SMALL.forms)
    assert plain["recall"] == large["recall"]
    assert plain["recall"][250]["n"] >= 12
    assert plain["recall"][250]["mean"] >= 0.9
    assert plain["perplexity"] == large["perplexity"]
    assert 1 <= plain["perplexity"]["mean"] < 1.2


def test_nbytes_match_formula(report: Report) -> None:
    for name in ("k8v4", "2", "turbo4"):
        found = row(report, KeyForm.PLAIN, name)
        bits = parse_scheme(name).token_bits(64, 64, 32)
        assert 8 * found["bytes_per_token"] == bits * 2 * 2
        assert found["ratio"] == pytest.approx(2 * 64 * 32 / bits, abs=1e-3)
        assert found["bits"] == pytest.approx(bits / 128, abs=1e-3)


def test_bad_codec_worsens_every_metric(report: Report) -> None:
    """Negative control: 2 bits and outlier channels."""
    good, bad = (row(report, KeyForm.OUTLIERS, name) for name in ("k8v4", "2"))
    assert good["recall_over_raw"][250]["mean"] == 0
    assert bad["recall_over_raw"][250]["mean"] < -0.3
    assert good["kl"]["mean"] < 1e-3 < 0.05 < bad["kl"]["mean"]
    assert bad["perplexity"]["mean"] > 1.1 * good["perplexity"]["mean"]
    assert bad["top_1"]["mean"] < 0.99 <= good["top_1"]["mean"]
    assert bad["agreement"]["mean"] < good["agreement"]["mean"] == 1
    lines = {line.figure: line.met for line in report.lines}
    assert lines["outliers: 2, at its best: is it seen?"]
    assert lines["outliers: k8v4, 250 tokens"]
    assert report.met


def test_scaled_keys_are_accurate_despite_outlier_channels(report: Report) -> None:
    """`affine2`, which takes no scales, is the control."""
    for name in ("turbo4", "k8v4"):
        plain, large = (row(report, form, name)["kl"]["mean"] for form in SMALL.forms)
        assert large < 2 * plain
    plain, large = (row(report, form, "2")["kl"]["mean"] for form in SMALL.forms)
    assert large > 1.2 * plain


def test_missed_goal_is_reported(report: Report) -> None:
    form, setting = KeyForm.OUTLIERS, KVSetting("turbo4")
    rows = [bench.EvalRow(form, one, 1, 0) for one in (eval_load.UNCHANGED, setting)]
    for one, share in zip(rows, (1.0, 0.99), strict=True):
        one.recall[250] = Estimate(100, share, 0.0)
        one.recall_over_raw[250] = Estimate(100, share - 1.0, 0.0)
    (line,) = bench.judged(rows[1], rows)
    assert line.met is False
    rows[1].recall_over_raw[250] = Estimate(1_000, -0.005, 0.0)
    (line,) = bench.judged(rows[1], rows)
    assert line.met is True


def test_small_window_lowers_recall_and_large_keep_preserves_it() -> None:
    settings = (KVSetting("raw", 128, 0), KVSetting("raw", 400, 0), KVSetting("2", 400, 399))
    load_ = EvalLoad(**{**SMALL_SIZES, "settings": settings})
    found = bench.measure(load_).penstock["rows"]
    assert [(row["max_kv_size"], row["keep"]) for row in found][1:] == [
        (128, 0),
        (400, 0),
        (400, 399),
    ]
    shares = [row["recall"][250]["mean"] for row in found]
    assert shares[1] < shares[0] - 0.3
    assert shares[2] == shares[3] == shares[0], "the window holds it all, and what is kept is raw"
    assert {row["form"] for row in found} == {KeyForm.PLAIN}, "no other form for windows"


SMALL_SIZES: dict[str, Any] = {
    "lengths": (250,),
    "questions": 6,
    "text_tokens": 300,
    "piece_tokens": 300,
    "prompts": 2,
}


def test_similarity_of_empty_answers_is_1() -> None:
    assert bench.alike([], []) == 1.0
    assert (bench.alike([1], []), bench.alike([1, 2], [1, 3])) == (0.0, 0.5)


def test_standard_errors_are_clustered_by_text() -> None:
    alone = Estimate.of([[1.0], [2.0], [3.0], [4.0]])
    assert (alone.n, alone.mean) == (4, 2.5)
    assert alone.standard_error == pytest.approx((5 / 3 / 4) ** 0.5)
    same = [[float(i)] * 25 for i in range(1, 5)]
    assert Estimate.of(same).standard_error == pytest.approx(alone.standard_error)
    assert Estimate.of([[0.0, 0.0]]).standard_error == 0
    assert Estimate.of_shares([[0.0] * 50, [0.0] * 50]).standard_error == pytest.approx(
        (0.5 / 101 * (1 - 0.5 / 101) / 100) ** 0.5
    )


def test_only_assistant_tokens_are_scored(tokens: list[int]) -> None:
    _, tokenizer = load(MODEL_PATH)
    (piece,) = eval_texts.pieces(tokenizer, EvalLoad(text_tokens=300, piece_tokens=300))
    said = [t for t, counts in zip(piece.tokens, piece.counts, strict=True) if counts]
    users = [t for t, counts in zip(piece.tokens, piece.counts, strict=True) if not counts]
    assert "<|end|>" in tokenizer.decode(said)
    assert "<|assistant|>" not in tokenizer.decode(said)
    assert "<|user|>" in tokenizer.decode(users)
    ends = piece.ends(3)
    assert len(set(ends)) == 3
    for end in ends:
        assert tokenizer.decode([piece.tokens[end - 1]]).strip() == "<|assistant|>"


# ---- the command


def test_eval_command_prints_plots_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, folder = tmp_path / "eval.png", tmp_path / "results"
    given = ["--codec", "k8v4", "--plot", str(picture), "--save", str(folder), "--json"]
    assert main(["eval", *FLAGS, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["setting"] for row in found["penstock"]["rows"]] == ["raw", "k8v4"]
    assert found["penstock"]["baseline"] == found["environment"]["dtype"] == "float32"
    assert picture.read_bytes().startswith(b"\x89PNG")
    (record,) = folder.glob("eval-*.json")
    assert json.loads(record.read_text())["penstock"] == found["penstock"]


def test_eval_command_prints_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *FLAGS, "--codec", "turbo4", "--keep", "64"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "turbo4, keep 64" in printed


def test_windows_are_measured_for_every_key_form(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["--questions", "1", "--length", "64", "--text-tokens", "200", "--json"]
    forms = ["--form", "plain", "--form", "biased"]
    assert main(["eval", *sizes, *forms, "--codec", "4", "--window", "128"]) == 0
    found = json.loads(capsys.readouterr().out)["penstock"]["rows"]
    settings = ["raw", "raw, window 128", "4, window 128"]
    assert [(row["form"], row["setting"]) for row in found] == [
        (form, setting) for form in ("plain", "biased") for setting in settings
    ]


def test_eval_command_accepts_other_model_and_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_PATH, folder)
    text = tmp_path / "text.txt"
    text.write_text("The code of the amber falcon is 4821. " * 40)
    sizes = ["--text", str(text), "--block-size", "64", "--memory-limit", "200MB"]
    assert main(["eval", str(folder), "--codec", "4", *sizes, "--json"]) == 0
    raw, four = json.loads(capsys.readouterr().out)["penstock"]["rows"]
    assert raw["recall"] == {}
    assert four["kl"]["mean"] > 0 == raw["kl"]["mean"]
    assert four["kl"]["n"] > 300
    assert main(["eval", str(folder), "--length", "100"]) == 2
    assert "--task needs a text: add --text" in capsys.readouterr().err
    assert main(["eval", "--task", "needle"]) == 2
    assert "--task needs another model than the embedded one" in capsys.readouterr().err


def test_long_tasks_use_given_text_and_report_layer_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_PATH, folder)
    sizes = ["--questions", "1", "--length", "400", "--text-tokens", "600", "--continuations", "0"]
    text = ["--text", argparse.__file__, "--text", statistics.__file__]
    given = ["eval", str(folder), "--codec", "2", *text, *sizes, "--json"]
    assert main([*given, "--piece", "300", "--block-size", "64", "--memory-limit", "200MB"]) == 0
    raw, two = json.loads(capsys.readouterr().out)["penstock"]["rows"]
    assert list(raw["recall"]) == [f"{task} 400" for task in long_tasks.LongTask]
    assert raw["recall"]["needles 400"]["n"] == 4
    assert raw["agreement"] is None
    assert [layer["kl"] for layer in raw["layers"]] == [0.0, 0.0]
    assert all(layer["kl"] > 1e-4 and layer["output"] > 0.05 for layer in two["layers"])
    assert main([*given[:3], "2", *text, *sizes, "--block-size", "64"]) == 0
    assert "plain: attention" in capsys.readouterr().out


def test_layer_error_matches_hand_computation() -> None:
    """One head, one query, two keys; a codec that changes nothing has no error."""
    model, tokenizer = load(MODEL_PATH)
    runner = bench._way(model, KVSetting("raw"), EvalLoad()).runner
    tokens = encode(tokenizer, "The code of the amber falcon is 4821. " * 30)
    layers = attention_error.watch(runner, tokens, 64)
    assert len(layers) == 2
    layer = layers[1]
    assert layer is not None
    assert layer.queries.shape[1] % attention_error.QUERY_TOKENS == 0
    assert layer.keys.shape[2] % 64 == 0
    errors = [
        attention_error.layer_errors(layers, parse_scheme(name))[1] for name in ("raw", "8", "2")
    ]
    none, little, much = (error for error in errors if error is not None)
    assert none == attention_error.LayerError(0.0, 0.0)
    assert little.kl < much.kl / 100
    assert little.output < much.output / 10
    assert attention_error.watch(runner, tokens[:100], 64) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--codec", "q4"], "--codec: 'q4' is not a codec; supported: raw"),
        (["--codec", "kivi4", "--block-size", "32"], "do not divide blocks of 32"),
        (["--text", "nowhere.txt"], "does not exist"),
        (["/nowhere/model"], "there is no folder /nowhere/model"),
        (["--window", "128", "--keep", "128"], "leaves no room in a window"),
        (["--form", "spiky"], "--form spiky: there are plain, outliers, biased"),
        (["--memory-limit", "1MB"], "can never fit in the limit of 1.00 MB"),
        (["--plot", "/nowhere/at/all.png"], "there is no folder"),
        (["--text-tokens", "10"], "--text-tokens 10: a piece needs 128 or more"),
        (["--save", str(MODEL_PATH / "config.json" / "x")], "x: Not a directory"),
    ],
)
def test_bad_input_gives_one_line_error(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *given]) == 2
    printed = capsys.readouterr().err
    assert words in " ".join(printed.split())
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"), [(b"too short", "needs 128 or more"), (b"caf\xe9 " * 200, "is not UTF-8")]
)
def test_unreadable_text_is_reported(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    assert main(["eval", "--text", str(text)]) == 2
    assert words in capsys.readouterr().err
