"""Tokenize and detokenize over HTTP, in vLLM's and llama.cpp's formats."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from servers import Running

TEXT = "The code of the amber falcon is seven."
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    written: dict[str, Any] = answer.json()
    return written


def test_tokenize_matches_completion(recall_server: Running) -> None:
    found = post(recall_server, "/tokenize", prompt=TEXT, return_token_strs=True)
    usage = post(recall_server, "/v1/completions", prompt=found["tokens"], max_tokens=0)["usage"]
    tokenizer = recall_server.service.tokenizer
    assert found["tokens"] == tokenizer.encode(TEXT)
    assert found["count"] == len(found["tokens"]) == usage["prompt_tokens"]
    assert found["max_model_len"] == recall_server.service.context_tokens
    assert "".join(found["token_strs"]) == tokenizer.decode(found["tokens"])
    bare = post(recall_server, "/tokenize", prompt=TEXT, add_special_tokens=False)
    assert bare["tokens"] == tokenizer.encode(TEXT, add_special_tokens=False)
    assert "token_strs" not in bare


def test_tokenize_supports_llama_cpp_format(recall_server: Running) -> None:
    tokenizer = recall_server.service.tokenizer
    bare = post(recall_server, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in bare] == tokenizer.encode(TEXT, add_special_tokens=False)
    assert "".join(piece["piece"] for piece in bare) == TEXT
    special = post(recall_server, "/tokenize", content=TEXT, add_special=True)["tokens"]
    assert special == tokenizer.encode(TEXT)
    assert post(recall_server, "/tokenize", content="")["tokens"] == []


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"add_generation_prompt": False}])
def test_tokenize_messages_matches_chat(recall_server: Running, more: dict[str, Any]) -> None:
    found = post(recall_server, "/tokenize", messages=MESSAGES, **more)
    text = post(recall_server, "/apply-template", messages=MESSAGES, **more)["prompt"]
    encode = recall_server.service.tokenizer.encode
    assert found["tokens"] == encode(text, add_special_tokens=False)
    assert "Be brief." in text and "Hello!" in text
    if "add_generation_prompt" in more:
        return
    asked = {name: more[name] for name in more if name == "tools"}
    answer = post(recall_server, "/v1/chat/completions", messages=MESSAGES, max_tokens=1, **asked)
    assert answer["usage"]["prompt_tokens"] == found["count"]


def test_detokenize_returns_text(recall_server: Running) -> None:
    tokens = recall_server.service.tokenizer.encode(TEXT, add_special_tokens=False)
    assert post(recall_server, "/detokenize", tokens=tokens) == {"prompt": TEXT, "content": TEXT}
    assert post(recall_server, "/detokenize", tokens=[])["prompt"] == ""


def test_detokenize_respects_prompt_memory(recall_server: Running) -> None:
    """Token 5 has 13 characters, token 7 has one."""
    url = f"{recall_server.url}/detokenize"
    answer = httpx.post(url, json={"tokens": [5] * 100_000}, timeout=60)
    assert answer.status_code == 413, answer.text
    assert "for all prompts" in answer.json()["error"]["message"]
    text = recall_server.service.tokenizer.decode([7])
    assert post(recall_server, "/detokenize", tokens=[7] * 100_000)["content"] == text * 100_000


def test_tokenizer_lock_is_released_between_texts(recall_server: Running) -> None:
    """The event loop uses the tokenizer too."""
    prompts = recall_server.service.prompts
    with ThreadPoolExecutor(1) as pool:
        texts = pool.submit(prompts.token_texts, [7] * 60_000)
        time.sleep(0.05)
        others = [prompts.decode([7]) for _ in range(3)]
        assert not texts.done()
        assert texts.result() == others[:1] * 60_000


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "one of prompt, messages and content"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "one of prompt, messages and content"),
        ("/tokenize", {"prompt": 7}, "valid string"),
        ("/detokenize", {"tokens": [10**6]}, "token 1000000 does not exist"),
        ("/detokenize", {"tokens": "a"}, "valid list"),
        ("/apply-template", {"messages": []}, "at least 1"),
        ("/apply-template", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "tools"),
    ],
)
def test_invalid_body_is_400_with_reason(
    recall_server: Running, path: str, body: dict[str, Any], words: str
) -> None:
    answer = httpx.post(f"{recall_server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_tokenizer_info_names_special_tokens(recall_server: Running) -> None:
    found = httpx.get(f"{recall_server.url}/tokenizer_info", timeout=60).json()
    assert found["eos_token"] == recall_server.service.tokenizer.eos_token
