"""Folders of drafters that read hidden states: weights, memory, and those that do not fit."""

from __future__ import annotations

import gc
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafted_models import (
    CONFIGS,
    KINDS,
    drafted,
    drafted_tokens,
    parameters,
    write_drafter,
    write_model,
)
from gguf_files import small_file

from penstock import memory
from penstock.cli.planned_spec import read_spec
from penstock.engine.core import Core
from penstock.errors import ModelError, SettingError
from penstock.models.fingerprint import fingerprint
from penstock.models.loading import expected_bytes, load, load_all

FAMILY = "qwen3"


@pytest.mark.parametrize("kind", KINDS)
def test_drafter_is_loaded_beside_model(kind: str, tmp_path: Path) -> None:
    folder = write_model(FAMILY, kind, tmp_path / "model")
    drafter = write_drafter(FAMILY, kind, tmp_path / "drafter")
    model, _ = load(folder, weights_dtype="native", mtp=drafter)
    loaded, expected = dict(parameters(model)), dict(parameters(drafted(FAMILY, kind)))
    assert loaded.keys() == expected.keys()
    for name, weight in expected.items():
        assert mx.array_equal(loaded[name], weight), name
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    expected_tokens = drafted_tokens(drafted(FAMILY, kind), kind, text, 5)
    assert drafted_tokens(model, kind, text, 5) == expected_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_names_with_prefix_are_read(kind: str, tmp_path: Path) -> None:
    """Some makers write the drafter's weights below `model.`."""
    folder = write_model(FAMILY, kind, tmp_path / "model")
    drafter = write_drafter(FAMILY, kind, tmp_path / "drafter")
    file = str(drafter / "model.safetensors")
    weights: Any = mx.load(file)
    weights = {f"model.{name}": mx.array(weight) for name, weight in weights.items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    model, _ = load(folder, weights_dtype="native", mtp=drafter)
    assert mx.array_equal(model.drafter.fc.weight, drafted(FAMILY, kind).drafter.fc.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [None, 4])
def test_plan_counts_drafter(bits: int | None, kind: str, tmp_path: Path) -> None:
    folder = write_model(FAMILY, kind, tmp_path / "model", bits=bits)
    drafter = write_drafter(FAMILY, kind, tmp_path / "drafter")
    plain = load_all(folder, weights_dtype="native").model
    model = load_all(folder, weights_dtype="native", mtp=drafter).model
    assert fingerprint(plain) != fingerprint(model)
    for loaded, head in ((plain, None), (model, drafter)):
        size = sum(weight.nbytes for _, weight in parameters(loaded))
        assert expected_bytes(folder, "native", 10**9, mtp=head) == size
        spec = memory.read_model_spec(folder, mtp=head)
        assert spec.weight_bytes == size
    caches = model.make_cache()
    model(mx.array([[3, 1, 4]]), cache=caches)
    assert len(spec.layers) == len(caches)
    kv = caches[-1] if kind == "block" else caches[-1][0]
    for layer in spec.layers[-CONFIGS[kind]["num_hidden_layers"] :]:
        assert (layer.kv_heads, layer.key_dim) == kv.state[0].shape[1::2]
    if kind == "eagle":
        assert spec.state_bytes == caches[-1][1][0].nbytes


def test_speculators_form_of_eagle_is_read(tmp_path: Path) -> None:
    """Sizes stand in a section of their own, and the folder repeats the model's embeddings."""
    config = CONFIGS["eagle"]
    sizes = {name: value for name, value in config.items() if name not in ("architectures",)}
    drafter = write_drafter(FAMILY, "eagle", tmp_path / "drafter")
    changed = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": sizes,
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
    }
    (drafter / "config.json").write_text(json.dumps(changed))
    file = str(drafter / "model.safetensors")
    weights: Any = mx.load(file)
    weights = {n.replace("midlayer.", "layers.0."): mx.array(w) for n, w in weights.items()}
    weights["embed_tokens.weight"] = mx.zeros((96, 64))
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    folder = write_model(FAMILY, "eagle", tmp_path / "model")
    model, _ = load(folder, weights_dtype="native", mtp=drafter)
    expected = dict(parameters(drafted(FAMILY, "eagle")))
    assert dict(parameters(model)).keys() == expected.keys()
    for name, weight in parameters(model):
        assert mx.array_equal(weight, expected[name]), name


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("block", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ("block", {"hidden_size": 32}, "of another model"),
        (
            "block",
            {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 9]}},
            "of another model",
        ),
        ("block", {"dflash_config": {"target_layer_ids": [1]}}, "no valid 'mask_token_id'"),
        ("block", {"dflash_config": {"mask_token_id": 5}, "target_layer_ids": None}, "layer_ids"),
        ("block", {"block_size": 1}, "no valid 'block_size': 1"),
        ("block", {"num_hidden_layers": "many"}, "no valid 'num_hidden_layers'"),
        ("eagle", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "of another model"),
        (
            "eagle",
            {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
            "hidden_state_layer_ids': 0",
        ),
        ("eagle", {"num_hidden_layers": 2}, "several layers"),
        ("eagle", {"target_hidden_size": 128}, "another width"),
        ("eagle", {"rms_norm_eps": None}, "no valid 'rms_norm_eps'"),
        ("eagle", {"rope_theta": 10**400}, "no valid 'rope_theta'"),
        ("block", {"head_dim": True}, "no valid 'head_dim': True"),
    ],
)
def test_drafter_that_does_not_fit_is_one_line(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = write_model(FAMILY, kind, tmp_path / "model")
    drafter = write_drafter(FAMILY, kind, tmp_path / "drafter", **changes)
    with pytest.raises(ModelError, match=words) as raised:
        load(folder, mtp=drafter)
    assert "\n" not in str(raised.value)


def changed_weights(folder: Path, **changes: mx.array) -> Path:
    """Replace or add weights of a drafter's folder; `__` in a name stands for a point."""
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    weights = {name: mx.array(weight) for name, weight in weights.items()}
    weights |= {name.replace("__", "."): weight for name, weight in changes.items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    return folder


def test_tokens_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    folder = write_model(FAMILY, "eagle", tmp_path / "model")
    for number, offsets in enumerate((mx.full(40, 90), mx.full(40, -1))):
        drafter = write_drafter(FAMILY, "eagle", tmp_path / f"drafter{number}")
        with pytest.raises(ModelError, match="d2t names tokens that do not exist"):
            load(folder, mtp=changed_weights(drafter, d2t=offsets))
    form = {"mask_token_id": 96, "target_layer_ids": [1, 3]}
    drafter = write_drafter(FAMILY, "block", tmp_path / "block", dflash_config=form)
    with pytest.raises(ModelError, match="mask_token_id 96 is no token"):
        load(folder, mtp=drafter)


def test_offsets_of_whole_vocabulary_are_left_out(tmp_path: Path) -> None:
    drafter = write_drafter(FAMILY, "eagle", tmp_path / "drafter", draft_vocab_size=96)
    changed_weights(drafter, d2t=mx.zeros(96, mx.int64), lm_head__weight=mx.ones((96, 64)))
    model, _ = load(write_model(FAMILY, "eagle", tmp_path / "model"), mtp=drafter)
    assert model.drafter.lm_head.weight.shape == (96, 64) and "d2t" not in model.drafter


@pytest.mark.parametrize("kind", KINDS)
def test_drafter_gets_dtype_of_model(kind: str, tmp_path: Path) -> None:
    """Halves of two kinds multiply in float32."""
    folder = write_model(FAMILY, kind, tmp_path / "model")
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    halves = {name: weight.astype(mx.bfloat16) for name, weight in weights.items()}
    mx.eval(halves)
    mx.save_safetensors(file, halves)
    drafter = write_drafter(FAMILY, kind, tmp_path / "drafter")
    model, _ = load(folder, weights_dtype="native", mtp=drafter)
    kinds = {weight.dtype for name, weight in parameters(model) if "d2t" not in name}
    assert kinds == {mx.bfloat16}
    size = sum(weight.nbytes for _, weight in parameters(model))
    spec = memory.read_model_spec(folder, mtp=drafter)
    assert (spec.weight_bytes, spec.dtype) == (size, "bfloat16")


@pytest.mark.parametrize("kind", KINDS)
def test_plan_without_weights_of_model_adds_those_of_drafter(kind: str, tmp_path: Path) -> None:
    folder = write_model(FAMILY, kind, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    drafter = write_drafter(FAMILY, kind, tmp_path / "drafter")
    alone = memory.read_model_spec(folder).weight_bytes
    both = memory.read_model_spec(folder, mtp=drafter)
    assert alone and both.weight_bytes and both.weight_bytes > alone
    assert "estimated" in both.weight_source


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_class_keeps_no_weights_of_drafter(kind: str, tmp_path: Path) -> None:
    """Converted weights would be held twice, and those of an unloaded model for ever."""
    folder = write_model(FAMILY, kind, tmp_path / "model")
    drafter = write_drafter(FAMILY, kind, tmp_path / "drafter")
    loaded = load_all(folder, weights_dtype="native", mtp=drafter).model
    size = sum(weight.nbytes for _, weight in parameters(loaded))
    del loaded
    gc.collect()
    before = mx.get_active_memory()
    models = [load_all(folder, weights_dtype="native", mtp=drafter).model for _ in range(2)]
    assert mx.get_active_memory() - before < 2.2 * size
    with closing(Core(models[0], memory_limit="80MB", draft_model="mtp")):
        pass
    models.clear()
    gc.collect()
    assert mx.get_active_memory() - before < 0.3 * size


def test_gguf_file_takes_no_drafter(tmp_path: Path) -> None:
    drafter = write_drafter(FAMILY, "block", tmp_path / "drafter")
    file = small_file(tmp_path)
    with pytest.raises(ModelError, match="beside model folders alone"):
        load(file, mtp=drafter)
    with pytest.raises(ModelError, match="beside model folders alone"):
        read_spec(str(file), "auto", None, head=str(drafter))


def test_drafter_without_weights_is_one_line(tmp_path: Path) -> None:
    """Early EAGLE-3 drafters were published as pickles alone."""
    drafter = write_drafter(FAMILY, "eagle", tmp_path / "drafter")
    (drafter / "model.safetensors").rename(drafter / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no weights in model"):
        load(write_model(FAMILY, "eagle", tmp_path / "model"), mtp=drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_drafter_needs_model_that_was_loaded_with_it(kind: str, tmp_path: Path) -> None:
    drafter = write_drafter(FAMILY, kind, tmp_path / "drafter")
    with pytest.raises(ModelError, match="no language model but a drafter"):
        load(drafter)
    model, tokenizer = load(write_model(FAMILY, kind, tmp_path / "model"))
    with pytest.raises(SettingError, match="without a multi-token head or drafter"):
        Core(model, tokenizer, memory_limit="80MB", draft_model=drafter)
