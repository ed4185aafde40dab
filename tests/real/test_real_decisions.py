"""Decisions of a real model with packed weights are bit-identical under load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from servers import Running, serving

from penstock.errors import ModelError
from penstock.models import named
from penstock.models.loading import load_all
from penstock.models.weight_packer import weight_packer

OPTIONS = ("a licence", "a licence of software", "a recipe", "a letter", "10", "1")
QUESTIONS = {
    "kind": {
        "type": "choice",
        "instructions": "What is this text?",
        "criteria": dict.fromkeys(OPTIONS),
    },
    "free": {"type": "noul", "instructions": "Is this about software?"},
    "clear": {"type": "score", "instructions": "How clear?", "criteria": ["dark", "fair", "clear"]},
}


@pytest.fixture(scope="module")
def packed() -> Iterator[Running]:
    if weight_packer() is None:
        pytest.skip("packed products are compiled by Numba")
    try:
        named.fetch("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    loaded = load_all("smollm2", weights_dtype="packed")
    engine = {"memory_limit": "2GB", "block_size": 32}
    with serving(loaded.model, loaded.tokenizer, engine=engine) as running:
        yield running


def post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    decided: dict[str, Any] = answer.json()
    return decided


def test_probabilities_are_bit_identical_under_concurrent_load(
    packed: Running, prose: list[str]
) -> None:
    state = "\n\n".join(prose[:4])
    alone = post(packed, "/v1/systemone", state=state, questions=QUESTIONS)["answers"]
    warm = post(packed, "/v1/systemone", state=state, questions=QUESTIONS)["answers"]
    packed.service.engine.clear()
    others = {
        f"other {i}": {"type": "noul", "instructions": f"Is number {i} in the text?"}
        for i in range(40)
    }
    with ThreadPoolExecutor(4) as pool:
        chats = [
            pool.submit(
                post,
                packed,
                "/v1/chat/completions",
                messages=[{"role": "user", "content": f"{prose[5 + i]}\n\nGo on."}],
                max_tokens=60,
            )
            for i in range(4)
        ]
        beside = post(packed, "/v1/systemone", state=state, questions=others | QUESTIONS)["answers"]
        for chat in chats:
            chat.result()
    assert warm == alone
    assert {name: beside[name] for name in QUESTIONS} == alone
    changed = post(packed, "/v1/systemone", state=state + ".", questions=QUESTIONS)["answers"]
    assert changed != alone  # negative control


def test_probabilities_match_logprobs_of_chat(packed: Running, prose: list[str]) -> None:
    """The prompts have the same tokens, also where the state and a question meet."""
    state = prose[0]
    for subject in ("software", "music", "a river"):
        asked = {"type": "noul", "instructions": f"Is this about {subject}?"}
        answers = post(packed, "/v1/systemone", state=state, questions={"q": asked})["answers"]
        text = f"Question: Is this about {subject}?\nAnswer with Yes or No only."
        chat = post(
            packed,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": f"{state}\n\n{text}"}],
            max_tokens=1,
            logprobs=True,
            top_logprobs=20,
        )
        (token,) = chat["choices"][0]["logprobs"]["content"]
        top = {entry["token"]: entry["logprob"] for entry in token["top_logprobs"]}
        share = 1 / (1 + math.exp(top["No"] - top["Yes"]))
        assert answers["q"]["noul"] == pytest.approx(share, rel=1e-4)
