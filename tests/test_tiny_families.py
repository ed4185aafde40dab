import dataclasses
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from tiny_families import Unbuildable, build, families, plain_greedy, prompt_of, uncompiled


def kinds(model: Any) -> set[str]:
    """Return the classes of a model's caches, those inside others too."""

    def walk(caches: Any) -> Iterator[str]:
        for cache in caches:
            yield type(cache).__name__
            yield from walk(getattr(cache, "caches", ()))

    return set(walk(make_prompt_cache(model)))


def test_more_than_a_hundred_families_are_listed() -> None:
    found = families()
    assert len(found) > 100
    assert {"llama", "qwen3_next", "deepseek_v3", "nemotron_h", "lfm2-vl"} <= set(found)
    assert not {"base", "cache", "mla", "switch_layers"} & set(found)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
def test_family_build_is_deterministic(name: str) -> None:
    first, second = (dict(tree_flatten(build(name).parameters())) for _ in range(2))
    assert first.keys() == second.keys()
    for path, weights in first.items():
        assert weights.dtype == mx.float32
        assert mx.array_equal(weights, second[path]), path
    assert sum(weights.nbytes for weights in first.values()) < 1_000_000


@pytest.mark.parametrize(
    ("name", "both"),
    [
        ("cohere2", {"KVCache", "RotatingKVCache"}),
        ("gemma3", {"KVCache", "RotatingKVCache"}),
        ("gpt_oss", {"KVCache", "RotatingKVCache"}),
        ("llama4", {"KVCache", "ChunkedKVCache"}),
        ("gear", {"ArraysCache", "KVCache", "RotatingKVCache"}),
        ("recurrent_gemma", {"ArraysCache", "RotatingKVCache"}),
        ("baichuan_m1", {"CacheList", "ArraysCache", "KVCache", "RotatingKVCache"}),
        ("falcon_h1", {"CacheList", "ArraysCache", "KVCache"}),
        ("granitemoehybrid", {"ArraysCache", "KVCache"}),
        ("jamba", {"ArraysCache", "KVCache"}),
        ("kimi_linear", {"ArraysCache", "KVCache"}),
        ("lfm2", {"ArraysCache", "KVCache"}),
        ("nemotron_h", {"ArraysCache", "KVCache"}),
        ("qwen3_5_moe", {"ArraysCache", "KVCache"}),
    ],
)
def test_hybrid_has_all_layer_kinds(name: str, both: set[str]) -> None:
    assert kinds(build(name)) == both


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma2", "qwen3_next", "mamba2"])
def test_text_depends_on_whole_prompt_and_not_on_chunks(name: str) -> None:
    model = build(name)
    prompt = prompt_of(40)
    changed = [*prompt[:30], prompt[30] ^ 1, *prompt[31:]]
    with uncompiled():
        tokens, logits = plain_greedy(model, prompt, 12)
        again, others = plain_greedy(model, prompt, 12, cuts=[13])
        _, elsewhere = plain_greedy(model, changed, 1)
    assert len(set(tokens)) > 2
    assert again == tokens
    assert mx.abs(others - logits).max() < 1e-4 * mx.abs(logits).max()
    assert mx.abs(elsewhere - logits[:1]).max() > 1e-2


def test_unknown_config_field_is_named_in_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class ModelArgs(llama.ModelArgs):
        flux_capacity: int = dataclasses.field(kw_only=True)

    monkeypatch.setattr(llama, "ModelArgs", ModelArgs)
    with pytest.raises(Unbuildable, match="flux_capacity"):
        build("llama")


def test_failing_family_is_reported_as_unbuildable(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        raise RuntimeError("[metal_kernel] No Metal back-end.")

    monkeypatch.setattr(llama.Model, "__call__", call)
    with pytest.raises(Unbuildable, match="needs a GPU kernel"):
        build("llama")


def test_exceptions_name_existing_families_and_fields() -> None:
    for module, name in tiny_families.EXCEPTIONS:
        classes = [tiny_families._module(module).ModelArgs]
        if "text_config" in tiny_families._fields(tiny_families._module(module)):
            classes.append(tiny_families._text_args(module))
        assert any(name in {f.name for f in dataclasses.fields(c)} for c in classes), (module, name)
