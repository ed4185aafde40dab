"""Several models at one address: names, loading, waiting streams, failures."""

from __future__ import annotations

import gc
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import SOON
from served_pool import ENGINE, ONE, served, spec
from servers import wait_until

from penstock import Engine
from penstock.recall import MODEL_PATH
from penstock.server.service import Service


def test_models_are_loaded_by_name_and_unloaded_for_others() -> None:
    specs = [spec(name, MODEL_PATH) for name in ("first", "second")]
    with served(specs, ONE) as address:
        assert {m["state"] for m in address.models().values()} == {"away"}
        expected = address.answer("first")
        assert "4821" in expected
        assert address.answer("second-alias") == expected
        states = {name: model["state"] for name, model in address.models().items()}
        assert states == {"first": "away", "second": "loaded"}
        assert address.models()["second"]["context_length"] > 0
        assert address.answer(None) == expected  # the first one answers
        loaded = httpx.post(f"{address.url}/v1/models/second/load", json={}, timeout=SOON).json()
        assert (loaded["id"], loaded["state"]) == ("second", "loaded")
        metrics = httpx.get(f"{address.url}/metrics", timeout=SOON).text
        assert 'penstock_model_state{model="second",state="loaded"} 1.0' in metrics
        assert (
            "penstock_generated_tokens_total"
            in httpx.get(f"{address.url}/metrics?model=second", timeout=SOON).text
        )
        for path, names in (("tags", ["first", "second"]), ("ps", ["second"])):
            listed = httpx.get(f"{address.url}/api/{path}", timeout=SOON).json()["models"]
            assert [model["name"] for model in listed] == names
        gone = httpx.post(f"{address.url}/v1/models/second/unload", json={}, timeout=SOON).json()
        assert gone["state"] == "away"


def test_unknown_model_is_refused_with_list_of_models() -> None:
    with served([spec("first", MODEL_PATH), spec("second", MODEL_PATH)], ONE) as address:
        for answer in (address.chat("third"), httpx.get(f"{address.url}/v1/models/third")):
            assert answer.status_code == 404
            assert "first, second" in answer.json()["error"]["message"]
    with served([spec("first", MODEL_PATH)], ONE, any_name=True) as address:
        assert "4821" in address.answer("third")


def test_ollama_name_may_end_in_latest() -> None:
    names = ["first", "second", "first:latest"]
    with served([spec(name, MODEL_PATH) for name in names[:2]], ONE) as address:
        body = {"model": "second:latest", "prompt": "", "stream": False}
        loaded = httpx.post(f"{address.url}/api/generate", json=body, timeout=SOON)
        assert loaded.status_code == 200, loaded.text
        assert address.models()["second"]["state"] == "loaded"
        assert address.chat("second:latest").status_code == 404, "another interface"
        missing = httpx.post(f"{address.url}/api/show", json={"model": "third:latest"})
        assert missing.status_code == 404 and "'third'" in missing.json()["error"]
    with served([spec(name, MODEL_PATH) for name in names], ONE) as address:
        httpx.post(f"{address.url}/api/generate", json={"model": names[2]}, timeout=SOON)
        assert address.models()[names[2]]["state"] == "loaded", "the whole name"


def test_stream_has_comments_while_model_loads() -> None:
    slow = threading.Event()
    with served([spec("first", MODEL_PATH, slow)], ONE, ping_seconds=0.1) as address:
        body = {"model": "first", "prompt": "A penstock is", "max_tokens": 4, "stream": True}
        lines: list[str] = []
        with httpx.stream(
            "POST", f"{address.url}/v1/completions", json=body, timeout=SOON
        ) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len([comment for comment in lines if comment.startswith(": first")]) == 3:
                    slow.set()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert any("loading" in line for line in lines if line.startswith(":"))
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] is not None
        assert lines[-2] == "data: [DONE]" or "data: [DONE]" in lines
        wrong = {**body, "max_tokens": -1}
        httpx.post(f"{address.url}/v1/models/first/unload", json={}, timeout=SOON)
        slow.clear()
        threading.Timer(0.5, slow.set).start()
        late = httpx.post(f"{address.url}/v1/completions", json=wrong, timeout=SOON)
        assert late.status_code == 200 and "event: error" in late.text
        assert "max_tokens" in late.text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_stream_has_empty_lines_of_json_while_model_loads(path: str) -> None:
    slow = threading.Event()
    with served([spec("first", MODEL_PATH, slow)], ONE, ping_seconds=0.1) as address:
        asked = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
        body = {"model": "first", **asked, "options": {"num_predict": 2}}
        lines: list[dict[str, Any]] = []
        with httpx.stream("POST", address.url + path, json=body, timeout=SOON) as answer:
            for line in answer.iter_lines():
                lines.append(json.loads(line))
                if len(lines) == 3:
                    slow.set()
        assert answer.headers["content-type"] == "application/x-ndjson"
        shown = [line.get("message", {}).get("content", line.get("response")) for line in lines]
        assert shown[:3] == ["", "", ""] and any(shown[3:])
        assert {line["model"] for line in lines} == {"first"}
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        httpx.post(f"{address.url}/v1/models/first/unload", json={}, timeout=SOON)
        slow.clear()
        threading.Timer(0.5, slow.set).start()
        wrong = {**body, "top_logprobs": 2, "format": 3}
        late = httpx.post(address.url + path, json=wrong, timeout=SOON)
        assert late.status_code == 200 and "error" in json.loads(late.text.splitlines()[-1])


def test_unloaded_models_leave_no_service_behind() -> None:
    def services() -> int:
        gc.collect()
        return sum(issubclass(type(item), Service) for item in gc.get_objects())

    before = services()
    with served([spec(name, MODEL_PATH) for name in ("first", "second")], ONE) as address:
        for name in ("first", "second", "first"):
            address.answer(name)
        assert services() - before == 1
        assert sum(issubclass(type(item), Engine) for item in gc.get_objects()) <= before + 1


def test_disconnect_during_load_frees_model() -> None:
    slow = threading.Event()
    with served([spec("first", MODEL_PATH, slow)], ONE) as address:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{address.url}/v1/completions",
                json={"model": "first", "prompt": "A"},
                timeout=0.3,
            )
        time.sleep(0.1)
        slow.set()
        wait_until(lambda: address.models()["first"]["state"] == "loaded")
        assert address.models()["first"]["open_requests"] == 0


def test_broken_model_folder_fails_only_its_own_requests(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with served([spec("good", MODEL_PATH), spec("broken", tmp_path)], ONE) as address:
        refused = address.chat("broken")
        assert (
            refused.status_code == 503 and refused.json()["error"]["code"] == "model_not_loadable"
        )
        assert "4821" in address.answer("good")
        assert "log" in address.models()["broken"]["error"]


def test_model_that_cannot_fit_is_refused_with_numbers() -> None:
    specs = [spec("pinned", MODEL_PATH, pinned=True), spec("other", MODEL_PATH)]
    with served(specs, ONE) as address:
        address.answer("pinned")
        refused = address.chat("other")
        assert refused.status_code == 503
        message = refused.json()["error"]["message"]
        assert "other needs" in message and "of pinned pinned" in message
        assert "4821" in address.answer("pinned")


@pytest.mark.usefixtures("reads_all")
def test_prefixes_are_restored_when_model_is_reloaded(tmp_path: Path) -> None:
    stored = {**ENGINE, "ssd_cache_dir": tmp_path / "blocks"}
    specs = [replace(spec(name, MODEL_PATH), settings=stored) for name in ("first", "second")]
    long = [{"role": "user", "content": f"The code of the amber falcon is 4821. {'La ' * 150}"}]
    with served(specs, ONE) as address:
        before = address.chat("first", messages=long).json()
        assert before["usage"]["prompt_tokens"] > 128
        address.answer("second")
        assert address.models()["first"]["state"] == "away"
        again = address.chat("first", messages=long).json()
        assert again["choices"][0]["message"] == before["choices"][0]["message"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
        # Without a folder they are computed again.
    with served([spec(name, MODEL_PATH) for name in ("first", "second")], ONE) as address:
        for name in ("first", "second"):
            address.chat(name, messages=long)
        again = address.chat("first", messages=long).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
