"""`penstock plan` compared with MLX's memory, and its text with its numbers."""

from __future__ import annotations

import functools
import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from core_parts import retention_of
from small_models import BASE, build
from tiny_encoders import write_encoder

from penstock import Engine, Request, load, memory
from penstock.caches import make_kv_cache
from penstock.cli import main
from penstock.cli.doctor import examine
from penstock.cli.plan import make_plan
from penstock.config import ServerSettings
from penstock.encoders.bert import batch_bytes
from penstock.encoders.encoder import load_encoder
from penstock.engine.core import Core
from penstock.engine.retention.spilling import Spilling
from penstock.errors import ModelError, NeverFits, SettingError
from penstock.memory import machine
from penstock.models import named
from penstock.recall import MODEL_PATH
from penstock.server.prompt_memory import TOKEN_BYTES
from penstock.server.service import Service

SIZES = {
    **BASE,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 128, "sliding_window_pattern": 3},
    "mixtral": {"hidden_size": 256, "num_local_experts": 2, "num_experts_per_tok": 1},
    "lfm2": {
        "head_dim": None,
        "hidden_size": 256,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 256,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3, 5],
    },
}


@pytest.fixture(autouse=True)
def no_spare_buffers() -> Iterator[None]:
    """Disable MLX's buffer cache, which returns buffers up to a page too large."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def held_after(
    model: Any, tokens: int, *, max_kv_size: int, kv_bits: int | None, capacity: int | None = None
) -> int:
    """Return the bytes MLX retains after a chunked prompt and two single tokens."""
    gc.collect()
    before = mx.get_active_memory()
    caches = make_kv_cache(model, max_kv_size, kv_bits=kv_bits, capacity=capacity)
    prompt = mx.random.randint(0, 50, (1, tokens))
    for chunk in mx.split(prompt, range(100, tokens, 100), axis=1):
        mx.eval(model(chunk, cache=caches))
    for _ in range(2):
        mx.eval(model(mx.array([[7]]), cache=caches), [c.state for c in caches])
    del prompt, chunk
    gc.collect()
    return mx.get_active_memory() - before


@functools.cache
def window_cache_bytes(name: str, kv_bits: int | None) -> int:
    """Return the cache bytes of a model after its window of 450 tokens was exceeded."""
    model = build({**SIZES, "model_type": name, **MODELS[name]})
    return held_after(model, 500, max_kv_size=450, kv_bits=kv_bits, capacity=600)


@pytest.mark.parametrize("kv_bits", [None, 8, 4, 3])
@pytest.mark.parametrize("name", MODELS)
def test_plan_matches_mlx_memory_to_one_percent(name: str, kv_bits: int | None) -> None:
    config = {**SIZES, "model_type": name, **MODELS[name]}
    spec = memory.read_model_spec(config)
    made = make_plan(spec, memory_bytes=10**9, max_kv_size=450, kv_bits=kv_bits)
    held = window_cache_bytes(name, kv_bits)
    assert held == pytest.approx(made.chosen.bytes_per_sequence, rel=0.01)


def test_capacity_of_short_request_is_below_window() -> None:
    config = {**SIZES, "model_type": "gemma3_text", **MODELS["gemma3_text"]}
    spec = memory.read_model_spec(config)
    held = held_after(build(config), 90, max_kv_size=4096, kv_bits=None, capacity=100)
    assert held == pytest.approx(memory.bytes_of_window(spec, 4096, capacity=100), rel=0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_key_value_heads": 5},
        {"num_hidden_layers": 7},
        {"head_dim": 65},
        {"sliding_window": 140},
        {"sliding_window_pattern": 2},
        {"torch_dtype": "float16"},
    ],
)
def test_check_detects_wrong_formula(wrong: dict[str, Any]) -> None:
    config = {**SIZES, "model_type": "gemma3_text", **MODELS["gemma3_text"]}
    made = make_plan(memory.read_model_spec(config | wrong), memory_bytes=10**9, max_kv_size=450)
    held = window_cache_bytes("gemma3_text", None)
    assert held != pytest.approx(made.chosen.bytes_per_sequence, rel=0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with only the config of a 32-layer model, 32 heads x 128, float16."""
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_output_is_one_object(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, err = run(capsys, str(folder), "--memory-limit", "32GB", "--json")
    made = json.loads(out)
    assert (code, err) == (0, "")
    assert made["fits"] is True
    assert made["chosen"]["bytes_per_sequence"] == 2 * 2**30
    assert made["chosen"]["full_bytes_per_token"] == 524_288
    assert [row["kv_bits"] for row in made["rows"]] == [16, 8, 6, 5, 4, 3, 2]
    assert made["memory_bytes"] == 32 * 10**9
    assert made["max_kv_size"] == 4096
    assert made["keep_kv_size"] == 2048
    assert "estimated" in made["weight_source"]


def test_table_shows_correct_arithmetic(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, _ = run(capsys, str(folder), "--memory-limit", "32GB", "--kv-bits", "4")
    assert code == 0
    assert "32 full layers x 32 heads x (72 + 72) bytes = 147,456 bytes a token" in out
    assert "72 bytes = 128 x 4 bits / 8 + 128 / 64 groups x 2 (scale, bias) x 2 bytes" in out
    assert "*4" in out
    sums = re.findall(r"^ +([\d,x+ ]+) = ([\d,]+) bytes", out, re.MULTILINE)
    assert sums
    for terms, total in sums:
        assert eval(terms.replace(",", "").replace("x", "*")) == int(total.replace(",", ""))


@pytest.mark.parametrize("columns", [50, 60, 80])
@pytest.mark.parametrize("batch", ["1", "4"])
def test_numbers_are_not_truncated_on_narrow_terminals(
    columns: int,
    batch: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(capsys, "--memory-limit", "4GB", "--batch", batch)
    table = out.partition("full layers x")[0]
    assert code == 0 and "…" not in table
    rows = [line for line in table.splitlines() if re.match(r"[│ ]*\*?\d+ .* k?B ", line)]
    assert len(rows) == 7 and all(len(line) <= columns for line in rows)
    if (columns, batch) == (50, "1"):
        assert "32,768" in table and "67.11 MB" in table


def test_window_layers_are_listed_separately(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {**SIZES, "model_type": "gemma3_text", **MODELS["gemma3_text"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = run(capsys, str(tmp_path), "--memory-limit", "1GB", "--max-kv-size", "1000")
    assert "2 full, 4 window layers" in out
    assert "4 window layers x 4 heads x (64 + 64) x 4 bytes = 8,192 bytes a token, 128 tok" in out
    assert "1,000 x 4,096 + 128 x 8,192" in out or "128 x 8,192 + 1,000 x 4,096" in out


def test_plan_that_does_not_fit_gives_remedies(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    arguments = (str(folder), "--memory-limit", "20GB", "--batch", "4")
    code, out, _ = run(capsys, *arguments)
    assert code == 1
    assert "does not fit: caches of 8.59 GB in 6.52 GB besides the weights, 2.07 GB too much" in out
    window, batch = re.findall(r"--max-kv-size (\d+) or --batch (\d+) or --kv-bits 8", out)[0]
    assert run(capsys, *arguments, "--max-kv-size", window)[0] == 0
    assert run(capsys, *arguments, "--max-kv-size", str(int(window) + 1))[0] == 1
    assert run(capsys, *arguments, "--kv-bits", "8")[0] == 0
    assert run(capsys, *arguments[:3], "--batch", batch)[0] == 0
    assert run(capsys, *arguments[:3], "--batch", str(int(batch) + 1))[0] == 1


def test_weights_exceeding_memory_are_reported(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, out, _ = run(capsys, str(folder), "--memory-limit", "8GB", "--json")
    made = json.loads(out)
    assert code == 1
    assert "the weights alone exceed --memory-limit by 5.48 GB" in made["advice"]
    assert made["chosen"]["sequences"] == 0


@pytest.mark.parametrize("bits", [(), ("--kv-bits", "4"), ("--batch", "3")])
def test_limit_that_plan_names_fits(
    capsys: pytest.CaptureFixture[str], folder: Path, bits: tuple[str, ...]
) -> None:
    """The weights are converted to float32 with a larger limit on a CPU."""
    for arguments in ((str(folder), *bits), (str(MODEL_PATH), *bits)):
        code, out, _ = run(capsys, *arguments, "--memory-limit", "1MB", "--json")
        limit = re.findall("raise it to at least ([^ ]+B) for", json.loads(out)["advice"])[0]
        assert code == 1
        assert run(capsys, *arguments, "--memory-limit", limit)[0] == 0
        unit = limit[-2:]
        less = f"{float(limit[:-2]) - {'MB': 1.0, 'GB': 0.1}[unit]:.1f}{unit}"
        assert run(capsys, *arguments, "--memory-limit", less)[0] == 1


def test_embedded_model_is_default(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--json")
    made = json.loads(out)
    assert (code, made["model"], made["dtype"]) == (0, "recall", "float32")
    assert made["weight_source"] == "headers of the safetensors files"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere/model",), "run penstock pull nowhere/model first, or pass a model folder"),
        (("nowhere at all",), "there is no folder nowhere at all, and no model of that name; pen"),
        (("--memory-limit", "lots"), "--memory-limit 'lots' is not a size"),
        (("--memory-limit", "0GB"), "--memory-limit is 0"),
        (("--kv-bits", "7"), "--kv-bits 7"),
        (("--max-kv-size", "1"), "max-kv-size"),
        (("--batch", "0"), "batch"),
        (("--max-kv-size", "64", "--keep-kv-size", "64"), "(--keep-kv-size) 64 leaves no room"),
    ],
)
def test_bad_flag_gives_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err


def test_unsupported_head_size_is_marked_impossible() -> None:
    spec = memory.read_model_spec(
        {**SIZES, "model_type": "phi3", "hidden_size": 160, "num_attention_heads": 2}
    )
    made = make_plan(spec, memory_bytes=10**9)
    assert [bool(row.impossible) for row in made.rows] == [False] + [True] * 6
    with pytest.raises(SettingError, match="head size 80 of the model is not a multiple of 32"):
        make_plan(spec, memory_bytes=10**9, kv_bits=4)


def test_unknown_weights_and_long_windows_are_noted() -> None:
    spec = memory.read_model_spec({**SIZES, "model_type": "newcomer"})
    made = make_plan(spec, memory_bytes=10**9, max_kv_size=5000)
    assert made.weight_bytes is None
    assert made.free_bytes == 10**9
    notes = "\n".join(made.notes)
    assert "newcomer is not known" in notes
    assert "they are not counted" in notes
    assert "context is 4,096 tokens, less than the window" in notes


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3"])
def test_models_that_mlx_lm_cannot_quantize_have_engine_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_type: str
) -> None:
    latents = {"kv_lora_rank": 64, "qk_rope_head_dim": 64}
    config = {**SIZES, "model_type": model_type, **latents}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = run(capsys, str(tmp_path), "--memory-limit", "1GB", "--kv-bits", "8")
    assert (code, err) == (0, "")
    assert "possible" not in out


def test_plan_never_suggests_impossible_bits() -> None:
    sizes = {**SIZES, "hidden_size": 160, "num_attention_heads": 2}
    spec = memory.read_model_spec({**sizes, "model_type": "phi3"})
    made = make_plan(spec, memory_bytes=10**6, max_kv_size=4096)
    assert made.advice is not None
    assert "--kv-bits" not in made.advice


@pytest.mark.parametrize("tokens", [0, 1])
def test_invalid_position_count_is_model_error(tokens: int) -> None:
    spec = memory.read_model_spec(
        {**SIZES, "model_type": "llama", "max_position_embeddings": tokens}
    )
    with pytest.raises(ModelError, match=f"max_position_embeddings is {tokens}, and a window has"):
        make_plan(spec, memory_bytes=10**9)
    assert make_plan(spec, memory_bytes=10**9, max_kv_size=600).max_kv_size == 600


@pytest.mark.parametrize("limit_bytes", [None, 10**9])
def test_default_limit_matches_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None
) -> None:
    """With and without a container's limit, whatever the device recommends."""
    monkeypatch.setattr(machine, "_container_limit_bytes", lambda: limit_bytes)
    _, out, _ = run(capsys, "--json")
    assert json.loads(out)["memory_bytes"] == examine().memory.default_limit_bytes
    if mx.default_device() == mx.cpu and limit_bytes is not None:
        assert json.loads(out)["memory_bytes"] == 700_000_000


@pytest.mark.parametrize(
    ("device_info", "recommended"),
    [
        ({}, 4 * 10**9),
        ({"total_memory": 8 * 10**9}, 8 * 10**9),
        ({"max_recommended_working_set_size": 3 * 10**9, "total_memory": 8 * 10**9}, 3 * 10**9),
    ],
)
def test_default_limit_follows_device_recommendation(
    monkeypatch: pytest.MonkeyPatch, device_info: dict[str, str | int], recommended: int
) -> None:
    monkeypatch.setattr(machine, "_container_limit_bytes", lambda: 4 * 10**9)
    found = memory.read_machine_memory(device_info)
    assert (found.total_bytes, found.recommended_bytes) == (4 * 10**9, recommended)
    assert found.default_limit_bytes == recommended * 7 // 10


def test_draft_model_weights_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for more in ([], ["--draft-model", str(MODEL_PATH)]):
        main(["plan", "--memory-limit", "100MB", "--json", *more])
        plans.append(json.loads(capsys.readouterr().out))
    alone, drafted = plans
    assert drafted["weight_bytes"] == 2 * alone["weight_bytes"]
    assert drafted["free_bytes"] == alone["free_bytes"] - alone["weight_bytes"]
    assert any("the draft model recall needs 2.05 kB" in n for n in drafted["notes"])
    assert main(["plan", "--hosts", "2", "--draft-model", str(MODEL_PATH)]) == 2


def test_tensor_parallel_plan_halves_weights_and_kv(capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.recall import MODEL_PATH

    whole, part = (made_for(capsys, str(MODEL_PATH), hosts) for hosts in (1, 2))
    assert part["chosen"]["bytes_per_sequence"] * 2 == whole["chosen"]["bytes_per_sequence"]
    embeddings = 3_025 * 256 * 4 + 256 * 4  # and the last norm; each host has them whole
    assert part["weight_bytes"] - embeddings == (whole["weight_bytes"] - embeddings) / 2
    assert "one of 2 machines" in part["weight_source"]


def test_pipeline_plan_halves_kv(capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.recall import MODEL_PATH

    whole = made_for(capsys, str(MODEL_PATH), 1)
    part = made_for(capsys, str(MODEL_PATH), 2, "--pipeline")
    assert part["chosen"]["bytes_per_sequence"] * 2 == whole["chosen"]["bytes_per_sequence"]


def test_indivisible_layer_count_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hosts", "5", "--pipeline"]) == 2
    assert "layers, which --hosts 5 does not divide" in capsys.readouterr().err


def made_for(capsys: pytest.CaptureFixture[str], model: str, hosts: int, *more: str) -> Any:
    assert main(["plan", model, "--hosts", str(hosts), *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_indivisible_head_count_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hosts", "3"]) == 2
    assert "2 heads of keys and values, which --hosts 3 does not divide" in capsys.readouterr().err


def test_latent_head_is_replicated_on_every_host() -> None:
    latent = {
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "vocab_size": 50,
        "torch_dtype": "float16",
    }
    spec = memory.read_model_spec(latent)
    assert memory.divided(spec, 4).layers == spec.layers


def test_spilled_plan_matches_admission_reservation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    choice = {"attend_tokens": 128, "active_kv_size": 256}
    flags = ["--attend-tokens=128", "--active-kv-size=256", "--memory-limit=120MB"]
    main(["plan", str(MODEL_PATH), "--measure", "--json", *flags])
    told = json.loads(capsys.readouterr().out)
    tokens, spilled = told["largest_request_tokens"], told["spilled"]
    assert spilled["tokens"] == tokens and spilled["active_tokens"] < tokens / 2
    model, _ = load(MODEL_PATH)
    core = Core(model, memory_limit="120MB", ssd_cache_dir=tmp_path, **choice)
    try:
        parts = ("index_bytes", "place_bytes", "active_bytes", "tree_bytes")
        reserved = core.budget._estimator.sequence_bytes(tokens)
        assert sum(spilled[part] for part in parts) == reserved
        spilling = retention_of(core, Spilling)
        assert spilling is not None and spilled["cache_bytes"] == spilling.nbytes
    finally:
        core.close()
    main(["plan", str(MODEL_PATH), "--measure", *flags])
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("spilled"))
    assert line.startswith(f"spilled  {tokens:,} tokens in 120.0 MB: index ")
    assert main(["plan", str(MODEL_PATH), *flags])
    assert "add --measure" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{}, {"max_kv_size": 256}])
@pytest.mark.parametrize("memory_limit", ["36MB", "80MB"])
def test_largest_planned_request_is_admitted(
    memory_limit: str, settings: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan, `/v1/models` and admission agree; one token more is refused."""
    flags = [f"--max-kv-size={size}" for size in settings.values()]
    main(["plan", str(MODEL_PATH), "--measure", "--memory-limit", memory_limit, "--json", *flags])
    tokens = json.loads(capsys.readouterr().out)["largest_request_tokens"]
    model, tokenizer = load(MODEL_PATH)
    with Engine(model, tokenizer, memory_limit=memory_limit, **settings) as engine:
        service = Service(engine, tokenizer, ServerSettings(), "recall")
        service.close()
        assert tokens == service.context_tokens > 1
        fits = engine.ask(lambda view: view.fitting_tokens).result()
        assert tokens == min(fits, 32_768, service.memory.pool_bytes // TOKEN_BYTES)
        if tokens == fits:
            engine.submit(Request(prompt=(7,) * (tokens - 1), max_tokens=1)).cancel()
            with pytest.raises(NeverFits):
                engine.submit(Request(prompt=(7,) * tokens, max_tokens=1))


def test_several_models_are_planned_with_pinned_ones_loaded(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    table = tmp_path / "models.toml"
    table.write_text(
        f'[[model]]\npath = "{folder}"\nname = "large"\n\n'
        f'[[model]]\npath = "{MODEL_PATH}"\nname = "small"\npin = true\n'
    )
    code, out, err = run(capsys, "--models", str(table), "--memory-limit", "32GB", "--json")
    made = json.loads(out)
    large, small = made["models"]
    assert (code, err, made["fits"]) == (0, "", True)
    assert made["weight_bytes"] == large["weight_bytes"] + small["weight_bytes"]
    assert made["free_bytes"] == 32 * 10**9 - made["weight_bytes"]
    assert small["pinned"] and not large["pinned"]
    alone = json.loads(run(capsys, str(folder), "--memory-limit", "32GB", "--json")[1])
    assert large["bytes_per_token"] == alone["chosen"]["full_bytes_per_token"]

    # Exactly the weights of both: the large one fits, and a byte less is refused.
    limit = made["weight_bytes"]
    for nbytes, fits in ((limit, True), (limit - 1, False)):
        code, out, _ = run(capsys, "--models", str(table), "--memory-limit", f"{nbytes}")
        assert code == (0 if fits else 1)
        assert ("does not fit" in out) != fits
        assert "make room for each other" in out


def test_encoder_is_planned_by_its_longest_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "encoder"
    write_encoder(folder)
    encoder = load_encoder(folder)
    longest = encoder.spec.most_tokens
    text_bytes = batch_bytes(encoder.spec, [longest])
    for more in ([], [str(MODEL_PATH)]):
        code, out, _ = run(capsys, str(folder), *more, "--memory-limit", "1GB", "--json")
        first, *others = json.loads(out)["models"]
        assert (code, len(others)) == (0, len(more))
        assert first["weight_bytes"] == encoder.nbytes
        assert first["largest_tokens"] == longest
        assert 0 <= first["bytes_per_token"] * longest - text_bytes < longest
    for nbytes, tokens in ((text_bytes, longest), (text_bytes - 1, longest - 1)):
        limit = f"{encoder.nbytes + nbytes}"
        code, out, _ = run(capsys, str(folder), "--memory-limit", limit, "--json")
        assert (code, json.loads(out)["models"][0]["largest_tokens"]) == (0, tokens)
    code, out, _ = run(capsys, str(folder), "--memory-limit", f"{encoder.nbytes}")
    assert code == 1 and "does not fit" in out


def test_single_model_flags_are_refused_for_several_models(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, _, err = run(capsys, str(folder), str(MODEL_PATH), "--batch", "4")
    assert code == 2 and "several models" in err


@pytest.mark.parametrize("name", ["smollm2", "qwen3.5-4b"])
def test_known_name_that_is_not_downloaded_is_to_be_pulled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(named, "find", lambda name: None)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    code, _, complaint = run(capsys, name)
    assert code == 2
    assert f"{name} is not downloaded yet; run penstock pull {name} first\n" in complaint
