"""What the engine says of a prompt that was not found."""

from __future__ import annotations

import penstock
from penstock.engine.core import Core
from penstock.models.mlx_lm import encode
from penstock.recall import MODEL_PATH


def test_the_first_token_that_differs_is_named_and_spelled() -> None:
    model, tokenizer = penstock.load(MODEL_PATH)
    core = Core(model, tokenizer, memory_limit="100MB", block_size=8)
    told = encode(tokenizer, "The code of the amber falcon is 4821. Animals are good company.")
    asked = encode(tokenizer, "The code of the amber falcon is 4821. Animals are small company.")
    core.submit(penstock.Request(prompt=tuple(told), max_tokens=2))
    while core.step():
        pass
    found = core.view.explain(asked)
    at = next(i for i, (a, b) in enumerate(zip(told, asked, strict=True)) if a != b)
    assert (found.diverges_at, found.held_tokens) == (at, at // 8 * 8)
    assert (found.held_text, found.given_text) == (" good", " small")
    assert core.view.explain(told).given_text is None
    core.prefixes.clear()
    gone = core.view.explain(told)
    assert (gone.held_tokens, gone.evicted_for) == (0, "cleared")
    core.close()


def test_text_that_changes_from_prompt_to_prompt_is_named() -> None:
    model, tokenizer = penstock.load(MODEL_PATH)
    core = Core(model, tokenizer, memory_limit="100MB", block_size=8)
    told, asked, other = (
        encode(tokenizer, f"The code of the amber falcon is {text}. Animals are good company.")
        for text in ("4821", "4822", "amber")
    )
    core.submit(penstock.Request(prompt=tuple(told), max_tokens=2))
    while core.step():
        pass
    found = core.view.explain(asked)
    assert found.diverges_at == next(
        i for i, (a, b) in enumerate(zip(told, asked, strict=True)) if a != b
    )
    assert (found.volatile, found.volatile_held, found.volatile_given) == (
        "counter",
        "4821",
        "4822",
    )
    assert "Kind of the changed text: counter" in found.reason
    assert core.view.explain(other).volatile is None
    core.close()
