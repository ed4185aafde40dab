"""`penstock serve` as a process: flags, files, signals and exit codes."""

from __future__ import annotations

import bisect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from patience import SOON
from servers import serving, settings, wait_until
from typer.main import get_command

from penstock.cli import main, start_progress
from penstock.cli.banner import banner
from penstock.cli.commands import app
from penstock.cli.engines import make_engine
from penstock.cli.model_table import name_of
from penstock.cli.settings_file import read_toml
from penstock.engine.view import EngineView
from penstock.errors import SettingError
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH
from penstock_bench.recall import Dialogue

PROGRESS = re.compile(r"penstock: .* \(\d+ s\)\n")
"""Line of a start that takes a second, as on a busy machine."""
SERVE = (sys.executable, "-m", "penstock", "serve")


@contextmanager
def started(*flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server on a free port; yield it with its URL once the URL is printed."""
    process = subprocess.Popen(
        (*SERVE, "--port", "0", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"{line!r}: {process.stderr.read() if process.stderr else ''}"
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def parsed(monkeypatch: pytest.MonkeyPatch, *flags: str, **environment: str) -> dict[str, Any]:
    """Return the arguments that the command would be called with."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return dict(command.make_context("serve", list(flags)).params)


def test_flags_override_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(
        'max-kv-size = 1000\nmax_queue = 11\nport = 1111\nmemory-limit = "1GB"\n'
        'cors-origin = ["https://a.example"]\n'
    )
    found = parsed(
        monkeypatch,
        "--config",
        str(file),
        "--port",
        "3333",
        PENSTOCK_PORT="2222",
        PENSTOCK_MAX_QUEUE="22",
    )
    assert found["port"] == 3333
    assert found["max_queue"] == 22
    assert found["max_kv_size"] == 1000
    assert found["memory_limit"] == "1GB"
    assert list(found["cors_origin"]) == ["https://a.example"]
    assert found["max_batch_size"] == 8, "and the default below all"
    assert parsed(monkeypatch, PENSTOCK_CONFIG=str(file))["max_kv_size"] == 1000


def test_deleted_blocks_stay_deleted_after_restart(tmp_path: Path) -> None:
    """The process is killed before the folder returns; the next one removes the blocks."""
    folder, away = tmp_path / "cache", tmp_path / "away"
    flags = ("--ssd-cache-dir", str(folder), "--block-size", "32", "--memory-limit", "200MB")
    body = {"prompt": "cedar " * 200, "max_tokens": 1}

    def cached(url: str) -> int:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def disk(url: str) -> dict[str, Any]:
        stats: dict[str, Any] = httpx.get(f"{url}/v1/cache/stats").json()["stats"]
        return dict(stats["tiers"]["disk"])

    with started(*flags) as (_, url):
        assert cached(url) == 0
        wait_until(lambda: disk(url)["held_bytes"] > 0 and disk(url)["queued_bytes"] == 0)
    with started(*flags) as (_, url):
        assert cached(url) > 0, "a restart alone forgets nothing"
        folder.rename(away)
        folder.write_text("a file stands where the folder was")
        other = {**body, "prompt": "otter " * 200}
        httpx.post(f"{url}/v1/completions", json=other, timeout=60.0)
        wait_until(lambda: disk(url)["off"] is not None)
        assert httpx.delete(f"{url}/v1/cache", timeout=60.0).status_code == 202
    folder.unlink()
    away.rename(folder)
    assert list(folder.rglob("*.safetensors")), "the folder came back whole"
    with started(*flags) as (_, url):
        assert cached(url) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense = 1\nmore-nonsense = 2", "nonsense, more-nonsense"),
        ("port = ", "not TOML"),
        ("[port]\na = 1", "not a table"),
        (None, "No such file"),
    ],
)
def test_bad_config_file_gives_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    file = tmp_path / "penstock.toml"
    if text is not None:
        file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1


def test_config_file_may_give_one_value_for_repeatable_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('cors-origin = "https://a.example"')
    found = parsed(monkeypatch, "--config", str(file))
    assert list(found["cors_origin"]) == ["https://a.example"]


def test_config_file_keys_are_flag_names(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("max-queue = 3")
    assert read_toml(file, ["max_queue"]) == {"max_queue": 3}
    with pytest.raises(SettingError, match="max-queue"):
        read_toml(file, ["port"])


@pytest.mark.parametrize(
    ("text", "codec"), [("true", "8"), ("false", None), ('"k8v4"', "k8v4"), ("4", "4")]
)
def test_optional_value_flag_may_be_boolean_in_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, codec: str | None
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(f"kv-cache-quantization = {text}")
    assert parsed(monkeypatch, "--config", str(file))["kv_cache_quantization"] == codec


def test_vllm_mlx_command_line_works() -> None:
    line = (
        "--kv-cache-quantization --kv-cache-quantization-bits 4 --kv-cache-quantization-group-size "
        "64 --kv-cache-min-quantize-tokens 256 --continuous-batching"
    )
    with started(*line.split()) as (process, _):
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert "held as affine4" in "".join(lines)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--kv-cache-quantization", "q4"), "is not a codec; supported: raw"),
        (("--kv-cache-quantization", "8", "--kv-cache-skip-layers", "2"), "others, are 0 to 1"),
        (("--kv-cache-skip-layers", "one"), "'one' is not a number"),
        (
            ("--kv-cache-skip-layers", "1", "--kv-cache-quantize-when", "active"),
            "--kv-cache-skip-layers, --kv-cache-quantize-when: no codec is set",
        ),
        (("--kv-cache-min-quantize-tokens", "-1"), "--kv-cache-min-quantize-tokens"),
        (("--host", "0.0.0.0"), "api-key"),
        (("--memory-limit", "0"), "--memory-limit is 0"),
        (("--memory-limit", "much"), "--memory-limit 'much' is not a size"),
        (("--memory-limit", "1MB", "--port", "0"), "about 40MB would be enough"),
        (("--memory-limit", "20MB", "--port", "0"), "weights of 7.03 MB, tails of"),
        (("--memory-threshold", "2"), "--memory-threshold"),
        (("--cors-origin", "https://a.example/"), "https://host"),
        (("--cors-origin", "*"), "without a key lets every page"),
        (("--otlp-traces-endpoint", "nonsense"), "nonsense is not a URL with a host"),
        (("--otlp-traces-endpoint", "http://:4318/v1/traces"), "is not a URL with a host"),
        (("--otlp-traces-endpoint", "http://[::1/v1/traces"), "is not a URL with a host"),
        (("--otlp-traces-endpoint", "grpc://host:4317"), "write it as http://127.0.0.1:4318"),
        (("--max-connections", "0"), "--max-connections"),
        (("--host", "nowhere.invalid", "--api-key", "a"), "cannot listen on nowhere.invalid"),
        (("--port", "70000"), "65535"),
        (("--request-timeout", "0"), "--request-timeout"),
        (("--ssd-cache-limit", "much"), "--ssd-cache-limit"),
        (("--ssd-cache-dir", "/nowhere", "--ssd-cache-limit", "1MB"), "--ssd-cache-limit 1MB"),
        (("--ssd-write-budget", "some"), "--ssd-write-budget"),
        (("--ssd-cache-dir", __file__), f"--ssd-cache-dir {__file__} is a file; name a folder"),
        (("--ssd-cache-dir", f"{__file__}/x"), "Not a directory; use a writable folder"),
        (("--ssd-cache-dir", ""), "--ssd-cache-dir is empty; set a folder, or remove it"),
        (("--ssd-cache-dir", "/proc/none"), "--ssd-cache-dir /proc/none: No such file"),
        (("--ssd-cache-dir", "x" * 300), "File name too long; use a writable folder"),
        (("--ssd-cache-dir", "~nobody-at-all/x"), "--ssd-cache-dir ~nobody-at-all/x: "),
        (("--session-dir", "", "--ssd-cache-dir", "/tmp"), "--session-dir is empty"),
        (("--session-dir", __file__, "--ssd-cache-dir", "/tmp"), "is a file; name a folder"),
        (("--session-dir", "/nowhere"), "--session-dir needs --ssd-cache-dir"),
        (("--hot-cache-only", "--ssd-cache-dir", "/nowhere"), "--hot-cache-only"),
        (("--hot-cache-only", "--remote-cache", "redis://h"), "--hot-cache-only"),
        (("--remote-cache", "http://host"), "begins with none of redis://"),
        (("--remote-cache-ttl", "0"), "--remote-cache-ttl"),
        (("--remote-cache-timeout", "0"), "--remote-cache-timeout"),
        (("--max-kv-size", "100", "--keep-kv-size", "100"), "--keep-kv-size"),
        (("--pipeline",), "mlx.launch -n 2"),
        (("--chat-template", "/nowhere.jinja"), "--chat-template /nowhere.jinja: there is no such"),
        (("--chat-template", "chatml", "--ray"), "--chat-template does not work with --ray"),
        (("/nowhere/at/all", "--port", "0"), "/nowhere/at/all"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_bad_flags_give_one_line_error(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setattr(start_progress, "QUIET_SECONDS", 600.0)  # a busy machine is slow to load
    assert main(["serve", *flags]) == 2
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nosuch", "there is no folder nosuch, and no model of that name"),
        ("nosuch.gguf", "there is no file nosuch.gguf"),
        ("empty", "empty is not a model folder: it has no config.json"),
        ("text.gguf", "text.gguf"),
    ],
)
def test_each_of_several_models_is_checked_at_start(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.gguf").write_text("no weights")
    assert main(["serve", str(MODEL_PATH), "owner/not-downloaded", model, "--port", "0"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("penstock: ") and told.err.count("\n") == 1
    assert says in told.err and told.out == ""


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/a/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("~/b.gguf", "b"),
        ("owner/model", "owner/model"),
        (str(MODEL_PATH), MODEL_PATH.name),
    ],
)
def test_served_model_name_is_last_path_component(model: str, name: str) -> None:
    assert name_of(model) == name


def test_banner_suggests_completions_without_chat_template() -> None:
    loaded = load_all(MODEL_PATH)
    with make_engine(loaded, memory_limit="100MB") as engine:
        chatting, continuing = (
            "\n".join(banner(engine, "recall", settings(), 1, chats=chats))
            for chats in (True, False)
        )
    assert "/v1/chat/completions" in chatting and "--chat-template" not in chatting
    assert "/v1/completions -H" in continuing and "--chat-template" in continuing


def test_port_in_use_gives_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    told = capsys.readouterr().err
    assert "in use; choose another --port" in told and told.count("\n") == 1


def test_suggested_memory_limit_is_sufficient(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--memory-limit", "20MB"]) == 2
    found = re.search(r"raise it to (\d+)MB or more", capsys.readouterr().err)
    assert found
    with started("--memory-limit", f"{found[1]}MB") as (_, url):
        body = {"prompt": [1] * 1_023, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=SOON).status_code == 200
        body["prompt"] = [1] * 1_623  # nor is it far more than enough
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=SOON).status_code == 400


def test_sigterm_drains_open_requests() -> None:
    """Open streams end normally, then the process exits with 0."""
    with started("--model-name", "mine") as (process, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            assert [model.id for model in api.models.list()] == ["mine"]
            chunks = api.chat.completions.create(
                model="mine",
                messages=[{"role": "user", "content": "Hello!"}],
                max_tokens=400,
                logit_bias={"300": 100},
                stream=True,
            )
            next(chunks)
            process.send_signal(signal.SIGTERM)
            rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
        assert process.wait(20) == 0
        assert process.stderr is not None
        said = [line for line in process.stderr if not PROGRESS.fullmatch(line)]
        assert said == [
            "penstock: stopping with 1 answer open: waiting up to 30 s (--drain-timeout); a second "
            "signal stops at once\n"
        ]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_server_stops_cleanly_before_it_listens(sig: signal.Signals) -> None:
    with started() as (process, _):
        process.send_signal(sig)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert "stopping" not in process.stderr.read(), "no answer was open"


def test_second_signal_stops_at_once() -> None:
    with started("--drain-timeout", "60") as (process, url):
        body = {
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 20_000,
            "logit_bias": {"300": 100},
            "stream": True,
        }
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=SOON) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert httpx.get(f"{url}/ready").status_code == 503
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0


def test_largest_request_in_banner_fits() -> None:
    """The largest request is answered; a few tokens more are refused."""
    with serving(engine={"memory_limit": "48MB"}) as running:
        ask = running.service.engine.ask
        stats = ask(EngineView.stats).result()
        free = stats.limit_bytes - stats.used_bytes

        def needed(tokens: int) -> int:
            sequence = ask(lambda view: view.sequence_bytes(tokens)).result()
            return sequence.per_sequence + sequence.shared

        most = bisect.bisect_right(range(100_000), free, key=needed) - 1
        assert most > 1_000
        for tokens, status in ((most, 200), (most + 4, 400)):
            # The last token's KV is never needed.
            body = {"prompt": [1] * (tokens - 2), "max_tokens": 3}
            answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == status, answer.text


def test_banner_models_route_and_admission_agree_on_largest_request() -> None:
    with serving(engine={"memory_limit": "38MB"}) as running:
        service = running.service
        most = service.context_tokens
        told = banner(service.engine, "recall", settings(), 8_000, largest_request=most)
        assert f"prompt and answer of {most:,} tokens together" in "".join(told)
        (model,) = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert model["max_model_len"] == most == service.engine.ask(fitting).result()
        for tokens, status in ((most - 1, 200), (most, 400)):
            body = {"prompt": [1] * tokens, "max_tokens": 2_000}
            answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == status, answer.text


def fitting(view: EngineView) -> int:
    return view.fitting_tokens


def banner_of(**limits: Any) -> list[str]:
    """Return the banner lines of a server of the embedded model, built in this process."""
    with make_engine(load_all(MODEL_PATH), block_size=64, **limits) as engine:
        return banner(engine, "recall", settings(), 8_000)


def test_banner_warns_about_limit_above_machine_memory() -> None:
    assert "more than this machine has" in "".join(banner_of(memory_limit="999TB")[1:3])


def test_banner_warns_about_limit_too_small_for_context() -> None:
    for megabytes in range(20, 60):  # what steps take is measured
        with suppress(SettingError):
            told = banner_of(memory_limit=f"{megabytes}MB")
            break
    assert "none of 1,024; raise --memory-limit" in "".join(told[1:3])


@pytest.mark.parametrize("window", [64, 1_023, 1_024, 5_000])
def test_banner_counts_sequences_limited_by_window(window: int) -> None:
    """A small window is no lack of memory: raising --memory-limit would not help."""
    told = banner_of(memory_limit="200MB", max_kv_size=window)[2]
    assert "raise --memory-limit" not in told
    assert f"of {min(window, 1_024):,}" in told


@contextmanager
def little_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of 50 MB; skip if mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=50m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_is_reported_in_banner_routes_and_log(
    tmp_path: Path, told: Dialogue, caplog: pytest.LogCaptureFixture
) -> None:
    with little_disk(tmp_path / "little") as folder:
        given = {"ssd_cache_dir": folder, "block_size": 64}
        with make_engine(load_all(MODEL_PATH), **given) as engine:
            opened = engine._later(lambda core: core.tiers.tiers["disk"].held([])).result()
            assert opened.result(30.0) == 0
            assert "nothing is written: the disk of" in banner(engine, "r", settings(), 1)[3]
        with serving(engine=given) as running:
            body = {"messages": told.ask(told.questions[0]), "max_tokens": 1}
            for _ in range(2):
                httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
            question = {"messages": [*body["messages"], {"role": "user", "content": "And?"}]}
            why = httpx.post(f"{running.url}/v1/cache/explain", json=question, timeout=60).json()
            tier = httpx.get(f"{running.url}/v1/cache/stats", timeout=60).json()["tiers"]["disk"]
        assert ". The disk cache writes no new blocks: the disk of" in why["reason"]
        assert tier["state"] == "on" and "1.00 GB are always left free" in tier["why"]
    assert sum("pausing writes" in line for line in caplog.messages) == 2  # two engines


def test_banner_shows_capacity_and_curl_command() -> None:
    with started(PENSTOCK_API_KEY="secret") as (process, _):
        assert process.stdout is not None
        lines = [process.stdout.readline().rstrip() for _ in range(8)]
        told = "\n".join(lines)
        assert "limit 200.0 MB" in told and "tokens of KV" in told and "of 4,096" in told
        assert "secret" not in told
        if shutil.which("curl") is None:
            pytest.skip("the command that the banner shows needs curl")
        curl = lines[-1].split(maxsplit=1)[1]
        done = subprocess.run(
            ["bash", "-c", f"{curl} --silent"],
            capture_output=True,
            text=True,
            env={**os.environ, "PENSTOCK_API_KEY": "secret"},
            check=True,
        )
        assert "4821" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_banner_shows_raw_and_quantized_capacity() -> None:
    told = "".join(banner_of(memory_limit="200MB", kv_cache_quantization="k8v4")[1:6])
    found = re.search(r"about ([\d,]+) tokens of KV, ([\d,]+) held as rot8/rot4", told)
    assert found is not None, told
    raw, held = (int(figure.replace(",", "")) for figure in found.groups())
    assert held / raw == pytest.approx(32 / 6.5, rel=0.001)


@contextmanager
def a_process(folder: Path, preload: bool) -> Iterator[str]:
    """Serve with a cache folder in a process until left."""
    flags = ["--ssd-preload"] if preload else []
    with started("--ssd-cache-dir", str(folder), *flags) as (process, url):
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@contextmanager
def a_codec(folder: Path, preload: bool) -> Iterator[str]:
    """Serve with a cache folder and quantized KV in this process."""
    given = {"ssd_cache_dir": folder, "kv_cache_quantization": "k8v4"}
    with serving(engine=given) as running:
        if preload:
            running.service.engine.preload()
        yield running.url


@pytest.mark.parametrize("server", [a_process, a_codec])
def test_restarted_server_reuses_disk_cache(
    told: Dialogue, tmp_path: Path, server: Callable[..., Any]
) -> None:
    folder = tmp_path / "cache"
    question = told.ask(told.questions[0])

    def asked(url: str) -> tuple[str, int]:
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": question}, timeout=60
        ).json()
        usage = answer["usage"]
        assert usage["prompt_tokens"] > 4 * 64
        text = answer["choices"][0]["message"]["content"]
        return text, usage["prompt_tokens_details"]["cached_tokens"]

    texts, cached = [], []
    # Read before anybody asks: on a loaded machine it may be sooner computed than read.
    for preload in (False, True):
        with server(folder, preload) as url:
            text, tokens = asked(url)
            texts.append(text)
            cached.append(tokens)
            told_by = httpx.get(f"{url}/v1/cache/stats").json()
            assert told_by["tiers"]["disk"]["state"] == "on"
            assert "penstock_ssd_held_bytes" in httpx.get(f"{url}/metrics").text
    assert texts[0] == texts[1]
    assert told.questions[0].answer in texts[0]
    assert cached[0] == 0 and cached[1] >= 4 * 64
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]} == {0}
