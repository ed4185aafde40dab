"""Adapters by name in the APIs: `model+adapter`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_folders import write_adapter
from gguf_files import small_file
from served_pool import serve_pool
from servers import MODEL_NAME, Running, serving, settings

from penstock.cli import main
from penstock.errors import ModelError
from penstock.models.loading import expected_bytes, load_all
from penstock.pool.open_model import PoolMember
from penstock.recall import MODEL_PATH
from penstock.server.several_models import ServedModel

ASKED = [{"role": "user", "content": "The code of the amber falcon is 4821. What is the code?"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 6},
    "/v1/completions": {"prompt": "The code of the amber falcon is", "max_tokens": 6},
    "/v1/messages": {"messages": ASKED, "max_tokens": 6},
    "/v1/responses": {"input": ASKED[0]["content"], "max_output_tokens": 6},
    "/api/chat": {"messages": ASKED, "stream": False, "options": {"num_predict": 6}},
}
GIVEN = {"/v1/chat/completions": "choices", "/v1/completions": "choices"}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("adapters")
    folders = {name: write_adapter("embedded", folder / name, n) for n, name in enumerate("ab")}
    loaded = load_all(MODEL_PATH, adapters=folders)
    with serving(loaded.model, loaded.tokenizer) as running:
        yield running


def answer(running: Running, path: str, model: str) -> dict[str, Any]:
    body = {**PATHS[path], "model": model, "temperature": 0}
    answered = httpx.post(running.url + path, json=body, timeout=60)
    assert answered.status_code == 200, answered.text
    content: dict[str, Any] = answered.json()
    return content


def text_of(path: str, content: dict[str, Any]) -> str:
    if path == "/api/chat":
        return str(content["message"])
    kind = {"/v1/messages": "content", "/v1/responses": "output"}.get(path, "choices")
    return str([{**part, "id": None} for part in content[kind]])


@pytest.mark.parametrize("path", PATHS)
def test_model_field_selects_adapter(adapted: Running, path: str) -> None:
    names = [MODEL_NAME, f"{MODEL_NAME}+a", f"{MODEL_NAME}+b"]
    contents = {name: answer(adapted, path, name) for name in names}
    assert [content["model"] for content in contents.values()] == names
    assert len({text_of(path, content) for content in contents.values()}) == 3
    assert text_of(path, answer(adapted, path, names[1])) == text_of(path, contents[names[1]])


def test_ollama_name_of_adapter_may_end_in_latest(adapted: Running) -> None:
    path, name = "/api/chat", f"{MODEL_NAME}+a"
    tagged = text_of(path, answer(adapted, path, f"{name}:latest"))
    assert tagged == text_of(path, answer(adapted, path, name))


def test_models_route_lists_adapters(adapted: Running) -> None:
    listed = httpx.get(f"{adapted.url}/v1/models").json()
    names = [model["id"] for model in listed["data"]]
    assert names == [MODEL_NAME, f"{MODEL_NAME}+a", f"{MODEL_NAME}+b"]
    assert listed["last_id"] == names[-1]
    described = httpx.get(f"{adapted.url}/v1/models/{names[1]}").json()
    assert described["id"] == names[1]


def test_unknown_adapter_is_404(adapted: Running) -> None:
    body = {**PATHS["/v1/chat/completions"], "model": f"{MODEL_NAME}+c"}
    refused = httpx.post(f"{adapted.url}/v1/chat/completions", json=body)
    assert refused.status_code == 404
    assert f"{MODEL_NAME}+a" in refused.json()["error"]["message"]
    # One model answers to any other name.
    assert answer(adapted, "/v1/chat/completions", "gpt-4o")["model"] == MODEL_NAME


def test_decisions_use_requested_adapter(adapted: Running) -> None:
    asked = {
        "state": "Falcons are birds.",
        "questions": {"bird": {"type": "noul", "instructions": "Is it?"}},
    }
    told = []
    for model in (MODEL_NAME, f"{MODEL_NAME}+a"):
        answered = httpx.post(
            f"{adapted.url}/v1/systemone", json={**asked, "model": model}, timeout=60
        )
        assert answered.status_code == 200, answered.text
        told.append(answered.json())
    assert told[0] != told[1]


def test_explain_command_tells_adapters_apart(
    adapted: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = {"role": "user", "content": "The code of the amber falcon is 4821. " * 20}
    body = {"model": f"{MODEL_NAME}+a", "messages": [told], "max_tokens": 1, "top_k": 1}
    httpx.post(f"{adapted.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))

    def explained(*arguments: str) -> str:
        assert main(["explain", str(file), "--url", adapted.url, *arguments]) == 0
        return capsys.readouterr().out

    prompt = json.loads(explained("--json"))["prompt_tokens"]
    held = {
        name: json.loads(explained("--json", "--model", name))["held_tokens"]
        for name in (MODEL_NAME, f"{MODEL_NAME}+a", f"{MODEL_NAME}+b")
    }
    shared = held.pop(f"{MODEL_NAME}+a")
    assert shared > prompt // 2 and held == {MODEL_NAME: 0, f"{MODEL_NAME}+b": 0}
    assert explained().startswith(f"{shared} of {prompt} prompt tokens cached\n")
    assert main(["explain", str(file), "--url", adapted.url, "--model", f"{MODEL_NAME}+c"]) == 2
    assert f"there is no model '{MODEL_NAME}+c'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"model": "m"}'])
def test_explain_command_refuses_other_files_in_one_line(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "body.json").write_text(text)
    assert main(["explain", str(tmp_path / "body.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock: ") and "body.json" in line


def test_adapter_of_gguf_file_is_refused_with_reason(tmp_path: Path) -> None:
    file = small_file(tmp_path)
    with pytest.raises(ModelError, match=r"\.gguf file, which orders weights differently"):
        load_all(file, adapters={"a": write_adapter("embedded", tmp_path / "a", 1)})


def test_generate_command_uses_adapter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_adapter("embedded", tmp_path / "mine", 1)
    told = []
    for more in ([], ["--adapter", str(folder)]):
        asked = ["generate", str(ASKED[0]["content"]), "--max-tokens", "6", *more]
        assert main(asked) == 0
        told.append(capsys.readouterr().out)
    assert told[0] != told[1]
    assert main(["generate", "hello", "--adapter", str(tmp_path)]) == 2
    assert "adapter_config.json" in capsys.readouterr().err


def test_adapters_in_pool_share_base_weights(tmp_path: Path) -> None:
    folders = {name: write_adapter("embedded", tmp_path / name, n) for n, name in enumerate("ab")}
    member = PoolMember(
        name="base",
        load=lambda limit: load_all(MODEL_PATH, limit_bytes=limit, adapters=folders),
        expected_bytes=lambda limit: expected_bytes(MODEL_PATH, "auto", limit, "auto", folders),
        settings={"block_size": 64, "max_kv_size": 4_096},
    )
    model = ServedModel("base", settings(), ("alias",), tuple(folders))
    with serve_pool([model], [member], 90_000_000) as address:
        url = address.url
        told = {}
        for name in ("base", "base+a", "alias+b"):
            body = {**PATHS["/v1/chat/completions"], "model": name, "temperature": 0}
            answered = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert answered.status_code == 200, answered.text
            told[name] = answered.json()["choices"][0]["message"]["content"]
        assert len(set(told.values())) == 3
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert [model["adapters"] for model in listed] == [["a", "b"]]
        body["model"] = "base+c"
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 404
