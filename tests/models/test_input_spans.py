"""Keys of spans (images) in a prompt: which block hashes they change."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.request import Request
from penstock.errors import SettingError
from penstock.models.input_spans import FIRST_WORD, LEAD_TOKENS, InputSpan, with_keys
from penstock.prefix.block_hashes import hash_blocks, partial_hash, root_hash

ROOT = root_hash("model")
PAD = 9
PROMPT = (*range(100, 120), *[PAD] * 12, *range(200, 240))
"""Text, an image of twelve tokens, text."""


def key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=32).digest()


def span(name: str, start: int = 20, tokens: int = 12) -> InputSpan:
    return InputSpan(start, tokens, key(name), None)


@given(size=st.integers(1, 40), start=st.integers(0, 30), tokens=st.integers(1, 20))
def test_blocks_with_different_images_never_share_hash(size: int, start: int, tokens: int) -> None:
    prompt = (*range(100, 100 + start), *[PAD] * tokens, *range(200, 260))
    first, second = (with_keys(prompt, [span(name, start, tokens)]) for name in ("one", "two"))
    pairs = zip(hash_blocks(first, size, ROOT), hash_blocks(second, size, ROOT), strict=True)
    for block, (one, two) in enumerate(pairs):
        end = (block + 1) * size
        if end > start:
            assert one != two, "a block that holds one of its tokens"
        elif end <= start - LEAD_TOKENS:
            assert one == two, "a block in front of it"


@given(size=st.integers(1, 40), start=st.integers(LEAD_TOKENS, 30), tokens=st.integers(1, 20))
def test_block_hash_covers_at_least_five_keyed_tokens(size: int, start: int, tokens: int) -> None:
    prompt = (*range(100, 100 + start), *[PAD] * tokens)
    words = with_keys(prompt, [span("one", start, tokens)])
    end = (start // size + 1) * size  # of the first block with one of its tokens
    assert sum(word >= FIRST_WORD for word in words[:end]) >= min(LEAD_TOKENS + 1, len(words))


def test_keyed_tokens_are_above_vocabulary_and_fit_31_bits() -> None:
    words = with_keys(PROMPT, [span("one")])
    assert words[: 20 - LEAD_TOKENS] == PROMPT[: 20 - LEAD_TOKENS]
    assert words[32:] == PROMPT[32:]
    assert all(FIRST_WORD <= word < 2**31 for word in words[20 - LEAD_TOKENS : 32])


def test_keyed_tokens_before_span_depend_on_text() -> None:
    """Words keep the difference between tokens that carry a key."""
    other = (*PROMPT[:18], 77, *PROMPT[19:])
    first, second = (with_keys(prompt, [span("one")]) for prompt in (PROMPT, other))
    assert partial_hash(first[:19], ROOT) != partial_hash(second[:19], ROOT)
    assert first[20:] == second[20:]


def test_keyed_tokens_depend_on_offset_in_block() -> None:
    twice = with_keys((*PROMPT, *PROMPT), [span("one"), span("one", 20 + len(PROMPT))])
    assert twice[20:32] == twice[20 + len(PROMPT) : 32 + len(PROMPT)]
    moved = with_keys(PROMPT, [span("one", 21, 11)])
    assert moved[21:32] != twice[21:32]


def test_adjacent_spans_keep_both_keys() -> None:
    """The second one's lead lies within the first."""
    pairs = [("a", "b"), ("a", "c"), ("c", "b")]
    words = {with_keys(PROMPT, [span(one, 20, 6), span(two, 26, 6)])[20:32] for one, two in pairs}
    assert len(words) == 3


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([span("a", 20), span("b", 25)], "misplaced"),
        ([span("a", 20, 0)], "misplaced"),
        ([span("a", 60, 12)], "end with tokens"),
    ],
    ids=["overlap", "empty", "at-the-end"],
)
def test_overlapping_or_out_of_range_spans_are_refused(spans: list[InputSpan], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Request(prompt=PROMPT, spans=tuple(spans))


def test_request_without_spans_uses_its_plain_tokens() -> None:
    request = Request(prompt=PROMPT)
    assert request.keyed_prompt is request.prompt
