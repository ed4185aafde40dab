"""Random requests for models whose heads or drafters propose, run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import mlx.core as mx
import pytest
import tiny_families

from penstock.engine.core import Core
from penstock.engine.model import verification
from penstock.engine.request import Request, Sampling

MEASURED_TOKENS = 10
"""Length up to which an answer may end before enough steps without proposals were measured."""
SMALL: dict[str, Any] = {
    "memory_limit": "80MB",
    "block_size": 16,
    "prefill_chunk": 32,
    "max_batch_size": 4,
    "max_kv_size": 512,
}


@contextmanager
def running(model: Any, tokenizer: Any = None, **settings: Any) -> Iterator[Core]:
    core = Core(model, tokenizer, **{**SMALL, **settings})
    try:
        yield core
        core.view.check()
    finally:
        core.close()


def answers(core: Core, requests: Sequence[Request]) -> list[Any]:
    """Return the answers of requests that run together."""
    handles = [core.submit(request) for request in requests]
    while core.step():
        core.view.check()
    return [
        (choice.tokens, choice.finish and choice.finish.reason)
        for handle in handles
        for choice in handle.result(0.0)
    ]


def drawn(seed: int, count: int) -> list[Request]:
    """Return random requests, some of which share a prefix or go on where another ended."""
    draw = Random(seed)
    shared = [draw.randrange(tiny_families.VOCABULARY_TOKENS) for _ in range(50)]
    requests = []
    for _ in range(count):
        own = [draw.randrange(tiny_families.VOCABULARY_TOKENS) for _ in range(draw.randint(1, 40))]
        sampling = draw.choice(
            [
                Sampling(),
                Sampling(),
                Sampling(temperature=0.7, seed=draw.randrange(9)),
                Sampling(repetition_penalty=1.05, logprobs=True, top_logprobs=2),
            ]
        )
        requests.append(
            Request(
                prompt=(*shared[: draw.choice([0, 20, 50])], *own),
                max_tokens=draw.randint(1, 20),
                ignore_eos=True,
                sampling=sampling,
                salt=draw.choice(["", "a"]),
            )
        )
    return requests


def assert_same(
    model: Any, requests: Sequence[Request], actual: Sequence[Any], expected: Sequence[Any]
) -> None:
    """Check that answers are equal, but for a greedy choice among equal logits."""
    for request, (tokens, reason), (others, other_reason) in zip(
        requests, actual, expected, strict=True
    ):
        if tokens == others or request.sampling != Sampling():
            assert (tokens, reason) == (others, other_reason)
            continue
        place = next(
            i for i, pair in enumerate(zip(tokens, others, strict=True)) if len({*pair}) > 1
        )
        logits = model(mx.array([[*request.prompt, *others[:place]]]))[0, -1]
        assert mx.abs(logits[tokens[place]] - logits[others[place]]) < 1e-3, "no tie"


def noted_proposals(
    monkeypatch: pytest.MonkeyPatch, draft_class: type[Any]
) -> list[tuple[list[int], list[int]]]:
    """Return a list that gets the tokens of each sequence, and what is proposed to follow them."""
    proposed: list[tuple[list[int], list[int]]] = []
    draft = draft_class.draft

    def noted(self: Any, sequences: Any, limits: Any) -> list[list[int]]:
        drafts: list[list[int]] = draft(self, sequences, limits)
        proposed.extend((list(s.tokens), d) for s, d in zip(sequences, drafts, strict=True))
        return drafts

    monkeypatch.setattr(draft_class, "draft", noted)
    return proposed


def changes_if_all_is_accepted(plain: Any, drafting: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a verifier that accepts every proposal gives other answers."""
    # Greedy requests alone are verified all at once.
    requests = [
        Request(prompt=tuple(range(start, start + 40)), max_tokens=40, ignore_eos=True)
        for start in range(4)
    ]
    with running(plain) as core:
        expected = answers(core, requests)
    monkeypatch.setattr(verification, "_accepted", lambda chosen, proposal: list(chosen))
    with running(drafting, draft_model="mtp") as core:
        return answers(core, requests) != expected
