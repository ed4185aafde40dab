"""An engine with attention kernels gives the text of one without."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import answer, ask, drain
from lockstep import COMPILER, Lockstep
from small_models import BASE, build

from penstock.attention import devices
from penstock.attention.mlx_backend import GPUBackend
from penstock.cli.fitness import try_model
from penstock.engine.core import Core
from penstock.models.loading import load, load_all
from penstock.plugins.kernels import selftest
from penstock.plugins.kernels.attention_ways import layer_forms
from penstock.plugins.kernels.ways import AttentionWay, Situation, Ways
from penstock.recall import MODEL_PATH
from penstock_bench.recall import dialogue

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is neither g++ nor clang++")
SETTINGS: dict[str, Any] = {"memory_limit": "400MB", "max_batch_size": 3, "prefill_chunk": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer, told = load(MODEL_PATH)[1], dialogue(1, tokens=400, facts=6)
    asked = [told.ask(question) for question in told.questions[:3]]
    return [
        tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        for messages in asked
    ]


def texts(
    run: Lockstep | None,
    prompts: list[tuple[int, ...]],
    way: AttentionWay | None = None,
    **settings: Any,
) -> list[tuple[int, ...]]:
    """Answer one question alone and then three at once on the GPU back end."""
    with devices.using(GPUBackend(call_kernel=run)):
        core = Core(load(MODEL_PATH)[0], **{**SETTINGS, **settings})
        try:
            if way is not None:
                assert isinstance(core.runner.ways, Ways)
                forms = layer_forms(core.runner)
                core.runner.ways.table = {
                    (form, situation, coded): way
                    for form in forms
                    for situation in Situation
                    for coded in (False, True)
                }
            handles = [ask(core, prompts[0], 8)]
            drain(core)
            handles += [ask(core, prompt, 8) for prompt in prompts]
            drain(core)
            return [tuple(answer(handle)) for handle in handles]
        finally:
            core.close()


@pytest.fixture(autouse=True)
def long_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the self-test time for every step on a busy machine."""
    monkeypatch.setattr(selftest, "SECONDS", 60.0)


@pytest.fixture(scope="module")
def plain(prompts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    yield texts(None, prompts)


@pytest.mark.parametrize("way", [AttentionWay.KERNEL, AttentionWay.FUSED])
def test_every_attention_implementation_matches_plain(
    folder: Path, prompts: list[tuple[int, ...]], plain: list[tuple[int, ...]], way: AttentionWay
) -> None:
    run = Lockstep(folder=folder)
    assert texts(run, prompts, way) == plain
    assert way is AttentionWay.FUSED or run.calls > 100


@pytest.mark.parametrize(("scheme", "word"), [("8", "8g"), ("auto5x", "3c_2h")])
def test_kernels_read_quantized_kv_in_place(
    folder: Path, prompts: list[tuple[int, ...]], scheme: str, word: str
) -> None:
    codec = {
        "kv_cache_quantization": scheme,
        "kv_cache_quantize_when": "active",
        "kv_cache_min_quantize_tokens": 0,
        "block_size": 64,
    }
    run = Lockstep(folder=folder)
    assert texts(run, prompts, AttentionWay.KERNEL, **codec) == texts(None, prompts, **codec)
    assert any(word in text.name for text, *_ in run.libraries)


@pytest.mark.parametrize("codec", [{}, {"kv_cache_quantization": "8"}])
def test_kernels_read_resident_and_spilled_kv(
    folder: Path, prompts: list[tuple[int, ...]], tmp_path: Path, codec: dict[str, Any]
) -> None:
    """Selective rows and spilled layers use the reference; full layers use kernels."""
    choice = {"attend_tokens": 128, "block_size": 16, "attend_full_layers": (0,), **codec}
    choice |= {"kv_cache_min_quantize_tokens": 0, "kv_cache_raw_first_tokens": 16}
    spilled = {**choice, "active_kv_size": 128, "ssd_cache_dir": tmp_path}
    some = [prompts[0][:100], *prompts]
    expected = texts(None, some, **choice)
    for settings in (choice, spilled):
        run = Lockstep(folder=folder)
        assert texts(run, some, AttentionWay.KERNEL, **settings) == expected
        assert run.calls > 100
    assert any(tmp_path.rglob("*.safetensors"))


def test_kernels_off_setting_calls_no_kernel(
    folder: Path, prompts: list[tuple[int, ...]], plain: list[tuple[int, ...]]
) -> None:
    run = Lockstep(folder=folder)
    assert texts(run, prompts, kernels="off") == plain
    assert run.calls == 0


def test_kernels_off_in_environment_calls_no_kernel(
    folder: Path,
    prompts: list[tuple[int, ...]],
    plain: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For devices on which a kernel ends the process; the setting overrides it."""
    monkeypatch.setenv("PENSTOCK_KERNELS", "off")
    run = Lockstep(folder=folder)
    assert texts(run, prompts) == plain
    with devices.using(GPUBackend(call_kernel=run)):
        fit = try_model("embedded", load_all(str(MODEL_PATH)))
    assert fit.kernels_off == "PENSTOCK_KERNELS=off" and run.calls == 0
    assert texts(run, prompts, kernels="auto") == plain
    assert run.calls > 0


class Broken(Lockstep):
    def __call__(self, call: Any) -> Any:
        return [2.0 * one for one in super().__call__(call)]


def test_wrong_kernels_are_disabled_with_one_line_warning(
    folder: Path,
    prompts: list[tuple[int, ...]],
    plain: list[tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert texts(Broken(folder=folder), prompts) == plain
    (line,) = [one.getMessage() for one in caplog.records if "kernels" in one.getMessage()]
    assert line.startswith("attention kernels are disabled: a result is off by")
    assert "\n" not in line


def test_self_test_timeout_disables_kernels_with_one_line_warning(
    folder: Path,
    prompts: list[tuple[int, ...]],
    plain: list[tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Lockstep(folder=folder)
    monkeypatch.setattr(selftest, "SECONDS", 0.0)
    with caplog.at_level(logging.WARNING):
        assert texts(run, prompts) == plain
    assert run.calls == 0
    (line,) = [one.getMessage() for one in caplog.records if "self-test" in one.getMessage()]
    assert line.startswith("the self-test of attention kernels did not finish in 0 s")


def test_codec_without_kernel_gives_one_line_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
    model = build({**BASE, **heads, "model_type": "llama", "torch_dtype": "float32"})
    codec = {"kv_cache_quantization": "kivi4/raw", "block_size": 64, "max_batch_size": 1}
    device = GPUBackend(call_kernel=Lockstep(folder=folder))
    with caplog.at_level(logging.WARNING), devices.using(device):
        core = Core(model, **{**SETTINGS, **codec})
        ways = core.runner.ways
        kernels = isinstance(ways, Ways) and ways.kernels is not None
        core.close()
    assert kernels
    (line,) = [one.getMessage() for one in caplog.records if "kernel" in one.getMessage()]
    assert line == (
        "no attention kernel supports kivi4/raw of 2 heads on 1 of 256, float32; "
        "plain operations are used there"
    )
