"""Flags of other servers: translated, or refused with the name of ours."""

from __future__ import annotations

import shlex

import pytest
from typer.main import get_command

from penstock.cli import main
from penstock.cli.commands import app
from penstock.cli.foreign_names import (
    FOREIGN_FLAGS,
    FOREIGN_VALUES,
    MODEL,
    Translation,
    translated,
)
from penstock.cli.help_groups import GroupedCommand
from penstock.server.parsing.formats import call_names, reasoning_names

COMMANDS = {
    name: {flag for parameter in command.params for flag in parameter.opts}
    for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
    if isinstance(command, GroupedCommand)
}
EVERY_FLAG = set().union(*COMMANDS.values())


def serve_words(line: str, **environment: str) -> Translation:
    return translated(shlex.split(line), COMMANDS["serve"], environment)


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (
            "--kv-cache-quantization --kv-cache-quantization-bits 4 "
            "--kv-cache-quantization-group-size 64 --continuous-batching",
            "--kv-cache-quantization 4",
        ),
        ("--kv-bits 4 --kv-group-size 32 --quantized-kv-start 0", "--kv-cache-min-quantize-tokens "
         "0 --kv-cache-quantization affine4g32"),
        ("--kv-cache-quantization --kv-group-size 128", "--kv-cache-quantization affine8g128"),
        ("--kv-cache-quantization k8v4 --port 0", "--kv-cache-quantization k8v4 --port 0"),
        ("--model m --port 1 --temp 0.5 --allowed-origins https://a.b,https://c.d",
         "m --port 1 --temperature 0.5 --cors-origin https://a.b --cors-origin https://c.d"),
        ("org/m --max-num-seqs=8 --enable-auto-tool-choice --tool-call-parser kimi",
         "org/m --max-batch-size 8 --tool-parser kimi_k2"),
        ("-m m.gguf -np 2 -ngl 99 -fa -n -1 --jinja --alias x", "m.gguf --max-batch-size 2 "
         "--model-name x"),
        ("--cache-type-k f16 --tensor-parallel-size 1 --reasoning-parser=qwen3",
         "--reasoning-parser=think"),
        ("-- --max-num-seqs", "-- --max-num-seqs"),
    ],
)  # fmt: skip
def test_equivalent_foreign_flags_are_translated(typed: str, ours: str) -> None:
    assert shlex.join(serve_words(typed).words) == ours


def test_every_translated_flag_is_reported_in_one_line() -> None:
    assert serve_words("--max-num-seqs 4 --continuous-batching --port 0").notes == [
        "--max-num-seqs is a flag of vLLM, vllm-mlx; here it is --max-batch-size 4",
        "--continuous-batching is a flag of vllm-mlx, llama.cpp; here it is always on",
    ]


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("--max-model-len 8192", "--max-kv-size 8192"),
        ("-c 4096", "--max-kv-size 4096"),
        ("--tensor-parallel-size 2", "mlx.launch -n 2"),
        ("--kv-cache-dtype fp8", "--kv-cache-quantization 8"),
        ("--kv-group-size 32", "--kv-cache-quantization affine8g32"),
        ("--gpu-memory-utilization 0.9", "--memory-limit"),
        ("--no-enable-prefix-caching", "cache_prompt: false"),
    ],
)
def test_foreign_flag_with_other_meaning_suggests_our_flag(
    typed: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *typed.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock: ")
    assert error.count("\n") == 1
    assert named in error


def test_unknown_flags_are_not_translated() -> None:
    words = ["--max-num-seqs", "4", "--timeout", "8"]
    assert translated(words, COMMANDS["generate"], {}) == Translation(words, [])


def test_translated_flags_and_values_exist() -> None:
    for flag in FOREIGN_FLAGS:
        if flag.meaning == "same" and flag.ours != MODEL:
            assert flag.ours.split()[0] in EVERY_FLAG, flag
    assert set(FOREIGN_VALUES["--tool-parser"].values()) <= set(call_names())
    assert set(FOREIGN_VALUES["--reasoning-parser"].values()) <= set(reasoning_names())
    for flag, known in (("--tool-parser", call_names()), ("--reasoning-parser", reasoning_names())):
        assert not set(FOREIGN_VALUES[flag]) & set(known)


def test_foreign_names_are_unique() -> None:
    names = [name for flag in FOREIGN_FLAGS for name in flag.names]
    assert len(names) == len(set(names))


def test_exo_memory_threshold_is_translated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_MEMORY_THRESHOLD", "7")
    assert main(["serve", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "EXO_MEMORY_THRESHOLD is a variable of exo; here it is PENSTOCK_MEMORY_THRESH" in error
    assert "--memory-threshold" in error.splitlines()[-1]
    assert not serve_words("", EXO_MEMORY_THRESHOLD="7", PENSTOCK_MEMORY_THRESHOLD="0.5").notes
    assert not serve_words("--memory-threshold 0.5", EXO_MEMORY_THRESHOLD="7").notes
