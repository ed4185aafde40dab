"""Adapters: several on one model and in one batch, compared with mlx-lm using one each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from adapter_folders import fresh, write_adapter
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as theirs
from mlx_lm.tuner.utils import load_adapters
from parity_models import RECURRENT_FAMILIES, generate, tokens_of

from penstock.engine.core import Core
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.request import Request
from penstock.errors import ModelError, SettingError
from penstock.models.adapters import adapters_of, put_adapters
from penstock.models.layer_seams import adapted
from penstock.models.loading import load_all
from penstock.models.mlx_lm import _dense
from penstock.models.weight_packer import PackedParts, pack, weight_packer
from penstock.recall import MODEL_PATH

SMALL: dict[str, Any] = {
    "memory_limit": "60MB",
    "block_size": 16,
    "prefill_chunk": 32,
    "max_batch_size": 4,
}
FAMILIES = ("embedded", "llama", "qwen3", "gemma3", "mixtral", "gemma2", *RECURRENT_FAMILIES)
TOKENS = 12


def off(logits: mx.array, others: mx.array) -> float:
    return float(mx.abs(logits - others).max() / mx.abs(others).max())


def prompts() -> list[tuple[int, ...]]:
    draw = Random(11)
    shared = tuple(draw.randrange(2, 50) for _ in range(40))
    return [shared + tuple(draw.randrange(2, 50) for _ in range(count)) for count in (3, 17)]


def expected(model: nn.Module) -> list[list[int]]:
    """Return mlx-lm's greedy answers."""
    return [
        tokens_of(generate(model, prompt, theirs.make_prompt_cache(model), TOKENS))
        for prompt in prompts()
    ]


def answers(core: Core, adapters: Sequence[str | None]) -> dict[str | None, list[list[int]]]:
    """Return the answers to all prompts with each adapter in one batch."""
    handles = {
        (adapter, number): core.submit(
            Request(prompt=prompt, max_tokens=TOKENS, ignore_eos=True, adapter=adapter)
        )
        for number, prompt in enumerate(prompts())
        for adapter in adapters
    }
    while core.step():
        pass
    core.view.check()
    told: dict[str | None, list[list[int]]] = {adapter: [] for adapter in adapters}
    for (adapter, _), handle in handles.items():
        told[adapter].append(handle.result(0.0)[0].tokens)
    return told


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, Path]]]:
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    yield (
        family,
        {
            "first": write_adapter(family, folder / "first", 1),
            "second": write_adapter(family, folder / "second", 2, rank=6),
            "dora": write_adapter(family, folder / "dora", 3, dora=True),
        },
    )


def test_adapters_in_one_batch_match_separate_mlx_lm_models(
    served: tuple[str, dict[str, Path]],
) -> None:
    family, folders = served
    alone: dict[str | None, list[list[int]]] = {None: expected(fresh(family))}
    for name, folder in folders.items():
        alone[name] = expected(load_adapters(fresh(family), str(folder)))
    assert len({str(tokens) for tokens in alone.values()}) == len(alone)  # they differ

    model = fresh(family)
    put_adapters(model, folders)
    mx.eval(model.parameters())
    beside = mx.get_active_memory() - weight_bytes(model)
    core = Core(model, **SMALL, speculative_tokens=4)
    mx.reset_peak_memory()
    try:
        for _ in ("cold", "warm"):
            assert answers(core, list(alone)) == alone
        assert mx.get_peak_memory() - beside < core.view.stats().limit_bytes
        assert answers(core, ["second"])["second"] == alone["second"]
    finally:
        core.close()


OTHER_LAYERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "mixtral": {
        "experts": {"kinds": ("SwitchLinear",)},
        "all": {"kinds": ("Linear", "SwitchLinear"), "outside": True, "rank": 6},
        "attention": {},
    },
    "gpt_oss": {"experts": {"kinds": ("SwitchLinear",)}, "head": {"kinds": (), "outside": True}},
    "llama": {"outside": {"outside": True}, "dora": {"outside": True, "dora": True, "kinds": ()}},
    "embedded": {"outside": {"outside": True}, "dora": {"outside": True, "dora": True}},
}
"""Adapters of experts, embeddings and output layers: of a model that ties the two, and of others.
"""


@pytest.mark.parametrize("family", OTHER_LAYERS)
def test_experts_embeddings_and_heads_match_mlx_lm(tmp_path: Path, family: str) -> None:
    folders = {
        name: write_adapter(family, tmp_path / name, seed, **how)
        for seed, (name, how) in enumerate(OTHER_LAYERS[family].items(), 1)
    }
    alone: dict[str | None, list[list[int]]] = {None: expected(fresh(family))}
    for name, folder in folders.items():
        alone[name] = expected(load_adapters(fresh(family), str(folder)))
    assert len({str(tokens) for tokens in alone.values()}) == len(alone)  # they differ

    model = fresh(family)
    put_adapters(model, folders)
    mx.eval(model.parameters())
    beside = mx.get_active_memory() - weight_bytes(model)
    core = Core(model, **SMALL, speculative_tokens=4)
    mx.reset_peak_memory()
    try:
        for _ in ("cold", "warm"):
            assert answers(core, list(alone)) == alone
        assert mx.get_peak_memory() - beside < core.view.stats().limit_bytes
    finally:
        core.close()


def test_dora_adapter_of_experts_is_refused(tmp_path: Path) -> None:
    folder = write_adapter("mixtral", tmp_path / "mine", 1, kinds=("SwitchLinear",))
    weights = folder / "adapters.safetensors"
    arrays: dict[str, mx.array] = dict(mx.load(str(weights)))  # type: ignore[arg-type]
    names = {name.rpartition(".")[0] for name in arrays}
    mx.save_safetensors(str(weights), arrays | {f"{name}.m": mx.ones((4, 8)) for name in names})
    with pytest.raises(ModelError, match="are experts; only LoRA"):
        put_adapters(fresh("mixtral"), {"mine": folder})


def test_mixed_pass_supports_several_adapters(tmp_path: Path) -> None:
    folders = {
        name: write_adapter("llama", tmp_path / name, n, outside=True)
        for n, name in enumerate("ab", 1)
    }
    asked = {"a": (5, 9, 4, 11), None: (7, 3, 8, 2, 6), "b": (2, 12, 6, 9, 3, 10, 8)}
    alone = {}
    for name, prompt in asked.items():
        model = (
            fresh("llama") if name is None else load_adapters(fresh("llama"), str(folders[name]))
        )
        caches = theirs.make_prompt_cache(model)
        alone[name] = tokens_of(generate(model, prompt, caches, TOKENS))
    model = fresh("llama")
    put_adapters(model, folders)
    core = Core(model, **{**SMALL, "prefill_chunk": 64})
    try:
        mixed, adapters, handles = core.runner.mixed, list[int](), {}

        def noting(*arguments: Any) -> Any:
            adapters.extend(chunk.adapter for chunk in arguments[-1])
            return mixed(*arguments)

        core.runner.mixed = noting  # type: ignore[method-assign]
        for name, prompt in asked.items():
            request = Request(prompt=prompt, max_tokens=TOKENS, ignore_eos=True, adapter=name)
            handles[name] = core.submit(request)
            core.step()
            core.step()
        while core.step():
            pass
        assert adapters == [0, 2]
        assert {name: h.result(0.0)[0].tokens for name, h in handles.items()} == alone
    finally:
        core.close()


def test_adapters_share_no_cached_prefix(tmp_path: Path) -> None:
    folders = {name: write_adapter("llama", tmp_path / name, 7) for name in ("a", "b")}
    (folders["b"] / "adapter_config.json").write_text(
        (folders["a"] / "adapter_config.json").read_text().replace("5.0", "4.0")
    )
    model = fresh("llama")
    put_adapters(model, folders)
    core = Core(model, **SMALL)
    try:
        cached = []
        for adapter in (None, "a", "b", None, "a", "b"):
            handle = core.submit(Request(prompt=prompts()[1], max_tokens=1, adapter=adapter))
            while core.step():
                pass
            finish = handle.result(0.0)[0].finish
            assert finish is not None
            cached.append(finish.usage.cached_tokens)
        assert cached[:3] == [0, 0, 0]
        assert min(cached[3:]) > 40
        # Nor does a client whose salt is made like an adapter's.
        for fingerprint in adapters_of(model).names.fingerprints.values():
            crafted = Request(prompt=prompts()[1], max_tokens=1, salt=f"{fingerprint}\0")
            handle = core.submit(crafted)
            while core.step():
                pass
            finish = handle.result(0.0)[0].finish
            assert finish is not None and finish.usage.cached_tokens == 0
    finally:
        core.close()


def test_unknown_adapter_is_refused(tmp_path: Path) -> None:
    model = fresh("llama")
    put_adapters(model, {"mine": write_adapter("llama", tmp_path / "mine", 1)})
    core = Core(model, **SMALL)
    try:
        with pytest.raises(SettingError, match="no adapter 'other'; this model has mine"):
            core.submit(Request(prompt=(1, 2, 3), adapter="other"))
    finally:
        core.close()


def test_adapter_bytes_count_as_weights(tmp_path: Path) -> None:
    model = fresh("llama")
    plain = Core(model, **SMALL)
    before = plain.view.stats().by_kind["weights"]
    plain.close()
    model = fresh("llama")
    put_adapters(model, {"mine": write_adapter("llama", tmp_path / "mine", 1)})
    core = Core(model, **SMALL)
    try:
        added = core.view.stats().by_kind["weights"] - before
    finally:
        core.close()
    written = (tmp_path / "mine" / "adapters.safetensors").stat().st_size
    assert added == adapters_of(model).nbytes
    assert 2 * 0.9 * written < added < 2 * 1.1 * written  # its own, and the zeros of the base


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_packed_model_supports_adapters_of_all_layers(tmp_path: Path, family: str) -> None:
    if weight_packer() is None:
        pytest.skip("packed products are compiled by Numba")
    model, reference = fresh(family), fresh(family)
    for one in (model, reference):
        nn.quantize(one, group_size=32, bits=4)
    how: dict[str, Any] = {"kinds": ("Linear", "SwitchLinear"), "outside": True}
    folder = write_adapter(family, tmp_path / "mine", 1, **how)
    tokens = mx.array([prompts()[0]])
    plain = reference(tokens)
    wanted = load_adapters(reference, str(folder))(tokens)
    put_adapters(model, {"mine": folder})
    pack(model, _dense, exact=True)
    assert off(model(tokens), plain) < 1e-3
    with adapted([1]):
        changed = model(tokens)
    assert off(changed, wanted) < 1e-3 < 0.1 < off(changed, plain)


@pytest.mark.parametrize("dora", [False, True])
def test_packed_model_supports_adapters(tmp_path: Path, dora: bool) -> None:
    if weight_packer() is None:
        pytest.skip("packed products are compiled by Numba")
    model = fresh("llama")
    nn.quantize(model, group_size=32, bits=4)
    widths = dict(tree_flatten(model.parameters()))
    folder = write_adapter("llama", tmp_path / "mine", 1, dora=dora)
    tokens = mx.array([prompts()[0]])

    reference = fresh("llama")
    nn.quantize(reference, group_size=32, bits=4)
    reference.update(tree_unflatten(list(widths.items())))
    plain = reference(tokens)
    wanted = load_adapters(reference, str(folder))(tokens)

    put_adapters(model, {"mine": folder})
    pack(model, _dense, exact=True)
    assert off(model(tokens), plain) < 1e-3
    with adapted([1]):
        changed = model(tokens)
    assert off(changed, wanted) < 1e-3 < 0.1 < off(changed, plain)
    parts = PackedParts.of(model)
    assert parts is not None and not parts.layers and parts.products


def test_model_is_loaded_with_adapters(tmp_path: Path) -> None:
    folder = write_adapter("embedded", tmp_path / "mine", 1)
    loaded = load_all(MODEL_PATH, adapters={"mine": folder})
    assert list(adapters_of(loaded.model).names.fingerprints) == ["mine"]


WRONG: Mapping[str, str] = {
    "no file": "has no adapters.safetensors",
    "not JSON": "cannot be read",
    "full": "has type full",
    "other shapes": "is another model's",
    "other layers": "no linear layer, embedding or experts of this model",
    "embedding": "is another model's",
    "other matrices": "otherwise than by LoRA or DoRA",
    "nothing": "changes nothing",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_adapter_gives_one_line_error(tmp_path: Path, wrong: str) -> None:
    folder = write_adapter("llama", tmp_path / "mine", 1)
    config, weights = folder / "adapter_config.json", folder / "adapters.safetensors"
    arrays: dict[str, mx.array] = dict(mx.load(str(weights)))  # type: ignore[arg-type]
    if wrong == "no file":
        weights.unlink()
    elif wrong == "not JSON":
        config.write_text("{")
    elif wrong == "full":
        config.write_text('{"fine_tune_type": "full", "lora_parameters": {"scale": 1.0}}')
    elif wrong == "other shapes":
        name = next(name for name in arrays if name.endswith("lora_a"))
        mx.save_safetensors(str(weights), {**arrays, name: mx.zeros((3, 4))})
    elif wrong == "other layers":
        moved = {name.replace("layers.1.", "layers.1.x."): a for name, a in arrays.items()}
        mx.save_safetensors(str(weights), moved)
    elif wrong == "embedding":
        more = {f"model.embed_tokens.lora_{side}": mx.zeros((4, 4)) for side in "ab"}
        mx.save_safetensors(str(weights), {**arrays, **more})
    elif wrong == "other matrices":
        mx.save_safetensors(str(weights), {**arrays, "model.norm.weight": mx.zeros(4)})
    else:
        mx.save_safetensors(str(weights), {})
    with pytest.raises(ModelError, match=WRONG[wrong]) as refused:
        put_adapters(fresh("llama"), {"mine": folder})
    assert "\n" not in str(refused.value)
