"""Packed decoder layers against mlx-lm's, and on an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cold_engine import running, settle
from core_parts import layer_shapes, way_of
from mlx.utils import tree_flatten, tree_map_with_path

import penstock
from penstock.cli import main
from penstock.engine.core import Core
from penstock.engine.model.model_probe import outside_row_bytes, step_token_bytes, weight_bytes
from penstock.engine.request import Request, Sampling
from penstock.engine.run.measured_steps import run_steps
from penstock.errors import ModelError
from penstock.extensions import extension
from penstock.models import weight_packer as packing_seam
from penstock.models.fingerprint import fingerprint
from penstock.models.loading import load_all
from penstock.models.weight_packer import PackedParts, pack, weight_packer
from penstock.plugins.cpu.compiled_jobs import team
from penstock.plugins.cpu.packed_layers import LayerParts, PackedProjection, form_of
from penstock.recall import MODEL_PATH
from support.gguf_files import small_model, write_model
from support.small_models import BASE, build

pytestmark = pytest.mark.skipif(
    weight_packer() is None, reason="products with packed weights are compiled by Numba"
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 32},
    "smollm3": {},
    "granite": {
        "attention_bias": True,
        "mlp_bias": True,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "phi3": {},
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 16,
        "sliding_window": 40,
        "sliding_window_pattern": 2,
    },
}
EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]])


def folder(path: Path, name: str, bits: int, *, mixed: bool = False, mode: str = "affine") -> Path:
    """Save a random quantized model with the embedded model's tokenizer."""
    sizes = EXPERTS if name == "qwen3_moe" else FAMILIES[name]
    config = {**BASE, **sizes, "model_type": name, "vocab_size": 512}
    mx.random.seed(3)
    model = build(config)

    def spread(path: str, weights: mx.array) -> mx.array:
        """Randomize biases, norms and quantization offsets."""
        return weights + (0.1 * mx.random.normal(weights.shape) if weights.ndim == 1 else 0.02)

    model.update(tree_map_with_path(spread, model.parameters()))
    quantization: dict[str, Any] = {"group_size": 32, "bits": bits, "mode": mode}
    if mixed:
        quantization["model.layers.1.self_attn.v_proj"] = {"group_size": 32, "bits": 8}

    def bits_of(name: str, module: nn.Module) -> Any:
        return quantization.get(name, hasattr(module, "to_quantized"))

    nn.quantize(model, group_size=32, bits=bits, mode=mode, class_predicate=bits_of)
    config["quantization"] = quantization
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    for file in MODEL_PATH.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


def off(found: mx.array, expected: mx.array) -> float:
    return float(mx.abs(found - expected).max() / mx.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("bits", "mixed"), [(4, False), (4, True), (6, False), (8, False)])
def test_packed_layers_match_mlx_lm(name: str, bits: int, mixed: bool, tmp_path: Path) -> None:
    source = folder(tmp_path, name, bits, mixed=mixed)
    expected = load_all(source, weights_dtype="float32").model(TOKENS)
    exact = load_all(source, weights_dtype="packed-exact")
    assert {type(x).__name__ for x in exact.model.layers} == {"PackedDecoderLayer"}
    assert exact.config["torch_dtype"] == "float32"
    assert off(exact.model(TOKENS), expected) < 1e-4
    assert "24 bits" in str(exact.weights_note)
    rounded = load_all(source, weights_dtype="packed")
    assert 3e-6 < off(rounded.model(TOKENS), expected) < 1e-3
    assert "16 bits" in str(rounded.weights_note)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_mxfp4_weights_are_multiplied_without_dequantizing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder(tmp_path, name, 4, mode="mxfp4")
    expected = load_all(source, weights_dtype="float32").model(TOKENS)
    packed = load_all(source, weights_dtype="packed-exact").model
    assert {type(x).__name__ for x in packed.layers} == {"PackedDecoderLayer"}
    assert off(packed(TOKENS), expected) < 1e-4
    assert PackedParts.of(load_all(source).model) is not None
    main(["plan", str(source), "--memory-limit", "1GB", "--json"])
    planned = json.loads(capsys.readouterr().out)["weight_bytes"]
    assert planned == pytest.approx(weight_bytes(packed), rel=0.01)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3moe", "gemma3"])
@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_weights_are_multiplied_without_dequantizing(
    name: str, form: str, tmp_path: Path
) -> None:
    model, config = small_model(name)
    file = tmp_path / "small.gguf"
    write_model(file, name, model, config, form)
    tokens = TOKENS + 20
    expected = load_all(file, weights_dtype="float32").model(tokens)
    packed = load_all(file, weights_dtype="packed-exact").model
    assert off(packed(tokens), expected) < 1e-4
    kinds = {type(module).__name__ for module in packed.modules()}
    assert not {"QuantizedLinear", "SwitchLinear"} & kinds
    assert ("PackedExperts" in kinds) is (name == "qwen3moe")
    assert ("PackedDecoderLayer" in kinds) is (name != "qwen3moe")


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_heads_smaller_than_tiles_match_mlx(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys have 8 rows; one thread and two give the same bits, and a NaN stays in its row."""
    sizes = {"torch_dtype": "float32", "hidden_size": 96, "intermediate_size": 160, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    config = {**BASE, **FAMILIES[name], "model_type": name, "vocab_size": 512, **sizes, **heads}
    mx.random.seed(3)
    model = build(config)
    nn.quantize(model, group_size=32, bits=4)
    expected = model(TOKENS)
    pack(model, lambda _: None, exact=True)
    assert {type(x).__name__ for x in model.layers} == {"PackedDecoderLayer"}
    result = model(TOKENS)
    assert off(result, expected) < 1e-4
    layer = model.layers[0]
    x = mx.random.normal((3, 1, 96))
    by_two = layer(x)
    x[1, 0, 50] = float("nan")
    broken = np.asarray(layer(x))
    assert np.isnan(broken[1]).all()
    assert np.array_equal(broken[[0, 2]], np.asarray(by_two)[[0, 2]])
    monkeypatch.setattr(team(), "threads", 1)
    assert mx.array_equal(model(TOKENS), result)


@pytest.mark.parametrize("missing", ["q_norm", "k_norm"])
def test_layer_may_normalize_only_queries_or_keys(missing: str) -> None:
    config = {**BASE, **FAMILIES["qwen3"], "model_type": "qwen3", "vocab_size": 512}
    layer = build(config).layers[0]
    nn.quantize(layer, group_size=32, bits=8)
    attention = layer.self_attn
    attention.pop(missing)
    form = form_of(layer)
    assert form is not None
    names = (*form.before, "o_proj")
    modules = [attention[name] for name in names] + [
        layer.mlp[x] for x in ("gate_proj", "up_proj", "down_proj")
    ]
    projections = [PackedProjection.of(module, slice(None)) for module in modules]
    parts = LayerParts(layer, form, projections, None, exact=True)
    x = mx.random.normal((5, attention.q_proj.scales.shape[1] * 32))
    queries, keys, values = parts.before(np.asarray(x), None)
    normed = layer.input_layernorm(x)
    for side, name, norm in ((queries, "q_proj", "q_norm"), (keys, "k_proj", "k_norm")):
        expected = attention[name](normed).reshape(side.shape)
        if norm in attention:
            expected = attention[norm](expected)
        assert off(mx.array(side), expected) < 1e-4
    assert off(mx.array(values), attention.v_proj(normed).reshape(values.shape)) < 1e-4


def test_weight_bytes_count_packed_codes(tmp_path: Path) -> None:
    source = folder(tmp_path, "llama", 4)
    wide = load_all(source, weights_dtype="float32").model
    packed = load_all(source, weights_dtype="packed").model
    arrays = [x for _, x in tree_flatten(wide.parameters())]
    matrices = sum(x.size for x in arrays if x.ndim == 2)
    rows = sum(4 * x.size for x in arrays if x.ndim == 1)
    codes = matrices // 2 + 2 * 2 * matrices // 32  # with a scale and an offset in float16
    assert weight_bytes(packed) == codes + rows


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3moe"])
@pytest.mark.parametrize("form", ["Q8_0", "Q5_1", "Q4_1"])
def test_plan_matches_packed_weights(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config = small_model(name)
    file = tmp_path / "small.gguf"
    write_model(file, name, model, config, form)
    command = ["plan", str(file), "--json", "--memory-limit", "1GB", "--weights-dtype", "packed"]
    assert main(command) == 0
    planned = json.loads(capsys.readouterr().out)
    counted = weight_bytes(load_all(file, weights_dtype="packed").model)
    assert planned["weight_bytes"] == pytest.approx(counted, rel=0.03)
    assert planned["dtype"] == "float32"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "granite"])
def test_fingerprint_covers_all_packed_weights_and_settings(name: str, tmp_path: Path) -> None:
    source = folder(tmp_path, name, 4)
    quantization = {"group_size": 32, "bits": 4}
    weights: Any = mx.load(str(source / "model.safetensors"))
    config = {**BASE, **FAMILIES[name], "model_type": name, "vocab_size": 512}

    def packed_fingerprint(changed: str, epsilon: float | None = None) -> str:
        model = build(config)
        nn.quantize(model, **quantization)
        other = {changed: weights[changed] + 1e-3} if changed else {}
        model.load_weights(list({**weights, **other}.items()))
        if epsilon is not None:
            model.layers[0].input_layernorm.eps = epsilon
        pack(model, lambda _: None, exact=False)
        assert type(model.layers[0]).__name__ == "PackedDecoderLayer"
        return fingerprint(model)

    vectors = [x for x in weights if "layers.0." in x and weights[x].ndim == 1]
    assert len(vectors) == {"llama": 9, "gemma3_text": 6, "granite": 9}[name]
    own = packed_fingerprint("")
    assert packed_fingerprint("") == own
    changed = [packed_fingerprint(vector) for vector in vectors]
    assert len({own, packed_fingerprint("", 1e-3), *changed}) == 2 + len(vectors)


def test_plan_matches_packed_experts_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder(tmp_path, "qwen3_moe", 4)
    assert main(["plan", str(source), "--json", "--memory-limit", "1GB"]) == 0
    planned = json.loads(capsys.readouterr().out)["weight_bytes"]
    model = load_all(source).model
    parts = PackedParts.of(model)
    assert parts is not None
    assert parts.products["model.layers.*.mlp.switch_mlp.down_proj"] == 4
    assert not parts.float32
    assert weight_bytes(model) <= planned <= 1.25 * weight_bytes(model)
    expected = load_all(source, weights_dtype="float32").model(TOKENS)
    assert off(load_all(source, weights_dtype="packed-exact").model(TOKENS), expected) < 1e-4


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_moe", "long keys"])
def test_plan_matches_kv_bytes_of_packed_models(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "long keys":  # 24 numbers are not whole vectors
        monkeypatch.setitem(FAMILIES, name := "qwen3", {"head_dim": 24})
        halves = False
    else:
        halves = name not in ("gemma2", "qwen3_moe")
    source = folder(tmp_path, name, 4)
    for dtype, nbytes in (("auto", 2 if halves else 4), ("packed-exact", 4), ("float32", 4)):
        command = ["plan", str(source), "--memory-limit", "1GB", "--weights-dtype", dtype, "--json"]
        assert main(command) == 0
        planned = json.loads(capsys.readouterr().out)
        rows = {row["quantized"]: row["full_bytes_per_token"] for row in planned["rows"]}
        windows = planned["rows"][0]["window_bytes_per_token"]
        model = load_all(source, weights_dtype=dtype).model  # type: ignore[arg-type]
        with running(None, model=model) as core:
            assert core.view.token_bytes == rows[False] + windows
            shape = layer_shapes(core)[0]
            numbers = shape.kv_heads * (shape.key_dim + shape.value_dim)
            assert core.view.token_bytes == 4 * numbers * nbytes
            assert shape.dtype.size == nbytes


def test_kv_is_float32_with_codec_or_spilling(tmp_path: Path) -> None:
    model = load_all(folder(tmp_path, "llama", 4)).model
    others: list[dict[str, Any]] = [
        {"kv_cache_quantization": "turbo4"},
        {"attend_tokens": 128, "active_kv_size": 256, "block_size": 64},
    ]
    for number, settings in enumerate(others):
        folder_of = tmp_path / f"disk{number}" if "active_kv_size" in settings else None
        with running(folder_of, model=model, **settings) as core:
            assert layer_shapes(core)[0].dtype == mx.float32
    disk = tmp_path / "disk"
    with running(disk, model=model) as core:
        assert layer_shapes(core)[0].dtype == mx.float16
        scored(core, PROMPT)
    with running(disk, model=model, kv_cache_quantization="turbo4") as core:
        scored(core, PROMPT)
        assert not core.view.stats().hit_tokens, "blocks of another dtype are not read"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("attend", [None, 128])
def test_float16_kv_changes_logits_little(name: str, attend: int | None, tmp_path: Path) -> None:
    source, ends = folder(tmp_path, name, 4), []
    for dtype in ("packed", "packed-exact"):
        model = load_all(source, weights_dtype=dtype).model  # type: ignore[arg-type]
        with running(None, model=model, attend_tokens=attend) as core:
            ends.append(scored(core, PROMPT)[0])
            assert layer_shapes(core)[0].dtype.size == (2 if dtype == "packed" else 4)
    rounded, exact = ends
    assert [token for token, *_ in rounded] == [token for token, *_ in exact]
    off = max(abs(x[1] - y[1]) for x, y in zip(rounded, exact, strict=True))
    assert 0 < off < 5e-3


def test_engine_runs_packed_model(tmp_path: Path) -> None:
    source = folder(tmp_path, "llama", 4)
    texts = []
    for dtype in ("float32", "packed-exact"):
        loaded = load_all(source, weights_dtype=dtype)  # type: ignore[arg-type]
        with penstock.Engine(loaded.model, loaded.tokenizer, memory_limit="100MB") as engine:
            texts.append(str(engine.generate("once upon a time", max_tokens=12)))
    assert texts[0] == texts[1]


def test_doctor_reports_packed_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, config = small_model("qwen3moe")
    file = tmp_path / "small.gguf"
    write_model(file, "qwen3moe", model, config, "Q4_1")
    main(["doctor", str(file), "--weights-dtype", "packed", "--json"])
    packed = json.loads(capsys.readouterr().out)["model"]["packed"]
    assert packed["layers"] == {}
    assert packed["products"]["model.layers.*.self_attn.q_proj"] == 4
    assert packed["products"]["model.embed_tokens"] == 1
    assert packed["products"]["model.layers.*.mlp.switch_mlp.up_proj"] == 4
    main(["doctor", str(folder(tmp_path, "llama", 4)), "--weights-dtype", "packed"])
    assert "compiled layers: model.layers.* (4)" in capsys.readouterr().out
    main(["doctor", str(file), "--weights-dtype", "float32", "--json"])
    assert json.loads(capsys.readouterr().out)["model"]["packed"] is None


@pytest.mark.parametrize("source", ["llama 4", "gemma3_text 8", "Q4_1", "Q8_0"])
def test_auto_packs_quantized_weights(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, bits = source.partition(" ")
    if bits:
        path = folder(tmp_path, name, int(bits))
    else:
        path = tmp_path / "small.gguf"
        write_model(path, "qwen3moe", *small_model("qwen3moe"), source)
    loaded = load_all(path)
    assert PackedParts.of(loaded.model) is not None
    assert "--weights-dtype float32" in str(loaded.weights_note)
    held = weight_bytes(loaded.model)
    main(["plan", str(path), "--memory-limit", "1GB", "--json"])
    planned = json.loads(capsys.readouterr().out)["weight_bytes"]
    assert held <= planned <= 1.1 * held, "but for scales that float16 holds"
    for limit, packs in ((planned * 10 // 9 + 1, True), (planned * 10 // 9 - 1, False)):
        model = load_all(path, limit_bytes=limit).model
        assert (PackedParts.of(model) is not None) is packs
    assert PackedParts.of(load_all(path, weights_dtype="float32").model) is None


def test_auto_uses_float32_without_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_seam, "weight_packer", lambda: None)
    loaded = load_all(folder(tmp_path, "llama", 4))
    arrays: Any = tree_flatten(loaded.model.parameters())
    assert {array.dtype for _, array in arrays} == {mx.float32}
    assert str(loaded.weights_note).startswith("float32")


def test_step_bytes_include_activations_outside_mlx(tmp_path: Path) -> None:
    model = load_all(folder(tmp_path, "llama", 4), weights_dtype="packed").model
    row = 2 * 4 * ((4 + 2 + 2) * 16 + 64 + 2 * 96 + 64)  # q, k, v | o, gate, up, down
    assert outside_row_bytes(model) == row
    assert step_token_bytes(model) >= row
    peaks = []
    for bytes_of_a_row in (row, 0):
        for module in (*model.layers, model.model.embed_tokens):
            module.packed_row_bytes = bytes_of_a_row
        with running(None, model=model) as core:
            peaks.append(run_steps(core.runner, core.limits, core.tails))
    prefill, decode = (getattr(peaks[0], x) - getattr(peaks[1], x) for x in ("prefill", "decode"))
    assert prefill > 0.9 * core.limits.step_tokens * row
    assert decode > 0.9 * core.limits.max_batch_size * row


def test_missing_numba_gives_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path, "llama", 4)
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "penstock.plugins.cpu.packing", raising=False)
    extension.cache_clear()
    with pytest.raises(ModelError, match="pip install numba"):
        load_all(source, weights_dtype="packed")


PROMPT = [7 + number * number % 400 for number in range(150)]
SCORED = {
    "max_tokens": 10,
    "ignore_eos": True,
    "sampling": Sampling(logprobs=True, top_logprobs=20),
}


def scored(core: Core, *prompts: list[int]) -> list[list[tuple[Any, ...]]]:
    """Return the tokens of concurrent answers, with exact log-probabilities."""
    handles = [core.submit(Request(prompt=tuple(prompt), **SCORED)) for prompt in prompts]
    settle(core)
    choices = [handle.result(0.0)[0] for handle in handles]
    return [[(x.token, x.logprob, x.top) for x in choice.logprobs] for choice in choices]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3_text", "granite", "phi3"])
@pytest.mark.parametrize("dtype", ["packed", "packed-exact"])
@pytest.mark.usefixtures("reads_all")
def test_logits_are_invariant_to_batch_chunk_and_cache(
    name: str, dtype: Any, tmp_path: Path
) -> None:
    model = load_all(folder(tmp_path, name, 4), weights_dtype=dtype).model
    with running(None, model=model) as core:
        (alone,) = scored(core, PROMPT)
        assert way_of(core) == ("joined" if name == "gemma2" else "shared")
        longer = [*PROMPT, *(token for token, *_ in alone[:5])]
        assert scored(core, PROMPT) == [alone]  # from the cache
        assert scored(core, longer)[0][:5] == alone[5:]  # the next turn
        others = [[*PROMPT[:70], 9, 8, 7], PROMPT[:33], [5, 6, 7]]
        together = scored(core, PROMPT, *others)
        assert together[0] == alone
    for number, other in enumerate(others):
        with running(None, model=model) as core:
            assert scored(core, other) == [together[1 + number]]
    with running(None, model=model, prefill_chunk=48) as core:
        assert scored(core, PROMPT) == [alone]
    with running(None, model=model, speculative_tokens=3) as core:
        assert scored(core, PROMPT) == [alone]
    disk = tmp_path / "disk"
    with running(disk, model=model) as core:
        assert scored(core, PROMPT) == [alone]
    with running(disk, model=model) as core:
        assert scored(core, PROMPT) == [alone]
        assert core.view.stats().hit_tokens >= 96


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3", "granite", "phi3"])
def test_logits_are_bit_identical_with_full_budget_and_after_eviction(
    name: str, tmp_path: Path
) -> None:
    model = load_all(folder(tmp_path, name, 4)).model
    ends = []
    for attend in (None, 256):
        with running(None, model=model, attend_tokens=attend) as core:
            ends.append(scored(core, PROMPT))
    assert ends[0] == ends[1]
    dropped = []
    for chunk in (32, 48):
        with running(None, model=model, max_kv_size=64, keep=8, prefill_chunk=chunk) as core:
            dropped.append(scored(core, PROMPT, PROMPT[:100]))
    assert dropped[0] == dropped[1]
    assert dropped[0][0] != ends[0][0]


def test_loading_unpacked_weights_does_not_import_numba() -> None:
    program = (
        "import sys, penstock\n"
        "from penstock.recall import MODEL_PATH\n"
        "penstock.load(MODEL_PATH)\n"
        "print(sorted({'numba', 'llvmlite'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_second_start_does_not_import_numba(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = (
        "import sys, penstock\n"
        f"model, tokenizer = penstock.load({str(folder(tmp_path, 'llama', 4))!r},"
        " weights_dtype='packed')\n"
        "with penstock.Engine(model, tokenizer, memory_limit='200MB') as engine:\n"
        "    engine.submit(penstock.Request(prompt=range(40), max_tokens=3)).result(60)\n"
        "print('numba' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program]
    starts = [subprocess.run(command, capture_output=True, text=True) for _ in range(2)]
    assert [start.stdout for start in starts] == ["True\n", "False\n"], starts[0].stderr
