"""The command line as a process, or in this process where that makes no difference."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from command_line import commands
from patience import SOON
from run_command import SCRIPT, Call, Capture, Done, refused, run, typed
from typer.main import get_command

import penstock
from penstock.cli import main
from penstock.cli.commands import app
from penstock.cli.options import WITHOUT_VALUE, with_values
from penstock.recall import MODEL_PATH

TELL = "The code of the amber falcon is 4821."
ASK = "What is the code of the amber falcon?"


def test_version_flag_prints_package_version() -> None:
    assert run("--version").stdout == f"penstock {penstock.__version__}\n"
    assert version("penstock-mlx") == penstock.__version__


def test_help_is_printed_if_no_command_is_given() -> None:
    assert run().stdout == run("--help").stdout


HEAVY = {
    *("mlx.core", "mlx_lm", "numpy", "transformers", "torch", "matplotlib"),
    *("fastapi", "uvicorn", "starlette", "httpx", "prometheus_client"),
}
"""Modules of which some cost more than all that the help needs."""


def imported_by(*arguments: str) -> set[str]:
    """Return the modules that a command imports."""
    done = run(*arguments, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "penstock.cli" in imported
    return imported


def heavy(*arguments: str) -> set[str]:
    """Return the heavy modules that a command imports."""
    return HEAVY & imported_by(*arguments)


def test_version_command_imports_few_modules() -> None:
    """All commands are 500 modules: 0.25 s, where the version has 0.15 s."""
    imported = imported_by("--version")
    assert not imported & {"typer", "pydantic", "rich", "psutil", "threadpoolctl"}
    assert len(imported) < 150


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["serve", "--help"]])
def test_help_imports_no_heavy_modules(arguments: list[str]) -> None:
    assert heavy(*arguments) == set()


def test_check_detects_heavy_imports() -> None:
    imported = heavy("generate", "x", "--max-tokens", "1")
    assert imported >= {"mlx.core", "mlx_lm", "transformers"}
    assert not imported & {"fastapi", "starlette", "uvicorn"}, "no server is started"


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["generate", "x", "--kv-bits", "7"],
        ["serve", "--memory-limit", "much"],
        ["doctor"],
    ],
)
def test_mlx_lm_is_imported_only_if_needed(command: list[str]) -> None:
    code = (
        "import sys; from penstock.cli import main\n"
        f"main({command!r})\n"
        "assert not any(name.split('.')[0] == 'mlx_lm' for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_generate_streams_text_and_prints_figures_to_stderr() -> None:
    done = run("generate", TELL, "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Noted.\n"
    (line,) = done.stderr.splitlines()
    for part in ("prompt ", "tokens/s", "peak memory", "KV "):
        assert part in line


def test_generate_reads_stdin_and_prints_json(call: Call) -> None:
    done = call("generate", "-", "--json", stdin=TELL)
    record = json.loads(done.stdout)
    assert record["text"] == "Noted."
    assert record["finish_reason"] == "stop"
    assert record["kv"]["tokens"] == record["prompt_tokens"] + record["generated_tokens"] - 1
    assert record["peak_memory_bytes"] > record["kv"]["nbytes"] > 0
    assert done.stderr == ""


def test_raw_flag_continues_text_without_chat_template(call: Call) -> None:
    done = call("generate", f"<|start|><|user|> {TELL}<|end|><|assistant|>", "--raw")
    assert done.stdout == " Noted.\n"


def test_environment_variables_set_flags(call: Call) -> None:
    record = json.loads(call("generate", "Hello!", "--json", PENSTOCK_MAX_TOKENS="2").stdout)
    assert record["generated_tokens"] == 2
    assert record["finish_reason"] == "length"


def test_chat_answers_each_piped_line() -> None:
    done = run("chat", stdin=f"{TELL}\n\nMy sister has a small dog.\n{ASK}\n")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0] == "Noted."
    assert lines[-1] == "4821."
    assert done.stderr == ""


def test_chat_slash_commands_work(call: Call) -> None:
    done = call("chat", stdin=f"{TELL}\n/stats\n/reset\n/stats\n/help\n/what\n/exit\n{ASK}\n")
    assert done.returncode == 0
    noted, stats, reset, empty, *help_lines = done.stdout.splitlines()
    assert noted == "Noted."
    assert "tokens/s" in stats
    assert reset == "The conversation is forgotten."
    assert empty.startswith("KV 0 tokens in 0 B")
    assert [line.split()[0] for line in help_lines] == ["/stats", "/reset", "/help", "/quit"]
    assert done.stderr == "penstock: unknown command /what; /help lists them\n"


def test_chat_echoes_input_on_request(call: Call) -> None:
    assert call("chat", "--echo", stdin=TELL).stdout == f"> {TELL}\nNoted.\n"


def test_chat_on_terminal_writes_private_history(tmp_path: Path) -> None:
    history = tmp_path / "history"
    code, shown = typed(f"{TELL}\n/quit\n", "chat", "--history", history)
    assert code == 0
    assert "> " in shown
    assert "Noted." in shown
    assert TELL in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_unwritable_history_gives_one_line_error(tmp_path: Path) -> None:
    code, shown = typed("/exit\n", "chat", "--history", tmp_path / "nowhere" / "history")
    assert code == 2
    assert shown.splitlines()[-1].startswith("penstock: --history ")
    assert "Traceback" not in shown


def test_doctor_prints_json() -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert report["versions"]["penstock"] == penstock.__version__
    assert report["gflops"]["float32"] > 0
    assert report["model"] is None
    assert done.returncode == (1 if report["problems"] else 0)


def test_doctor_reports_slow_blas() -> None:
    done = run("doctor", PENSTOCK_BLAS="/nowhere/libblas.so")
    if "PENSTOCK_BLAS" not in done.stdout:
        pytest.skip("MLX needs no BLAS of ours here")
    assert done.returncode == 1
    assert "remedy:" in done.stdout


def test_bad_blas_setting_gives_one_line_warning() -> None:
    done = run("generate", TELL, "--json", PENSTOCK_BLAS="/nowhere/libblas.so")
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) <= 1


UNKNOWN = (
    "there is no folder nosuch, and no model of that name; penstock models lists names, and a hub "
    "name has the form owner/model"
)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["cache"], "Missing command"),
        (
            ["bench", "nosuch"],
            "No such command 'nosuch'. penstock bench --help lists the commands.",
        ),
        (["generate"], "Missing argument"),
        (["cache", "ls"], "Missing option '--ssd-cache-dir' or PENSTOCK_SSD_CACHE_DIR."),
        (["generate", "x", "--bogus"], "No such option"),
        (["serve", "--offline"], "--offline goes before the command"),
        (["serve", "--port", "99999"], "penstock: --port 99999: must be at most 65535"),
        (["serve", "--port", "80x"], "penstock: --port 80x: must be a whole number"),
        (["serve", "--top-p", "2"], "penstock: --top-p 2.0: must be at most 1"),
        (["serve", "--kernels", "on"], "penstock: --kernels on: must be one of 'auto', 'off'"),
        (["serve", "--replicas", "2"], "--replicas needs --ray"),
        (["serve", "--routing", "hash"], "--routing needs --ray"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "caf\udce9 x"], "the prompt is not UTF-8: byte 0xe9 after 3 characters"),
        (["generate", "caf\udce9 x", "--raw"], "the prompt is not UTF-8"),
        (["generate", "\ud800"], "the prompt is not UTF-8: U+D800"),
        (["generate", "x", "--system", "\udcff"], "--system is not UTF-8: byte 0xff"),
        (["chat", "--system", "\udcff"], "--system is not UTF-8: byte 0xff"),
        (["generate", "x", "--max-tokens", "-3"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--max-kv-size", "0"], "--max-kv-size"),
        (["generate", "x", "--max-kv-size", "1"], "--max-kv-size 1"),
        (["generate", "x", "--kv-cache-quantization", "q4"], "'q4' is not a codec; supported: raw"),
        (["generate", "x", "--temperature", "nan"], "--temperature"),
        (["generate", "x", "--seed", "-1"], "--seed"),
        (["generate", "x", "--max-kv-size", "64", "--keep-kv-size", "64"], "leaves no room"),
        (["chat", "--max-kv-size", "64", "--keep-kv-size", "65"], "leaves no room"),
        (["generate", "x", "--raw", "--system", "y"], "--system"),
        (["generate", "x", "--model", "nosuch"], UNKNOWN),
        (["generate", "x", "--model", "./no/such"], "there is no folder ./no/such"),
        (["chat", "--model", "nosuch"], UNKNOWN),
        (["chat", "--model", "nosuch.gguf"], "there is no file nosuch.gguf"),
        (["chat", "--model", "no/such.gguf"], "there is no file no/such.gguf"),
        (["doctor", "nosuch"], UNKNOWN),
        (["plan", "nosuch"], UNKNOWN),
        (["pull", "nosuch"], UNKNOWN),
    ],
)
def test_bad_arguments_give_one_line_error(
    capsys: Capture, arguments: list[str], complaint: str
) -> None:
    assert complaint in refused(capsys, *arguments)


def test_invalid_option_value_exits_with_2() -> None:
    done = run("generate", "x", "--temperature", "-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "penstock: --temperature -1: must be at least 0\n"


def run_on_bytes(stdin: bytes, *arguments: str, **environment: str) -> Done[bytes]:
    return subprocess.run(
        [SCRIPT, *arguments],
        input=stdin,
        env=os.environ | environment,
        capture_output=True,
        timeout=SOON,
    )


# How Python reads standard input differs with the locale; UTF-8 locales are strict.
@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
def test_non_utf8_input_gives_one_line_error(encoding: str) -> None:
    done = run_on_bytes(b"caf\xe9 x\n", "generate", "-", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"penstock: the prompt is not UTF-8: byte 0xe9 after 3 characters\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_chat_skips_non_utf8_lines(call: Call, errors: str) -> None:
    lines = f"{TELL}\n".encode() + b"caf\xe9 x\n/caf\xe9\n" + f"{ASK}\n".encode()
    done = call("chat", "--echo", stdin=lines, errors=errors)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"> {TELL}", "Noted.", f"> {ASK}", "4821."]
    first, second = done.stderr.splitlines()
    assert first == ("penstock: this line is not UTF-8: byte 0xe9 after 3 characters; ignoring it")
    assert "after 4 characters" in second


def test_mlx_lm_kv_bits_map_to_codec(call: Call) -> None:
    """Also for models whose quantized caches mlx-lm cannot read, as with attention sinks."""
    done = call("generate", TELL, "--kv-bits", "8", "--kv-cache-min-quantize-tokens", "0")
    assert done.stdout == "Noted.\n"
    assert "here it is --kv-cache-quantization 8" in done.stderr.splitlines()[0]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change(**values: object) -> dict[str, object]:
    config: dict[str, object] = json.loads((MODEL_PATH / "config.json").read_text())
    return config | values


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda m: (m / "config.json").unlink(), "it has no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "config.json is not a readable JSON file"),
        (lambda m: (m / "config.json").write_text(json.dumps(change(model_type="odd"))), "odd"),
        (
            lambda m: (m / "config.json").write_text(json.dumps(change(num_hidden_layers=3))),
            "Missing",
        ),
        (
            lambda m: (m / "config.json").write_text(json.dumps(change(num_attention_heads=0))),
            "ZeroDivisionError",
        ),
        (
            lambda m: (m / "config.json").write_text(json.dumps(change(bos_token_id="one"))),
            "bos_token_id",
        ),
        (lambda m: (m / "model.safetensors").unlink(), "it has no model*.safetensors"),
        (lambda m: truncate(m / "model.safetensors"), "cannot load"),
        (lambda m: (m / "model.safetensors").write_bytes(b""), "cannot load"),
        (
            lambda m: [file.unlink() for file in m.glob("tokenizer*")],
            "it has no tokenizer files",
        ),
        (lambda m: (m / "tokenizer.json").unlink(), "cannot load"),
        (lambda m: truncate(m / "tokenizer.json"), "cannot load"),
    ],
)
def test_broken_model_folder_gives_one_line_error(
    capsys: Capture, tmp_path: Path, damage: Callable[[Path], object], complaint: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL_PATH, model)
    damage(model)
    assert complaint in refused(capsys, "generate", "x", "--model", str(model))


@pytest.mark.parametrize("more", [("--max-kv-size", "64"), ()])
def test_raw_disables_codec(more: tuple[str, ...]) -> None:
    done = run("generate", "Hello", "--kv-cache-quantization", "raw", *more)
    assert (done.returncode, done.stdout) == (0, run("generate", "Hello", *more).stdout)


MAY_STAND_ALONE = [
    (words, flag)
    for words, command in commands(get_command(app))
    for parameter in command.params
    for flag in parameter.opts
    if flag in WITHOUT_VALUE
]


def test_all_quantizing_commands_are_tested() -> None:
    named = {words for words, _ in MAY_STAND_ALONE}
    benches = ("shared-prefix", "hit", "restore", "ragged", "single", "hybrid", "serve")
    assert named >= {("generate",), ("chat",), ("serve",), *(("bench", name) for name in benches)}
    takes_both = {
        words
        for words, command in commands(get_command(app))
        if "--kv-cache-min-quantize-tokens" in [o for p in command.params for o in p.opts]
    }
    assert takes_both - {("eval",)} == named  # eval compares the codecs that it is given


@pytest.mark.parametrize(("words", "flag"), MAY_STAND_ALONE, ids=str)
def test_optional_value_flag_does_not_swallow_next_flag(
    capsys: Capture, words: tuple[str, ...], flag: str
) -> None:
    assert "No such option '--bogus'." in refused(capsys, *words, flag, "--bogus")
    assert "No such option '--bogus'." in refused(capsys, *words, "--bogus", flag)
    assert "No such option '--bogus'." in refused(capsys, *words, flag, "k8v4", "--bogus")
    known = refused(capsys, *words, flag, "--kv-cache-min-quantize-tokens", "many")
    assert "--kv-cache-min-quantize-tokens many: must be a whole number" in known


def test_quantization_flag_without_value_means_8_bits(call: Call) -> None:
    prompt = f"{TELL} " * 40

    def held(*flags: str) -> Any:
        done = call("generate", "-", "--json", "--max-tokens", "4", *flags, stdin=prompt)
        return json.loads(done.stdout)["kv"]

    short = ("--kv-cache-min-quantize-tokens", "0")
    assert held("--kv-cache-quantization", *short) == held("--kv-cache-quantization", "8", *short)
    assert held(*short, "--kv-cache-quantization")["nbytes"] < 0.5 * held()["nbytes"]


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        (["--", "--kv-cache-quantization"], ["--", "--kv-cache-quantization"]),
        (["--kv-cache-quantization", "--", "x"], ["--kv-cache-quantization", "8", "--", "x"]),
        (["--kv-cache-quantization", "-"], ["--kv-cache-quantization", "8", "-"]),
        (["--kv-cache-quantization=4", "-h"], ["--kv-cache-quantization=4", "-h"]),
        ([], []),
    ],
)
def test_optional_value_flags_get_default_values(given: list[str], filled: list[str]) -> None:
    assert with_values(given) == filled


def test_ctrl_c_exits_with_130() -> None:
    with subprocess.Popen(
        [SCRIPT, "chat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{TELL}\n".encode())
        process.stdin.flush()
        assert process.stdout.readline() == b"Noted.\n"  # now it waits for the next line
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=SOON)
        assert process.returncode == 130
        assert output + errors == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_unencodable_output_characters_are_replaced(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m\u00f6del \u4e2d"
    shutil.copytree(MODEL_PATH, folder)
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", shown)
        assert main(["plan", str(folder), "--memory-limit", "300MB"]) == 0
    shown.flush()
    assert b"del ?" in shown.buffer.getvalue()  # type: ignore[attr-defined]
