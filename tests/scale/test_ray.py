"""`penstock serve --ray`: two replicas on this machine, as processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from ray_fleet import free_port, in_ray
from server_processes import STOP_SECONDS, serving
from talking_agents import SESSIONS, TURNS, Talked, talk

from penstock.cli import main
from penstock.memory import parse_bytes

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")

LIMIT = "80MB"
BLOCK = ("--block-size", "16")
START_SECONDS = 240.0
KEY = "correct-horse-battery-staple"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--port", "0"), "--ray needs a fixed --port"),
        (("--replicas", "3", "--max-replicas", "2"), "--max-replicas 2 is less than --replicas 3"),
        (("--host", "0.0.0.0"), "set PENSTOCK_API_KEY"),
        (("--memory-limit", "1MB"), "alone exceed the memory limit of 1.00 MB"),
    ],
)
def test_unsupported_flags_are_refused_before_ray_starts(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--ray", "--port", str(free_port()), *flags]) == 2
    assert said in capsys.readouterr().err


def test_port_in_use_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--ray", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def alone() -> Talked:
    """Return the same sessions on one engine with the memory of two."""
    both = str(2 * parse_bytes(LIMIT))
    with serving("--memory-limit", both, *BLOCK) as one:
        return talk(one.url)


@pytest.fixture(scope="module")
def by_prefix() -> Iterator[tuple[str, Talked]]:
    with in_ray("--replicas", "2", "--memory-limit", LIMIT, *BLOCK) as (url, _):
        yield url, talk(url)


def test_prefix_routing_keeps_nine_tenths_of_hits(
    alone: Talked, by_prefix: tuple[str, Talked]
) -> None:
    _, both = by_prefix
    print(f"one engine {alone.hit_tokens}, two replicas {both.hit_tokens}")
    assert both.answers == alone.answers
    assert both.prompt_tokens == alone.prompt_tokens
    assert len(both.answers) == SESSIONS and all(len(said) == TURNS for said in both.answers)
    assert both.hit_tokens >= 0.9 * alone.hit_tokens


def test_round_robin_routing_has_fewer_hits(alone: Talked) -> None:
    """The control: the hits above are due to the router."""
    flags = ("--replicas", "2", "--memory-limit", LIMIT, *BLOCK, "--routing", "round-robin")
    with in_ray(*flags) as (url, _):
        found = talk(url)
    print(f"one engine {alone.hit_tokens}, two replicas in turns {found.hit_tokens}")
    assert found.answers == alone.answers
    # Half of all turns miss the one before: 84 % are expected, with a deviation of 4 %.
    assert found.hit_tokens < 0.95 * alone.hit_tokens


def test_all_api_formats_pass_unchanged(by_prefix: tuple[str, Talked]) -> None:
    url, _ = by_prefix
    ours = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
    theirs = anthropic.Anthropic(base_url=url, api_key="any")
    messages = [
        {"role": "user", "content": "The code of the amber falcon is 4821."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "What is the code of the amber falcon?"},
    ]
    whole = ours.chat.completions.create(model="recall", messages=messages)  # type: ignore[call-overload]
    assert "4821" in whole.choices[0].message.content
    stream = ours.chat.completions.create(model="recall", messages=messages, stream=True)  # type: ignore[call-overload]
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content and len(parts) > 2
    text = ours.completions.create(model="recall", prompt="the amber", max_tokens=4)
    assert text.usage is not None and text.usage.completion_tokens > 0
    said = theirs.messages.create(model="recall", max_tokens=16, messages=messages)  # type: ignore[arg-type]
    assert "4821" in said.content[0].text  # type: ignore[union-attr]
    made = ours.responses.create(model="recall", input="What is the code of the amber falcon?")
    assert made.output
    with pytest.raises(openai.BadRequestError, match="messages"):
        ours.chat.completions.create(model="recall", messages=[])
    with pytest.raises(openai.NotFoundError):
        ours.models.retrieve("another")
    json_type = {"content-type": "application/json"}
    for headers, status in ((json_type, 400), ({}, 415)):
        broken = httpx.post(f"{url}/v1/chat/completions", content=b"{", headers=headers, timeout=30)
        assert broken.status_code == status and broken.json()["error"]
    assert httpx.get(f"{url}/health", timeout=30).json()["status"] == "ok"
    large = httpx.post(f"{url}/v1/completions", content=b"x" * 17_000_000, timeout=30)
    assert large.status_code == 413
    foreign = httpx.get(f"{url}/v1/models", headers={"host": "a.example"}, timeout=30)
    assert foreign.status_code == 403


def test_drained_blocks_are_written_to_disk_and_reused(tmp_path: Path) -> None:
    """The replicas share a folder; afterwards one engine finds the blocks of both."""
    disk = ("--ssd-cache-dir", str(tmp_path), "--ssd-cache-limit", "1GB", *BLOCK)
    flags = ("--replicas", "2", "--memory-limit", LIMIT, "--api-key", KEY, *disk)
    with in_ray(*flags) as (url, process):
        assert httpx.get(f"{url}/v1/models", timeout=30).status_code == 401
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=4 * STOP_SECONDS)
        assert process.returncode == 0
    with in_ray(*(flag for flag in flags if flag not in ("--api-key", KEY))) as (url, process):
        before = talk(url, turns=2)
    with serving("--memory-limit", "160MB", *disk) as one:
        after = talk(one.url, turns=2)
        restored = one.stats()["restored_tokens"]
    assert after.answers == before.answers
    assert after.hit_tokens > 1.2 * before.hit_tokens
    assert after.hit_rate > 0.85
    assert restored > 0


def test_replicas_scale_up_with_load_and_drain(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "replica_scaling.py"
    done = subprocess.run(
        (sys.executable, str(script), str(tmp_path), str(free_port())),
        capture_output=True,
        text=True,
        timeout=2 * START_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["counts"][0] == 1 and max(found["counts"]) == 2 and found["counts"][-1] == 1
    assert found["failed"] == []
    assert found["running"] == [1, 0]  # while a client reads its stream, and after it has left
    assert found["hit_rate_after"] > 0.8
