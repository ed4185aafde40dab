"""Decisions over HTTP: joint probabilities of options, compared with the model alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest
from servers import MODEL_NAME, Running, serving

from penstock import load
from penstock.recall import MODEL_PATH
from penstock.server.decisions.deciding import OptionTokens

NEAR = 2e-3
"""Largest difference of two log-probabilities: weights of four bits, sums in other orders."""
STATE = "The color of the quiet dolphin is turquoise. The code of the amber falcon is seven. " * 3
COLORS = ("turquoise", "seven nine", "seven", "the quiet dolphin", "seven nine falcon")
TEXT = (
    f"{STATE}\n\nQuestion: What is the code of the amber falcon?\n"
    + "".join(f"- {color}\n" for color in COLORS)
    + "Answer with one of these options only, exactly as written."
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(engine={"block_size": 16}) as running:
        yield running


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def question(**more: Any) -> dict[str, Any]:
    instructions = "What is the code of the amber falcon?"
    return {
        "type": "choice",
        "instructions": instructions,
        "criteria": dict.fromkeys(COLORS),
    } | more


def decide(server: Running, **questions: Any) -> dict[str, Any]:
    answer = post(server, "/v1/systemone", state=STATE, questions=questions)
    assert answer.status_code == 200, answer.text
    decided: dict[str, Any] = answer.json()
    return decided


def whole_logprobs(server: Running) -> list[float]:
    """Return the options' log-probabilities, each with an end token, by the model alone."""
    model, tokenizer = load(MODEL_PATH)
    prompt = list(server.service.prompts.render([{"role": "user", "content": TEXT}]))
    totals = []
    for color in COLORS:
        option = tokenizer.encode(color, add_special_tokens=False)
        logits = model(mx.array([[*prompt, *option]]))[0].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        rows = logprobs[len(prompt) - 1 :]
        ends = [end for end in tokenizer.eos_token_ids if end is not None]
        total = sum(float(row[token]) for row, token in zip(rows, option, strict=False))
        totals.append(total + float(np.logaddexp.reduce(rows[len(option), ends])))
    return totals


def test_multi_token_options_have_joint_probability(server: Running) -> None:
    expected = whole_logprobs(server)
    answer = decide(server, code=question())["answers"]["code"]
    mass = math.fsum(map(math.exp, expected))
    assert answer["option_mass"] == pytest.approx(mass, rel=10 * NEAR)
    for color, value in zip(COLORS, expected, strict=True):
        assert answer["probabilities"][color] == pytest.approx(
            math.exp(value) / mass, rel=NEAR * 10
        )
    assert answer["choice"] == COLORS[int(np.argmax(expected))]
    # Negative control: the first token alone does not tell three of the options apart.
    first = {server.service.tokenizer.encode(c, add_special_tokens=False)[0] for c in COLORS}
    assert len(first) < len(COLORS)


def test_identical_requests_get_identical_responses_under_load(server: Running) -> None:
    one = decide(server, code=question())["answers"]["code"]
    yes = {"type": "noul", "instructions": "Is the dolphin turquoise?"}
    others = {f"other {i}": {**yes, "instructions": f"Is it {i}?"} for i in range(70)}
    with ThreadPoolExecutor(3) as pool:
        chats = [
            pool.submit(
                post,
                server,
                "/v1/chat/completions",
                messages=[{"role": "user", "content": f"Count from {i}."}],
                max_tokens=24,
            )
            for i in range(3)
        ]
        many = decide(server, **others, code=question())["answers"]
        assert all(chat.result().status_code == 200 for chat in chats)
    assert many["code"]["probabilities"] == pytest.approx(one["probabilities"], rel=1e-4)
    assert len(many) == 71


def test_shared_state_is_prefilled_once(server: Running) -> None:
    yes = {"type": "noul", "instructions": "Is it so?"}
    asked = {f"q{i}": {**yes, "instructions": f"Is it {i}?"} for i in range(40)}
    prefilled = server.service.engine.ask
    before = prefilled(lambda view: view.stats()).result().prefilled_tokens
    answer = post(server, "/v1/systemone", state=f"{STATE} Once.", questions=asked).json()
    computed = prefilled(lambda view: view.stats()).result().prefilled_tokens - before
    # Yes and No are several tokens here: they are read in passes of their own.
    assert computed <= 1.3 * answer["usage"]["input_tokens"] < 40 * 32
    state_tokens = len(server.service.tokenizer.encode(STATE))
    assert computed < 40 * state_tokens / 2  # negative control: so much without sharing


def test_openai_client_parses_all_kinds_of_answers(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    decision = client.decisions.create(
        model=MODEL_NAME,
        input=[
            {"role": "system", "content": "You know animals."},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": STATE},
                    {"type": "input_json", "data": {"falcon": "amber"}},
                ],
            },
        ],
        questions=[
            {"type": "predicate", "instructions": "The dolphin is turquoise.", "name": "color"},
            {
                "type": "choice",
                "instructions": [{"type": "input_text", "text": "Which?"}],
                "choices": [
                    {"value": True},
                    {"value": "true"},
                    {"value": "red", "description": "x"},
                ],
            },
            {
                "type": "score",
                "instructions": "How quiet?",
                "levels": [{"label": "loud"}, {"label": "quiet", "description": "no sound"}],
            },
        ],
    )
    predicate, choice, score = decision.answers
    assert predicate.type == "predicate" and predicate.name == "color"
    assert 0 < predicate.probability < 1
    assert choice.type == "choice" and choice.name is None
    assert [option.value for option in choice.probabilities] == [True, "true", "red"]
    best = max(choice.probabilities, key=lambda option: option.probability)
    assert choice.choice == best.value and 0 <= choice.confidence <= 1
    assert score.type == "score" and [level.label for level in score.probabilities] == [
        "loud",
        "quiet",
    ]
    assert score.score == pytest.approx(score.probabilities[1].probability)
    assert decision.model == MODEL_NAME and decision.usage.output_tokens == 0
    assert decision.usage.total_tokens == decision.usage.input_tokens > 100


def test_systemone_answers_have_documented_fields(server: Running) -> None:
    answers = decide(
        server,
        urgent={"type": "noul", "criteria": {"true": "It is urgent.", "false": None}},
        code=question(),
        level={"type": "score", "instructions": {"ask": "How?"}, "criteria": ["low", {"a": 1}]},
    )["answers"]
    assert set(answers["urgent"]) == {"type", "noul", "option_mass"}
    assert math.fsum(answers["code"]["probabilities"].values()) == pytest.approx(1)
    assert answers["level"]["legend"] == {"0": "low", "1": {"a": 1}}
    assert answers["level"]["score"] == pytest.approx(answers["level"]["probabilities"]["1"])


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/systemone", {"questions": {}}, "questions"),
        ("/v1/systemone", {"questions": {"a": {"type": "box"}}}, "questions.a"),
        ("/v1/systemone", {"questions": {"a": {"type": "score", "criteria": []}}}, "criteria"),
        ("/v1/systemone", {"questions": {"a": question(criteria={"": None})}}, "option is empty"),
        ("/v1/systemone", {"state": "word " * 200_000}, "too long"),
        ("/v1/decisions", {"input": [], "questions": [{"type": "predicate"}]}, "instructions"),
        (
            "/v1/decisions",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
                ]
            },
            "text only",
        ),
        (
            "/v1/decisions",
            {
                "questions": [
                    {
                        "type": "choice",
                        "instructions": "?",
                        "choices": [{"value": "a"}, {"value": "b"}, {"value": "a"}],
                    }
                ]
            },
            "questions.0: options 0 and 2 have the same tokens",
        ),
    ],
)
def test_invalid_requests_give_one_line_error(
    server: Running, path: str, body: dict[str, Any], message: str
) -> None:
    yes: dict[str, Any] = {"type": "noul", "instructions": "Is it?"}
    whole: dict[str, Any] = {"state": "x", "input": "x", "questions": {"a": yes}}
    if path == "/v1/decisions":
        whole["questions"] = [{"type": "predicate", "instructions": "It is."}]
    answer = post(server, path, **{**whole, **body})
    error = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message in error and "\n" not in error


def test_option_that_is_prefix_of_another_needs_end_token() -> None:
    apart = OptionTokens([(1, 2), (1, 3), (4,)], ends=(9,))
    assert not apart.ended and apart.stems == [(1,)] and apart.candidates == (1, 2, 3, 4)
    rows = np.log(np.array([[0.5, 0.1, 0.1, 0.3], [0.1, 0.6, 0.2, 0.1]], np.float32))
    assert np.exp(apart.logprobs([rows])) == pytest.approx([0.3, 0.1, 0.3])
    ended = OptionTokens([(1,), (1, 2)], ends=(9, 8))
    assert ended.ended and ended.stems == [(1, 2)] and ended.candidates == (1, 2, 8, 9)
    rows = np.log(np.array([[0.5, 0.1, 0.2, 0.2], [0.1, 0.5, 0.2, 0.2], [0.1, 0.1, 0.4, 0.4]]))
    assert np.exp(ended.logprobs([rows.astype(np.float32)])) == pytest.approx([0.2, 0.2])
    with pytest.raises(ValueError, match="no end token"):
        OptionTokens([(1,), (1, 2)], ends=())
