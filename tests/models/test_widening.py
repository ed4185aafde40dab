"""Weights that are converted to float32 when loaded on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from penstock.attention import devices
from penstock.attention.attention_memory import DeviceFacts
from penstock.attention.mlx_backend import GPUBackend
from penstock.config import WeightsDtype
from penstock.engine.engine import Engine
from penstock.engine.model.model_probe import weight_bytes
from penstock.errors import NeverFits, SettingError
from penstock.memory.sizes import parse_bytes
from penstock.models import weight_packer
from penstock.models.loading import check_fits, load_all, load_within
from penstock.models.widening import Widening, model_bytes
from penstock.recall import MODEL_PATH
from support.gguf_files import MODELS, SIZES, small_file
from support.small_models import build

on_cpu = pytest.mark.skipif(
    not devices.current().facts.slow_half, reason="auto widens on a CPU alone"
)


def folder(path: Path, name: str, *, bits: int | None, dtype: str) -> Path:
    """Save a random model as mlx-lm's converter does, with the embedded model's tokenizer."""
    config: dict[str, Any] = {**SIZES, **MODELS[name], "torch_dtype": dtype, "vocab_size": 512}
    model = build(config)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits, "mode": "affine"}
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    for file in MODEL_PATH.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


def dtypes(model: Any) -> set[Any]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3moe"])
@pytest.mark.parametrize(("bits", "dtype"), [(4, "float16"), (8, "bfloat16"), (None, "bfloat16")])
def test_float32_weights_give_equal_logits(
    name: str, bits: int | None, dtype: str, tmp_path: Path
) -> None:
    source = folder(tmp_path, name, bits=bits, dtype=dtype)
    native = load_all(source, weights_dtype="native")
    wide = load_all(source, weights_dtype="float32")
    assert dtypes(wide.model) == {mx.float32}
    assert dtypes(native.model) != {mx.float32}
    assert model_bytes(native.model)[1] == model_bytes(wide.model)[0] == model_bytes(wide.model)[1]
    if name == "qwen3moe" and bits is None:
        return  # MLX on a CPU has no product of experts in half precision: widened it runs at all
    tokens = mx.array([[5, 260, 17, 301, 9, 33]])
    theirs = native.model(tokens).astype(mx.float32)
    ours = wide.model(tokens)
    step = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    assert mx.abs(ours - theirs).max().item() <= 40 * step * mx.abs(theirs).max().item()


@on_cpu
def test_auto_dtype_is_float32_if_a_quarter_of_limit_remains(tmp_path: Path) -> None:
    source = folder(tmp_path, "llama", bits=None, dtype="float16")
    native_bytes, wide_bytes = model_bytes(load_all(source, weights_dtype="native").model)
    assert native_bytes == wide_bytes / 2
    enough = load_all(source, limit_bytes=wide_bytes * 4 // 3 + 1)
    assert dtypes(enough.model) == {mx.float32}
    assert "float32" in str(enough.weights_note)
    little = load_all(source, limit_bytes=wide_bytes * 4 // 3 - 4)
    assert mx.float16 in dtypes(little.model)
    assert "raise it" in str(little.weights_note)


@on_cpu
def test_limit_may_be_text_bytes_or_default(tmp_path: Path) -> None:
    source = folder(tmp_path, "llama", bits=None, dtype="float16")
    wide_bytes = model_bytes(load_all(source, weights_dtype="native").model)[1]
    for limit, wide in (
        (None, True),
        (wide_bytes * 2, True),
        (wide_bytes, False),
        ("400KB", False),
    ):
        assert (dtypes(load_within(source, "auto", limit).model) == {mx.float32}) is wide, limit
    assert mx.float16 in dtypes(load_within(source, "native").model)
    with pytest.raises(SettingError, match="much"):
        load_within(source, "auto", "much")


@on_cpu
def test_limit_proposed_in_error_is_sufficient() -> None:
    sizes = 98_280_000, 538_000_000
    with pytest.raises(NeverFits) as refused:
        Widening("auto", *sizes, 60_000_000, 147_000_000).check_limit("SmolLM2")
    enough = parse_bytes(str(refused.value).partition("about ")[2].split()[0])
    assert Widening("auto", *sizes, enough, 147_000_000).packs


@pytest.mark.skipif(weight_packer.weight_packer() is None, reason="packing needs Numba")
def test_packing_peak_excludes_float32_scales() -> None:
    """In float32 they would take a fifth of the weights more for a moment."""
    model = build({**SIZES, **MODELS["llama"], "vocab_size": 4096})
    nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    weight_packer.pack(model, lambda module: None, exact=False)
    assert mx.get_peak_memory() < 1.05 * before
    assert dtypes(model) == {mx.float32}


@pytest.mark.parametrize("weights_dtype", ["auto", "native", "float32", "packed"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_weights_beyond_limit_are_refused_before_reading(
    weights_dtype: WeightsDtype, *, is_folder: bool, tmp_path: Path
) -> None:
    if weights_dtype == "packed":
        pytest.importorskip("numba")
    source = folder(tmp_path, "llama", bits=4, dtype="float16") if is_folder else None
    source = source or small_file(tmp_path)
    held = weight_bytes(load_all(source, weights_dtype=weights_dtype).model)
    load_all(source, weights_dtype=weights_dtype, limit_bytes=held)
    native = model_bytes(load_all(source, weights_dtype="native").model)[0]
    # Embeddings that are the last layer, too, lie twice where weights are packed.
    least = {"auto": native, "packed": held // 2}.get(weights_dtype, held)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with pytest.raises(NeverFits, match=r"alone exceed .* about \d+MB would be enough") as refused:
        load_all(source, weights_dtype=weights_dtype, limit_bytes=least - 1)
    assert refused.value.needed_bytes <= held
    assert mx.get_peak_memory() - before < held // 10


def test_sharded_weight_sizes_are_checked_without_reading(tmp_path: Path) -> None:
    path = folder(tmp_path, "llama", bits=None, dtype="float32")
    nbytes = model_bytes(load_all(path).model)[0]
    file = small_file(tmp_path)
    file_nbytes = model_bytes(load_all(file, weights_dtype="native").model)[0]
    for source, size in ((path, nbytes), (file, file_nbytes)):
        check_fits(source, "native", size)
        check_fits(source, "native", size // 2, parts=2)
        with pytest.raises(NeverFits, match="alone exceed"):
            check_fits(source, "native", size - 1)
        with pytest.raises(NeverFits, match="alone exceed"):
            check_fits(source, "native", size // 2 - 1, parts=2)
    check_fits("owner/model-that-is-not-here", "native", 1)


def test_engine_refuses_limit_below_weights_before_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = load_all(folder(tmp_path, "llama", bits=4, dtype="float16"), weights_dtype="native")
    monkeypatch.setattr(type(loaded.model), "__call__", None)
    with pytest.raises(NeverFits, match=r"weights of .* can never fit"):
        Engine(loaded.model, loaded.tokenizer, memory_limit=weight_bytes(loaded.model) - 1)


def test_gpu_keeps_weights_dtype() -> None:
    with devices.using(GPUBackend(DeviceFacts(own_memory=True))):
        choice = Widening("auto", 10, 80, None)
        assert not choice.widens
        assert choice.note is None
        assert Widening("float32", 10, 80, None).widens
