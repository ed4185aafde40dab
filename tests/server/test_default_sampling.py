"""Default sampling: flags, then the model's generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from servers import Running, serving, settings

from penstock.engine.request import Request
from penstock.models.loading import load_all
from penstock.models.mlx_lm import load_part
from penstock.models.source import read_generation_config
from penstock.recall import MODEL_PATH
from penstock.server.service import default_sampling

PROMPT = [5, 9, 300, 20, 7]
WILD = {"temperature": 3.0, "top_k": 40}


def post(running: Running, path: str = "/v1/completions", **more: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, **more}
    answer = httpx.post(f"{running.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(running: Running, **more: Any) -> str:
    return str(post(running, **more)["choices"][0]["text"])


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 2]}', ["temperature", "top_p"]),
        ('{"top_k": 20, "min_p": 0, "repetition_penalty": 1.05}', [*("top_k", "min_p"), "rep"]),
        ('{"temperature": "hot", "top_p": null, "top_k": true}', []),
        ("[1]", []),
        ("{", []),
    ],
)
def test_generation_config_sets_sampling(tmp_path: Path, written: str, read: list[str]) -> None:
    (tmp_path / "generation_config.json").write_text(written)
    found = read_generation_config(tmp_path)
    assert len(found) == len(read)
    assert all(json.loads(written)[name] == value for name, value in found.items())


def test_model_without_sampling_is_greedy(tmp_path: Path) -> None:
    said = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_generation_config(tmp_path) == {"temperature": 0.0, "top_p": 0.9}
    assert read_generation_config(tmp_path / "nowhere") == {}
    assert load_all(MODEL_PATH).sampling == {"temperature": 0.0}


def test_rank_loads_same_default_sampling_as_whole_model(tmp_path: Path) -> None:
    """A rank loads with `load_part`; defaults come from rank 0's folder."""
    folder = shutil.copytree(MODEL_PATH, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(WILD))
    group = mx.distributed.init()  # this process alone
    assert load_part(folder, group).sampling == load_all(folder).sampling == WILD


def test_flags_override_model_and_invalid_values_are_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = {"temperature": 0.7, "top_p": 0.8, "top_k": -1, "min_p": 0.1}
    found = default_sampling(settings(temperature=0.2, top_k=5), model)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.2, 0.8, 5, 0.1)
    assert "top_k -1" in caplog.text
    assert default_sampling(settings(), {}).greedy


def test_request_defaults_to_model_sampling() -> None:
    with serving() as plain, serving(sampling=WILD) as wild:
        drawn = text(plain, **WILD)
        assert text(wild) == drawn != text(plain)
        assert text(wild, temperature=0) == text(plain), "a request wins"
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]}
        path = "/v1/chat/completions"
        said = [
            post(running, path, **chat, **more)["choices"][0]["message"]["content"]
            for running, more in ((wild, {}), (plain, WILD), (plain, {}))
        ]
        assert said[0] == said[1] != said[2]


def test_server_flag_overrides_model_sampling() -> None:
    with serving(sampling=WILD, temperature=0.0) as flagged, serving() as plain:
        assert text(flagged) == text(plain)


def test_messages_use_model_sampling() -> None:
    """Without a seed, two draws of twenty tokens at temperature 3 differ."""
    messages = [{"role": "user", "content": "Hello!"}]
    body = {"model": "recall", "messages": messages, "max_tokens": 20}
    with serving(sampling={"temperature": 3.0}) as wild:
        said = [
            httpx.post(f"{wild.url}/v1/messages", json=body, timeout=60).json()["content"]
            for _ in range(2)
        ]
    assert said[0] != said[1]


def test_stop_token_ids_end_answer() -> None:
    with serving() as running:
        request = Request(prompt=tuple(PROMPT), max_tokens=6, ignore_eos=True)
        (choice,) = running.service.engine.submit(request).result(30)
        token = choice.tokens[-1]
        count = choice.tokens.index(token) + 1
        found = post(running, stop_token_ids=[token])
        assert found["choices"][0]["finish_reason"] == "stop"
        assert found["usage"]["completion_tokens"] == count
        body = {"prompt": PROMPT, "stop_token_ids": [10**6]}
        refused = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stop_token_ids"
