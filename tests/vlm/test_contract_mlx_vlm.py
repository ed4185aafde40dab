"""Assumptions about mlx-vlm. A failure names what changed in mlx-vlm."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

import mlx_vlm.models.base as base
import mlx_vlm.models.cache as upstream
import mlx_vlm.utils
from mlx_vlm.models import llama, qwen2_vl
from mlx_vlm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

CACHES = ("KVCache", "RotatingKVCache", "ChunkedKVCache", "ArraysCache", "CacheList")
PROTOCOL = ("update_and_fetch", "make_mask", "is_trimmable", "trim", "nbytes")
ATTENTION = ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_cache_classes_exist() -> None:
    gone = [name for name in CACHES if not hasattr(upstream, name)]
    assert gone == [], f"mlx_vlm.models.cache lost {gone}"


@pytest.mark.parametrize("name", ["KVCache", "RotatingKVCache"])
def test_caches_have_methods_of_protocol(name: str) -> None:
    gone = [part for part in PROTOCOL if not hasattr(getattr(upstream, name), part)]
    assert gone == [], f"mlx-vlm's {name} lost {gone}"


def test_rotating_cache_has_max_size_and_keep() -> None:
    cache = upstream.RotatingKVCache(max_size=8, keep=2)
    assert (cache.max_size, cache.keep) == (8, 2)
    assert upstream.ChunkedKVCache(8).chunk_size == 8


def test_arrays_cache_is_created_from_size() -> None:
    assert upstream.ArraysCache(3).cache == [None] * 3


def test_make_prompt_cache_prefers_model_make_cache() -> None:
    class Model:
        def make_cache(self) -> list[str]:
            return ["the model's own"]

    assert upstream.make_prompt_cache(Model()) == ["the model's own"]


def test_attention_function_is_module_attribute() -> None:
    """The seam rebinds it in the modules of a model's classes."""
    assert parameters(base.scaled_dot_product_attention) == ATTENTION
    bound = inspect.unwrap(llama.language.scaled_dot_product_attention)  # once, if it is rebound
    assert bound is base.scaled_dot_product_attention


def test_language_model_returns_logits() -> None:
    config = llama.ModelConfig.from_dict(
        {
            "model_type": "llama",
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "intermediate_size": 8,
            "num_attention_heads": 1,
            "rms_norm_eps": 1e-5,
            "vocab_size": 4,
        }
    )
    language_model = llama.Model(config).language_model
    output = language_model(mx.array([[1, 2]]), cache=upstream.make_prompt_cache(language_model))
    assert output.logits.shape == (1, 2, 4)


def test_position_attributes_have_expected_names() -> None:
    """`vlm_reader.POSITIONS` resets them, as sequences take turns."""
    source = inspect.getsource(qwen2_vl.LanguageModel)
    assert "self._position_ids = None" in source
    assert "self._rope_deltas = None" in source


def test_load_functions_accept_folder() -> None:
    assert parameters(mlx_vlm.utils.load_model)[:2] == ["model_path", "lazy"]
    assert isinstance(mlx_vlm.utils.MODEL_REMAPPING, dict)
    assert parameters(mlx_vlm.utils.get_model_path)[0] == "path_or_hf_repo"


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FileNotFoundError):
        mlx_vlm.utils.load_model(tmp_path)


def test_experts_have_dense_class() -> None:
    wanted = ["self", "input_dims", "output_dims", "num_experts", "bias"]
    assert parameters(SwitchLinear.__init__) == wanted
    experts = SwitchLinear(64, 32, 2, bias=False).to_quantized(group_size=32, bits=4)
    assert type(experts) is QuantizedSwitchLinear
    assert (experts.group_size, experts.bits, experts.mode) == (32, 4, "affine")
