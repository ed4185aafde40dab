"""Prompt log-probabilities over HTTP: `echo` with `logprobs`, and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import current_thread
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from servers import Running, serving

from penstock import load
from penstock.recall import MODEL_PATH
from penstock.server import dialect, problems, sse
from penstock.server.openai import openai_objects

NEAR = 2e-3
"""Largest difference of two log-probabilities: weights of four bits, sums in other orders."""
QUESTION = (
    "The color of the quiet dolphin is turquoise. " * 4
    + "The code of the amber falcon is seven. What is the code of the amber falcon?"
)
CHOICES = (" seven", " nine", " the amber", " falcon seven nine")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(engine={"block_size": 16}) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Any:
    """The embedded model run by mlx-lm without an engine."""
    return load(MODEL_PATH)[0]


def alone(model: Any, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    logits = model(mx.array([list(tokens)]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def complete(server: Running, prompt: Any, **more: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2, **more}
    answer = post(server, "/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def prompts_of(server: Running) -> list[list[int]]:
    """Return the tokens of a question with each of its choices."""
    encode = server.service.tokenizer.encode
    return [[*encode(QUESTION), *encode(choice, add_special_tokens=False)] for choice in CHOICES]


def test_echo_matches_model_log_likelihoods(server: Running, model: Any) -> None:
    """As multiple-choice tasks ask, for texts and tokens; choices share the question."""
    prompts = prompts_of(server)
    before = server.service.engine.stats().prefilled_tokens
    choices = complete(server, prompts)
    computed = server.service.engine.stats().prefilled_tokens - before
    assert computed < sum(map(len, prompts)) / 2
    for prompt, choice in zip(prompts, choices, strict=True):
        expected, found = alone(model, prompt), choice["logprobs"]
        assert choice["finish_reason"] == "length"
        assert choice["text"] == server.service.tokenizer.decode(prompt)
        assert len(found["tokens"]) == len(prompt)
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        own = [expected[i, token] for i, token in enumerate(prompt[1:])]
        assert np.allclose(found["token_logprobs"][1:], own, atol=NEAR)
        for row, top in zip(expected, found["top_logprobs"][1:], strict=False):
            assert np.isclose(max(top.values()), row.max(), atol=NEAR)
    texts = [server.service.tokenizer.decode(prompt) for prompt in prompts]
    again = complete(server, texts)
    for choice, other in zip(choices, again, strict=True):
        numbers = (one["logprobs"]["token_logprobs"][1:] for one in (choice, other))
        assert np.allclose(*numbers, atol=NEAR)
    assert ["".join(c["logprobs"]["tokens"]) for c in again] == texts
    assert [c["text"] for c in again] == texts


def test_logprob_lists_cover_echoed_prompt_and_answer(server: Running) -> None:
    (whole,) = complete(server, QUESTION, max_tokens=4)
    (plain,) = complete(server, QUESTION, max_tokens=4, echo=False)
    assert whole["text"] == QUESTION + plain["text"]
    logprobs, answer = whole["logprobs"], plain["logprobs"]
    count = len(answer["tokens"])
    assert logprobs["tokens"][-count:] == answer["tokens"]
    assert logprobs["token_logprobs"][-count:] == pytest.approx(answer["token_logprobs"], abs=NEAR)
    ends = [*logprobs["text_offset"][1:], len(whole["text"])]
    for text, start, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        assert whole["text"][start:end] == text
    body = {"prompt": QUESTION, "max_tokens": 4, "echo": True, "logprobs": 2, "stream": True}
    url, parts = f"{server.url}/v1/completions", []
    with httpx.stream("POST", url, json=body, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                parts.append(httpx.Response(200, text=line[6:]).json()["choices"][0])
    assert "".join(part["text"] for part in parts) == whole["text"]
    joined = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [t for part in joined for t in part["tokens"]] == logprobs["tokens"]
    assert [at for part in joined for at in part["text_offset"]] == logprobs["text_offset"]


def test_stream_waits_for_prompt_logprobs(server: Running) -> None:
    """The second answer finds its prompt cached, and ends during the first's prefill."""
    for animal in ("amber", "quiet", "brown", "old"):
        prompt = f"The code of the {animal} falcon"
        post(server, "/v1/completions", prompt=prompt, max_tokens=0)
        (whole,) = complete(server, prompt)
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2, "n": 3}
        url, logprobs = f"{server.url}/v1/completions", {}
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = httpx.Response(200, text=line[6:]).json()["choices"]
                    logprobs[choice["index"]] = choice["logprobs"]["token_logprobs"]
        expected = whole["logprobs"]["token_logprobs"]
        for streamed in (logprobs[0], logprobs[1], logprobs[2]):
            assert streamed[1:] == pytest.approx(expected[1:], abs=NEAR)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_token_has_logprob_with_echo(server: Running, stream: bool) -> None:
    """Evaluations read the last entry as that of the generated token."""
    prompt = prompts_of(server)[0]
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
    (plain,) = complete(server, prompt, max_tokens=1, logprobs=1)
    first = plain["logprobs"]["tokens"][-1]
    (token,) = server.service.tokenizer.encode(first, add_special_tokens=False)
    body |= {"stop_token_ids": [token], "stream": stream}
    answer = post(server, "/v1/completions", **body)
    lines = answer.text.replace("data: [DONE]", "").split("data: ")
    parts = [httpx.Response(200, text=line).json() for line in lines if line.strip()]
    lists = [part["choices"][0]["logprobs"] for part in parts]
    values = [value for one in lists if one for value in one["token_logprobs"]]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(values) == len(prompt) + 1
    assert values[-1] == pytest.approx(plain["logprobs"]["token_logprobs"][-1], abs=NEAR)


def test_prompt_logprobs_have_vllm_format(server: Running, model: Any) -> None:
    (prompt, *_) = prompts_of(server)
    (choice,) = complete(server, prompt, echo=False, logprobs=None, max_tokens=1, prompt_logprobs=2)
    assert choice["logprobs"] is None
    check_form(model, prompt, choice["prompt_logprobs"], 2)


def test_chat_prompt_logprobs_match_model(server: Running, model: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = post(
        server, "/v1/chat/completions", messages=messages, max_tokens=1, prompt_logprobs=0
    )
    prompt = server.service.prompts.render(messages)
    check_form(model, prompt, answer.json()["prompt_logprobs"], 0)


def check_form(model: Any, prompt: Sequence[int], found: list[Any], top: int) -> None:
    expected = alone(model, prompt)
    assert found[0] is None and len(found) == len(prompt)
    for row, token, by_token in zip(expected, prompt[1:], found[1:], strict=False):
        own = by_token[str(token)]
        assert own["logprob"] == pytest.approx(row[token], abs=NEAR)
        assert (row > row[token] + NEAR).sum() < own["rank"] <= (row > row[token] - NEAR).sum() + 1
        assert len(by_token) in (top, top + 1) if top else len(by_token) == 1
        assert all(isinstance(one["decoded_token"], str) for one in by_token.values())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -2}, "prompt_logprobs"),
        (
            "/v1/completions",
            {"prompt": "a", "prompt_logprobs": 1, "stream": True},
            "prompt_logprobs",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "prompt_logprobs": 1,
                "stream": True,
            },
            "prompt_logprobs",
        ),
    ],
)
def test_invalid_body_is_400_and_names_field(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_minus_one_returns_whole_vocabulary(server: Running, model: Any, path: str) -> None:
    """If memory allows; otherwise the refusal has the numbers."""
    size = server.service.vocabulary_size
    prompt: Sequence[int] = [7, 8, 9]
    asked: dict[str, Any] = {"prompt": prompt}
    if path != "/v1/completions":
        asked = {"messages": [{"role": "user", "content": QUESTION}]}
        prompt = server.service.prompts.render(asked["messages"])
    body = {**asked, "max_tokens": 1, "prompt_logprobs": -1}
    answer = post(server, path, **body)
    if len(prompt) > 3:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "prompt_logprobs"
        for number in (f"all {size:,} tokens", f"of {len(prompt)} tokens", " 8.33 MB "):
            assert number in error["message"]
        return
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["prompt_logprobs"]
    check_form(model, prompt, found, size)
    assert {one["rank"] for one in found[1].values()} == set(range(1, size + 1))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"echo": True, "logprobs": 0}),
        ("/v1/completions", {"echo": True, "logprobs": 0, "stream": True}),
        ("/v1/completions", {"echo": True, "n": 20, "max_tokens": 0}),
        ("/v1/chat/completions", {"prompt_logprobs": 0}),
        ("/tokenize", {}),
    ],
)
def test_long_responses_are_serialized_off_event_loop(
    server: Running, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[tuple[str, bool]] = []

    def noted(content: Any) -> bytes:
        written = problems.dumps(content)
        threads.append((current_thread().name, len(written) > 4_000))
        return written

    for module in (dialect, openai_objects, sse):
        monkeypatch.setattr(module, "dumps", noted)
    text = "The code. " * 400
    asked: dict[str, Any] = {}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": text}]}
    given = asked or {"prompt": text}
    assert post(server, path, **{"max_tokens": 1, **given, **body}).status_code == 200
    long = [name for name, is_long in threads if is_long]
    assert long and all(name.startswith("penstock-") for name in long), threads
    threads.clear()
    post(server, "/v1/completions", prompt="a", max_tokens=1)
    assert not any(name.startswith("penstock-long") for name, _ in threads)


def test_oversized_scores_are_refused_with_their_bytes(
    server: Running,
) -> None:
    prompt = [7] * 2_000
    answer = post(server, "/v1/completions", prompt=prompt, max_tokens=0, prompt_logprobs=20)
    assert answer.status_code == 413, answer.text
    assert " MB to be read; there are 8.33 MB for all prompts" in answer.json()["error"]["message"]
    answer = post(server, "/v1/completions", prompt=prompt, max_tokens=0)
    assert answer.status_code == 200
    assert server.service.memory.used_bytes < 1_000_000


def test_echoes_of_many_choices_respect_prompt_memory(server: Running) -> None:
    prompt = [5] * 1_200
    body = {"prompt": prompt, "max_tokens": 0, "echo": True}
    answer = post(server, "/v1/completions", **body, n=128)
    assert answer.status_code == 413, answer.text
    assert "for all prompts" in answer.json()["error"]["message"]
    answer = post(server, "/v1/completions", **body)
    assert answer.json()["choices"][0]["text"] == server.service.tokenizer.decode(prompt)
