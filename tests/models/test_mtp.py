"""Loading of multi-token heads: weights as published, models without one, and memory."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from headed_models import (
    FAMILIES,
    QWEN,
    headed,
    headless,
    parameters,
    write_published,
    write_split,
)

from penstock import memory
from penstock.engine.core import Core
from penstock.errors import ModelError, SettingError
from penstock.models.fingerprint import fingerprint
from penstock.models.loading import expected_bytes, load, load_all
from penstock.recall import MODEL_PATH


@pytest.mark.parametrize("family", FAMILIES)
def test_published_head_is_loaded(family: str, tmp_path: Path) -> None:
    folder = write_published(family, tmp_path / "model")
    model, _ = load(folder, weights_dtype="native", mtp=True)
    loaded, expected = dict(parameters(model)), dict(parameters(headed(family)))
    assert loaded.keys() == expected.keys()
    for name, weight in expected.items():
        assert mx.allclose(loaded[name], weight, rtol=0, atol=1e-6), name
    tokens = mx.array([[3, 1, 4, 1, 5]])
    assert mx.allclose(model(tokens), headless(family)(tokens), atol=1e-4)


# Of DeepSeek V3's layers mlx-lm leaves out number 61 alone, which is the head of the full model.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "deepseek_v3"])
def test_head_is_left_out_unless_named(family: str, tmp_path: Path) -> None:
    folder = write_published(family, tmp_path / "model")
    plain, with_head = load_all(folder).model, load_all(folder, mtp=folder).model
    assert not any(name.startswith("mtp.") for name, _ in parameters(plain))
    assert fingerprint(plain) != fingerprint(with_head)
    for model, head in ((plain, None), (with_head, folder)):
        size = sum(weight.nbytes for _, weight in parameters(model))
        assert expected_bytes(folder, "native", 10**9, mtp=head) == size
        spec = memory.read_model_spec(folder, mtp=head)
        assert spec.weight_bytes == size
    cache = with_head.make_cache()
    with_head(mx.array([[3, 1, 4]]), cache=cache)
    kv, state = cache[-1]
    parts = getattr(kv, "caches", [kv])  # an index has a cache of its own
    assert spec.layers[-1].kv_heads == parts[0].keys.shape[1]
    assert spec.layers[-1].key_dim == sum(part.keys.shape[-1] for part in parts)
    assert spec.state_bytes == memory.read_model_spec(folder).state_bytes + state[0].nbytes


def test_model_without_head_gives_one_line_error(tmp_path: Path) -> None:
    bare = write_published("qwen3_5", tmp_path / "model", ships=False)
    for folder in (bare, MODEL_PATH):
        with pytest.raises(ModelError, match="no multi-token head") as raised:
            load(folder, mtp=True)
        assert "\n" not in str(raised.value)
    with pytest.raises(ModelError, match="no multi-token head"):
        memory.read_model_spec(bare, mtp=bare)
    with pytest.raises(SettingError, match="without a multi-token head"):
        Core(headless("qwen3_5"), memory_limit="80MB", draft_model="mtp")


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("family", QWEN)
def test_split_head_is_loaded_beside_conversion(
    family: str, bits: int | None, tmp_path: Path
) -> None:
    """The head of another folder gives the proposals of the model's own."""
    bare = write_published(family, tmp_path / "bare", ships=False)
    head = write_split(family, tmp_path / "head", bits=bits)
    model, _ = load(bare, weights_dtype="native", mtp=head)
    expected = headed(family)
    if bits is None:
        loaded = dict(parameters(model))
        for name, weight in parameters(expected):
            assert mx.allclose(loaded[name], weight, rtol=0, atol=1e-6), name
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    logits = []
    for tried in (expected, model):
        caches = tried.make_cache()
        tried(tokens, cache=caches)
        kv, state = caches[-1]
        logits.append(tried.predict(mx.array([[7]]), state[0], kv)[0])
    assert mx.allclose(*logits, atol=1e-4 if bits is None else 0.3 * mx.abs(logits[0]).max().item())
    spec = memory.read_model_spec(bare, mtp=head)
    assert spec.weight_bytes == sum(weight.nbytes for _, weight in parameters(model))
