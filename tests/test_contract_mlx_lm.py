"""Assumptions about mlx-lm. A failure names what changed in mlx-lm."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.models.cache as upstream
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

from penstock.models.recommended import PATTERNS

SINGLE = ("KVCache", "RotatingKVCache", "QuantizedKVCache")
BATCH = ("BatchKVCache", "BatchRotatingKVCache")
OTHERS = ("ArraysCache", "CacheList")
PROTOCOL = (
    "update_and_fetch",
    "make_mask",
    "state",
    "is_trimmable",
    "trim",
    "nbytes",
    "size",
    "empty",
    "from_state",
)
BATCH_PROTOCOL = ("merge", "extend", "filter", "extract", "prepare", "finalize")


def missing(owner: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not hasattr(owner, name)]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def filled(cache: Any, tokens: int) -> Any:
    cache.update_and_fetch(mx.zeros((1, 2, tokens, 64)), mx.zeros((1, 2, tokens, 64)))
    return cache


def test_mlx_lm_cache_classes_exist() -> None:
    gone = missing(upstream, (*SINGLE, *BATCH, *OTHERS))
    assert gone == [], f"mlx_lm.models.cache lost {gone}"


@pytest.mark.parametrize("name", [*SINGLE, *BATCH])
def test_caches_have_methods_of_protocol(name: str) -> None:
    gone = missing(getattr(upstream, name), PROTOCOL)
    assert gone == [], f"mlx-lm's {name} lost {gone}"


@pytest.mark.parametrize("name", BATCH)
def test_batch_caches_have_methods_of_batch_protocol(name: str) -> None:
    gone = missing(getattr(upstream, name), BATCH_PROTOCOL)
    assert gone == [], f"mlx-lm's {name} lost {gone}"


def test_kv_cache_state_has_keys_values_and_offset() -> None:
    state = filled(upstream.KVCache(), 3).state
    assert len(state) == 3, "mlx-lm's KVCache.state is not (keys, values, offset) any more"
    assert state[0].ndim == state[1].ndim == 4
    assert state[2] == 3, "the third item of KVCache.state is not the offset any more"


def test_rotating_kv_cache_state_has_six_items() -> None:
    state = filled(upstream.RotatingKVCache(max_size=8, keep=2), 3).state
    assert len(state) == 6, (
        "mlx-lm's RotatingKVCache.state is not (keys, values, offset, keep, max_size, _idx)"
    )
    assert list(state[2:]) == [3, 2, 8, 3]


def test_from_state_needs_no_meta_state() -> None:
    restored = upstream.KVCache.from_state(filled(upstream.KVCache(), 3).state)
    assert restored.offset == 3


def test_stream_generate_accepts_our_caches() -> None:
    wanted = ["model", "tokenizer", "prompt", "max_tokens"]
    assert parameters(mlx_lm.stream_generate)[:4] == wanted, (
        f"mlx_lm.stream_generate now takes {parameters(mlx_lm.stream_generate)}"
    )
    step = parameters(generate_step)
    gone = [name for name in ("prompt_cache", "max_tokens") if name not in step]
    assert gone == [], f"mlx-lm's generate_step lost {gone}"


def test_tokenizer_wrapper_has_used_attributes() -> None:
    gone = missing(TokenizerWrapper, ("apply_chat_template",))
    assert gone == [], f"mlx-lm's TokenizerWrapper lost {gone}"
    assert parameters(mlx_lm.load)[0] == "path_or_hf_repo"


def test_make_prompt_cache_prefers_model_make_cache() -> None:
    """A model's `make_cache` overrides `max_kv_size`: the reason for `make_kv_cache`."""

    class Model:
        def make_cache(self) -> list[str]:
            return ["the model's own"]

    assert upstream.make_prompt_cache(Model(), max_kv_size=8) == ["the model's own"]


def used_as_arrays(source: str) -> bool:
    """Return whether code uses a cache's result other than by passing it to attention."""
    lines = source.splitlines()
    for number, line in enumerate(lines):
        taken = re.search(r"(\w+), (\w+) = \S*cache\S*\.update_and_fetch", line)
        if taken is None:
            continue
        use = re.compile("|".join(rf"(?<![\w.]){name}(\.| @)" for name in taken.groups()))
        for later in lines[number + 1 : number + 32]:
            if re.match(r"\s*(def|class) ", later):
                break
            if use.search(later):
                return True
    return False


def test_models_unable_to_read_quantized_caches_are_listed() -> None:
    """Add newly found models to the table of benchmarks/notes/memory.md."""
    sources = {file.stem: file.read_text() for file in Path(upstream.__file__).parent.glob("*.py")}
    found = {name for name, source in sources.items() if used_as_arrays(source)}
    assert {"deepseek_v3", "gemma2", "phi"} <= found, "mlx-lm's models are written otherwise now"
    found |= {name for name, source in sources.items() if "sinks=self." in source}
    # DeepSeek 4.1 makes caches of its own kind, which penstock leaves as they are.
    found -= {"cache", "deepseek_v41"}
    page = (Path(__file__).parent.parent / "benchmarks" / "notes" / "memory.md").read_text()
    unknown = found - set(re.findall(r"\w+", page.partition("| model types | why |")[2]))
    assert unknown == set(), f"these models of mlx-lm cannot read quantized caches: {unknown}"


def test_models_support_tensor_and_pipeline_sharding() -> None:
    from mlx_lm.models import qwen2
    from mlx_lm.models.pipeline import PipelineMixin
    from mlx_lm.utils import sharded_load

    asked = inspect.signature(sharded_load).parameters
    assert {"pipeline_group", "return_config"} <= set(asked)
    assert hasattr(qwen2.Model, "shard")
    assert issubclass(qwen2.Qwen2Model, PipelineMixin)
    stage = PipelineMixin()
    assert (stage.pipeline_rank, stage.pipeline_size) == (0, 1)


def test_hub_file_patterns_match_mlx_lm() -> None:
    assert [*PATTERNS] == mlx_lm.utils.DEFAULT_ALLOW_PATTERNS


def test_model_class_can_be_replaced_while_loading() -> None:
    """Multi-token heads are added by a subclass, whose cache is a list of two."""
    given = parameters(mlx_lm.utils.load_model)
    assert {"model_config", "get_model_classes"} <= set(given)
    for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        model_class, arguments = mlx_lm.utils._get_classes({"model_type": family})
        assert missing(model_class, ("sanitize", "make_cache")) == []
        assert hasattr(arguments, "from_dict")
    kv, state = upstream.CacheList(upstream.KVCache(), upstream.ArraysCache(1))
    assert (kv.empty(), state[0]) == (True, None)
