"""`penstock launch`: a script in place of each program records how it was started."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from redis_server import free_port
from servers import Running, serving, wait_until

from penstock import children
from penstock.cli import launch, main
from penstock.cli.launch import PROGRAMS, Endpoint
from penstock.cli.remote import Remote

KEY = "a-key-for-tests"
OWN = ["--resume", "two words", "it's"]
RECORDER = """#!{python}
import json, os, pathlib, sys, urllib.request
address = os.environ.get("LOOK_AT")
files = {{}}
for text in [*os.environ.values(), *sys.argv[1:]]:
    if "/penstock" in text or text.endswith("/settings.json"):
        path = pathlib.Path(text)
        if path.is_file() and path.suffix in (".js", ".json"):
            files[path.name] = path.read_text()
record = dict(
    name=pathlib.Path(sys.argv[0]).name,
    arguments=sys.argv[1:],
    environment=dict(os.environ),
    files=files,
    health=urllib.request.urlopen(address + "/health").status if address else None,
)
pathlib.Path(os.environ["RECORD"]).write_text(json.dumps(record))
sys.exit(7)
"""


@dataclass
class Desk:
    """An empty home, and a folder of programs that record how they are started."""

    home: Path
    programs: Path
    record: Path

    def install(self, *names: str) -> None:
        for name in names:
            (self.programs / name).write_text(RECORDER.format(python=sys.executable))
            (self.programs / name).chmod(0o755)

    def read(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.record.read_text())
        self.record.unlink()
        return record


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(tmp_path / "home", tmp_path / "bin", tmp_path / "record.json")
    desk.home.mkdir()
    desk.programs.mkdir()
    for tool in ("mktemp", "sh"):
        (desk.programs / tool).symlink_to(str(shutil.which(tool)))
    monkeypatch.setenv("PATH", str(desk.programs))
    monkeypatch.setenv("HOME", str(desk.home))
    monkeypatch.setenv("RECORD", str(desk.record))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of another server")
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    return desk


def points_at(name: str, record: dict[str, Any]) -> tuple[str, str, str, int]:
    """Return address, key, model and context size that a program was started with."""
    environment, arguments, files = record["environment"], record["arguments"], record["files"]
    match name:
        case "claude":
            assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
            assert "ANTHROPIC_API_KEY" not in environment
            return (
                environment["ANTHROPIC_BASE_URL"] + "/v1",
                environment["ANTHROPIC_AUTH_TOKEN"],
                environment["ANTHROPIC_MODEL"],
                int(environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]),
            )
        case "codex":
            values = [arguments[at + 1] for at, word in enumerate(arguments) if word == "-c"]
            config = tomllib.loads("\n".join(values))
            provider = config["model_providers"][config["model_provider"]]
            assert provider["wire_api"] == "responses"
            key = environment[provider["env_key"]]
            return provider["base_url"], key, config["model"], config["model_context_window"]
        case "opencode":
            config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
            owner, model = config["model"].split("/", 1)
            provider = config["provider"][owner]
            options = provider["options"]
            limit = provider["models"][model]["limit"]["context"]
            return options["baseURL"], options["apiKey"], model, limit
        case "pi":
            (text,) = files.values()
            provider = json.loads(text[text.index("{") : text.rindex("}") + 1])
            assert arguments[0] == "-e" and arguments[1].endswith("/penstock.js")
            model = provider["models"][0]
            key = environment[provider["apiKey"]]
            return provider["baseUrl"], key, model["id"], model["contextWindow"]
        case _:
            (model,) = json.loads(files["settings.json"])["modelProviders"]["openai"]
            window = model["generationConfig"]["contextWindowSize"]
            return model["baseUrl"], environment[model["envKey"]], model["id"], window


@pytest.mark.parametrize("name", PROGRAMS)
def test_launched_program_points_at_server_and_leaves_no_files(
    name: str, recall_server: Running, desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    desk.install(name)
    assert main(["launch", name, "--url", recall_server.url, "--", *OWN]) == 7
    record = desk.read()
    assert record["arguments"][-3:] == OWN
    base, key, model, context = points_at(name, record)
    answer = httpx.get(f"{base}/models", headers={"Authorization": f"Bearer {key}"}).json()
    assert (model, context) == (answer["data"][0]["id"], answer["data"][0]["max_model_len"])
    assert list(desk.home.iterdir()) == [], "its own configuration stays as it is"
    said = capfd.readouterr().err
    assert recall_server.url in said and f"{context:,} tokens of context" in said
    for variable, value in record["environment"].items():
        if value != os.environ.get(variable):
            assert f"{variable}={value}" in said, "all that is set is said"
    assert not [word for word in record["arguments"] if Path(word).is_file() and "/" in word]


@pytest.mark.parametrize("name", PROGRAMS)
def test_printed_lines_start_same_program(
    name: str, recall_server: Running, desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    desk.install(name)
    main(["launch", name, "--url", recall_server.url, "--", *OWN])
    launched = desk.read()
    capfd.readouterr()
    assert main(["launch", name, "--url", recall_server.url, "--print", "--", *OWN]) == 0
    assert not desk.record.exists()
    lines = capfd.readouterr().out
    assert subprocess.run(["sh", "-eu"], input=lines, text=True, check=False).returncode == 7
    printed = desk.read()
    assert points_at(name, printed) == points_at(name, launched)
    assert printed["files"] == launched["files"]
    assert len(printed["arguments"]) == len(launched["arguments"])
    for here, there in zip(printed["arguments"], launched["arguments"], strict=True):
        assert Path(here).name == Path(there).name


def test_api_key_reaches_program_without_being_printed(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    desk.install("opencode")
    with serving(api_key=KEY) as running:
        assert main(["launch", "opencode", "--url", running.url]) == 2
        assert "PENSTOCK_API_KEY" in capfd.readouterr().err
        assert main(["launch", "opencode", "--url", running.url, "--api-key", KEY]) == 7
    assert points_at("opencode", desk.read())[1] == KEY
    said = capfd.readouterr().err
    assert KEY not in said and "(the key)" in said


def test_server_is_started_and_stopped_with_program(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    desk.install("codex")
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("LOOK_AT", url)
    monkeypatch.setenv("PENSTOCK_MEMORY_LIMIT", "200MB")
    assert main(["launch", "codex", "--url", url]) == 7
    record = desk.read()
    assert record["health"] == 200
    assert points_at("codex", record)[2] == "recall"
    assert "starting one" in capfd.readouterr().err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_failed_server_start_gives_one_line_error(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    desk.install("pi")
    monkeypatch.setenv("PENSTOCK_MEMORY_LIMIT", "1MB")
    assert main(["launch", "pi", "--url", f"http://127.0.0.1:{free_port()}"]) == 2
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("penstock: the server did not start: ") and "limit" in last


def test_claude_code_compact_window_is_omitted_below_minimum() -> None:
    """It reads values below 100,000 as 100,000, and warns."""
    name = "CLAUDE_CODE_AUTO_COMPACT_WINDOW"
    for tokens, told in ((99_999, None), (100_000, "100000")):
        setup = PROGRAMS["claude"].setup(Endpoint("http://127.0.0.1:1", KEY, "recall", tokens))
        assert setup.environment.get(name) == told
        assert setup.environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(tokens)


def test_missing_program_is_run_through_npx(recall_server: Running, desk: Desk) -> None:
    desk.install("npx")
    assert main(["launch", "claude", "--url", recall_server.url, "--", "-p", "Hi"]) == 7
    record = desk.read()
    assert record["arguments"] == ["--yes", "@anthropic-ai/claude-code", "-p", "Hi"]
    assert points_at("claude", record)[2] == "recall"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["emacs"], "choose one of claude, codex, opencode, pi, qwen"),
        (["claude"], "npm install -g @anthropic-ai/claude-code"),
        (["claude", "--print", "--url", "http://127.0.0.1:9"], "start one: penstock serve"),
        (["claude", "--url", "http://192.0.2.1:9"], "none can be started there"),
        (["claude", "--url", "nowhere"], "is not a URL"),
    ],
)
def test_invalid_launches_give_one_line_error(
    arguments: list[str],
    words: str,
    recall_server: Running,
    desk: Desk,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = [] if "--url" in arguments else ["--url", recall_server.url]
    if given == []:
        desk.install("claude")
    assert main(["launch", *arguments, *given]) == 2
    said = capfd.readouterr().err
    assert words in said and said.count("\n") == 1


PROXIES = {"http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"}
SLEEPER = """#!{python}
import os, pathlib, time
pathlib.Path(os.environ["RECORD"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("proxy", PROXIES)
def test_local_server_bypasses_proxies(
    proxy: str, recall_server: Running, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.install("claude")
    monkeypatch.setenv("LOOK_AT", recall_server.url)
    monkeypatch.setenv(proxy, PROXIES[proxy])
    assert main(["launch", "claude", "--url", recall_server.url]) == 7
    assert desk.read()["health"] == 200, "the program asks past the proxy, too"
    assert main(["top", "--once", "--url", recall_server.url]) == 0
    remote = Remote(recall_server.url)
    remote._http.close()
    assert remote.model == "recall"


def test_silent_server_times_out(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch.SILENT_SECONDS <= 60
    monkeypatch.setattr(launch, "SILENT_SECONDS", 0.2)
    desk.install("claude")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["launch", "claude", "--url", url]) == 2
    said = capfd.readouterr().err
    assert f"the server at {url} has not answered" in said and said.count("\n") == 1


@pytest.mark.parametrize(("work", "lives"), [("time.sleep(60)", False), ("print(1)", True)])
def test_wait_ends_if_starting_server_makes_no_progress(
    work: str, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(launch, "START_SECONDS", 3.0)
    code = f"import time\nwhile True: {work}; time.sleep(0.1)"
    with tempfile.TemporaryFile() as output, httpx.Client(base_url="http://127.0.0.1:9") as http:
        server = children.start([sys.executable, "-uc", code], stdout=output, stderr=output)
        with server, pytest.raises(launch.LaunchFailed) as refused:
            try:
                launch._wait(server, http, output)
            finally:
                children.end(server)
    found = re.search(r"for (\d+) s, and used no CPU time for (\d+) s", str(refused.value))
    assert found and (found[1] != found[2]) == lives


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_server_and_program_end_with_launch_command(sig: signal.Signals, desk: Desk) -> None:
    (desk.programs / "claude").write_text(SLEEPER.format(python=sys.executable))
    (desk.programs / "claude").chmod(0o755)
    url = f"http://127.0.0.1:{free_port()}"
    launched = subprocess.Popen(
        [sys.executable, "-m", "penstock", "launch", "claude", "--url", url],
        env={**os.environ, "PENSTOCK_MEMORY_LIMIT": "200MB"},
    )
    with launched:
        try:
            wait_until(lambda: desk.record.exists() and desk.record.read_text(), 120)
            parent = psutil.Process(launched.pid)
            program = int(desk.record.read_text())
            assert {process.pid for process in parent.children()} > {program}, "and the server"
            started = parent.children(recursive=True)
        finally:
            launched.send_signal(sig)
        assert launched.wait(60) == (-sig if sig == signal.SIGKILL else 128 + sig)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
