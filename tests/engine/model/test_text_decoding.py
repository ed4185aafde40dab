"""Text decoding with a tokenizer, or without one."""

from __future__ import annotations

import pytest

from penstock.engine.model.sampling import NO_RULE
from penstock.engine.model.text_decoding import TextDecoding, TokensOnly, text_of
from penstock.engine.request import Request
from penstock.errors import SettingError
from penstock.models.loading import load
from penstock.recall import MODEL_PATH

REQUEST = Request(prompt=(1, 2, 3), stop=("b",), max_tokens=4)


def test_text_of_no_decoder_is_empty() -> None:
    text = text_of(None)
    assert type(text) is TokensOnly and not text.ends
    stream = text.stream(REQUEST)
    assert [stream.push(token) for token in (5, 6)] == ["", ""]
    assert (stream.finish(), stream.stopped, stream.may_stop) == ("", None, False)
    assert text.decoded([5, 6]) == ""
    grammars = text.grammars(100, 10**9)
    assert grammars.nbytes == grammars.evict() == 0
    with pytest.raises(SettingError, match="needs a tokenizer"):
        grammars.constraint('start: "a"')


def test_answers_have_separate_detokenizers() -> None:
    tokenizer = load(MODEL_PATH)[1]
    text = text_of(tokenizer)
    assert isinstance(text, TextDecoding) and text.ends == frozenset(tokenizer.eos_token_ids)
    tokens = tokenizer.encode("a cat", add_special_tokens=False)
    first, second = (text.stream(Request(prompt=(1,), max_tokens=4)) for _ in range(2))
    pushed = "".join(map(first.push, tokens)) + first.finish()
    assert pushed.strip() == text.decoded(tokens).strip() == "a cat"
    assert second.finish() == ""


def test_unconstrained_answer_allows_all_tokens() -> None:
    assert NO_RULE.free and NO_RULE.allowed(3).all() and NO_RULE.copy() is NO_RULE
    assert not NO_RULE.accept(2)
    assert (NO_RULE.forced(), NO_RULE.allowed_tokens([4, 5])) == ([], 2)
