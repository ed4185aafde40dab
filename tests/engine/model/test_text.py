"""Streamed text: multi-token characters and stop strings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.engine.model import text as text_module
from penstock.engine.model.text import TextStream
from penstock.models.byte_level import detokenizer_of
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH

# Tokens that are whole words, ends of stop strings, and halves of characters.
PIECES = ["ab", "bc", "abc", "cab", "aaa", " a", "a ", "  ", "\n\n", "é", "🦫", "x🦫", "<|end|>"]
VISIBLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
"""How GPT-2 writes bytes as signs."""


def as_signs(text: str) -> str:
    """Return one character per byte of `text`."""
    return "".join(part for part, _ in VISIBLE.pre_tokenize_str(text))


def byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose first 256 tokens are the bytes, as GPT-2 writes them."""
    signs = {sign: number for number, sign in enumerate(sorted(VISIBLE.alphabet()))}
    for piece in PIECES:
        signs[as_signs(piece)] = len(signs)
    inner = Tokenizer(models.BPE(vocab=signs, merges=[]))
    inner.pre_tokenizer = VISIBLE
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def sentence_piece() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the bytes as <0x..> and the pieces, as SentencePiece writes them."""
    signs = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in PIECES:
        signs[piece.replace(" ", "▁")] = len(signs)
    inner = Tokenizer(models.BPE(vocab=signs, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


BYTE_LEVEL = byte_level()
TOKENIZERS = {
    "bpe": TokenizerWrapper(BYTE_LEVEL, BPEStreamingDetokenizer),
    "naive": TokenizerWrapper(BYTE_LEVEL, NaiveStreamingDetokenizer),
    "spm": TokenizerWrapper(sentence_piece(), SPMStreamingDetokenizer),
}


def tokens_of(kind: str, text: str) -> list[int]:
    """Return one token per byte of `text`."""
    if kind == "spm":
        return list(text.encode())
    return list(BYTE_LEVEL.convert_tokens_to_ids(list(as_signs(text))))


def piece_token(piece: str) -> int:
    return 256 + PIECES.index(piece)


def whole(kind: str, tokens: Sequence[int]) -> str:
    """Return mlx-lm's own text of the tokens, decoded at once."""
    detokenizer = TOKENIZERS[kind].detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.text)


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the expected text of a stream by trying every possible end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(kind: str, tokens: Sequence[int], stops: Sequence[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(TOKENIZERS[kind].detokenizer, stops)
    return [*(stream.push(token) for token in tokens), stream.finish()], stream


@pytest.fixture(params=list(TOKENIZERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_character_is_emitted_with_its_last_byte(kind: str) -> None:
    pieces, _ = run(kind, tokens_of(kind, "é🦫x"), ())
    assert pieces == ["", "é", "", "", "", "🦫", "x", ""]


def test_incomplete_final_character_becomes_replacement(kind: str) -> None:
    pieces, _ = run(kind, tokens_of(kind, "a🦫")[:-1], ())
    assert pieces[:-1] == ["a", "", "", ""]
    assert set(pieces[-1]) == {"\ufffd"}


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_incomplete_character_is_dropped_from_cut_text(kind: str, stops: tuple[str, ...]) -> None:
    for size in (1, 2, 3):
        stream = TextStream(TOKENIZERS[kind].detokenizer, stops)
        tokens = tokens_of(kind, "a🦫")[: 1 + size]
        assert "".join(map(stream.push, tokens)) + stream.finish(cut=True) == "a"


@pytest.mark.parametrize("text", ["a\0b", "\0", "\0\0é\0", "Ā\0Ā", "".join(map(chr, range(0x180)))])
def test_zero_byte_round_trips(kind: str, text: str) -> None:
    detokenizer = detokenizer_of(TOKENIZERS[kind])
    stream = TextStream(detokenizer)
    pieces = [*(stream.push(token) for token in tokens_of(kind, text)), stream.finish()]
    assert "".join(pieces) == text


def test_mlx_lm_zero_byte_bug_is_still_present() -> None:
    """Once mlx-lm fixes this, `byte_level` can go."""
    assert whole("bpe", tokens_of("bpe", "a\0b")) == "aĀb"
    detokenizer_of(TOKENIZERS["bpe"])
    assert whole("bpe", tokens_of("bpe", "a\0b")) == "aĀb", "its own copies stay as they are"


def test_stop_string_across_tokens_is_detected(kind: str) -> None:
    tokens = [*tokens_of(kind, "x"), piece_token("ab"), piece_token("cab")]
    pieces, stream = run(kind, tokens, ["bca"])
    assert pieces == ["x", "a", "", ""]
    assert stream.stopped == "bca"


def test_no_single_piece_contains_stop_string(kind: str) -> None:
    """Negative control."""
    tokens = [*tokens_of(kind, "x"), piece_token("ab"), piece_token("cab")]
    pieces, _ = run(kind, tokens, ())
    assert "".join(pieces) == "xabcab"
    assert not any("bca" in piece for piece in pieces)


def test_multi_byte_stop_string_is_detected(kind: str) -> None:
    pieces, stream = run(kind, tokens_of(kind, "aé🦫b"), ["é🦫"])
    assert "".join(pieces) == "a"
    assert stream.stopped == "é🦫"


def test_failed_stop_prefix_is_emitted(kind: str) -> None:
    pieces, stream = run(kind, tokens_of(kind, "aabaax"), ["aaba_", "aax!"])
    assert pieces == ["", "", "", "", "aab", "", "aax"]
    assert stream.stopped is None


def test_withheld_text_is_emitted_at_end(kind: str) -> None:
    pieces, stream = run(kind, tokens_of(kind, "xab"), ["abc"])
    assert pieces == ["x", "", "", "ab"]
    assert stream.stopped is None
    assert stream.finish() == ""


def test_first_completed_stop_string_wins_then_longest(kind: str) -> None:
    for stops, text, found in (
        (["abcd", "bc"], "x" + "a", "bc"),
        (["bc", "abc"], "x", "abc"),
        (["c", "bc"], "xa", "bc"),
        (["abcd", "abc"], "x", "abc"),
    ):
        for tokens in (tokens_of(kind, "xabcd"), [*tokens_of(kind, "x"), piece_token("abc")]):
            pieces, stream = run(kind, tokens, stops)
            assert ("".join(pieces), stream.stopped) == (text, found)


def test_stop_string_in_final_flush_is_detected() -> None:
    """mlx-lm's byte-level detokenizer holds back a lone space."""
    pieces, stream = run("bpe", tokens_of("bpe", "ab "), [" "])
    assert "".join(pieces) == "ab"
    assert stream.stopped == " "


def test_nothing_is_emitted_after_stop(kind: str) -> None:
    stream = TextStream(TOKENIZERS[kind].detokenizer, ["b"])
    assert [stream.push(token) for token in tokens_of(kind, "abc")] == ["a", "", ""]
    assert (stream.finish(), stream.stopped) == ("", "b")


def test_streams_of_one_tokenizer_are_independent(kind: str) -> None:
    one, two = (TextStream(TOKENIZERS[kind].detokenizer, ["ab"]) for _ in range(2))
    a, b = tokens_of(kind, "ab")
    assert [one.push(a), two.push(b), one.push(b), two.push(a)] == ["", "b", "", ""]
    assert (one.stopped, two.stopped) == ("ab", None)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string must not be empty"):
        TextStream(TOKENIZERS["bpe"].detokenizer, ["a", ""])


def test_embedded_tokenizer_streams_text() -> None:
    tokenizer = load_all(MODEL_PATH).tokenizer
    text = "The code of the amber falcon is 4821. Noted."
    stream = TextStream(tokenizer.detokenizer, [". No"])
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == "The code of the amber falcon is 4821"


stop_strings = st.lists(
    st.one_of(
        st.text("abc 🦫é\n", min_size=1, max_size=5),
        st.sampled_from(["aaa", "aa", "abab", "🦫", "<|end|>", "\ufffd", "a\ufffd"]),
    ),
    max_size=4,
)
valid = st.lists(
    st.one_of(
        st.sampled_from([*"aabbcc ", "é", "🦫"]).map(lambda sign: (sign, None)),
        st.sampled_from(PIECES).map(lambda piece: (None, piece_token(piece))),
    ),
    max_size=24,
)


def joined(kind: str, parts: Sequence[tuple[str | None, int | None]]) -> list[int]:
    return [
        token
        for sign, number in parts
        for token in (tokens_of(kind, sign) if sign is not None else [number or 0])
    ]


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@given(parts=valid, stops=stop_strings)
def test_pieces_join_to_text_cut_at_first_stop(
    kind: str, parts: list[tuple[str | None, int | None]], stops: list[str]
) -> None:
    tokens = joined(kind, parts)
    pieces, stream = run(kind, tokens, stops)
    assert ("".join(pieces), stream.stopped) == cut(whole(kind, tokens), stops)


@pytest.mark.parametrize("kind", ["bpe", "spm"])
@given(tokens=st.lists(st.integers(0, 255 + len(PIECES)), max_size=24), stops=stop_strings)
def test_invalid_utf8_pieces_join_to_text_cut_at_first_stop(
    kind: str, tokens: list[int], stops: list[str]
) -> None:
    pieces, stream = run(kind, tokens, stops)
    assert ("".join(pieces), stream.stopped) == cut(whole(kind, tokens), stops)


@given(text=st.text("abc", max_size=40), stops=stop_strings, data=st.data())
def test_text_is_withheld_only_while_stop_is_possible(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """All but the longest suffix that begins a stop string is emitted after every token."""
    stream, out = TextStream(TOKENIZERS["spm"].detokenizer, stops), ""
    before = cut(text, stops)[0] if cut(text, stops)[1] else text
    for end, token in enumerate(tokens_of("spm", text), 1):
        out += stream.push(token)
        if stream.stopped is not None:
            assert out == before
            return
        begun = [
            held
            for held in range(end + 1)
            if any(stop.startswith(text[end - held : end]) for stop in stops)
        ]
        assert out == text[: end - max(begun, default=0)]


def lines_run(work: Callable[[], object]) -> int:
    """Count the lines of text.py that `work` runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != text_module.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def worst_texts(length: int) -> Iterator[tuple[str, list[str]]]:
    """Yield texts that repeatedly begin a long stop string, or withhold most of it."""
    long = "a" * 200
    yield "a" * length, [long + "b", long + "c", "b" + long]
    yield ("a" * 199 + "b") * (length // 200), [long, "ab" * 100]
    yield "abc" * (length // 3), []


def test_decoding_time_is_linear() -> None:
    for (short, stops), (long, _) in zip(worst_texts(3000), worst_texts(12000), strict=True):
        costs = []
        for text in (short, long):
            tokens = tokens_of("spm", text)
            stream = TextStream(TOKENIZERS["spm"].detokenizer, stops)
            costs.append(lines_run(lambda s=stream, t=tokens: [s.push(token) for token in t]))
        assert costs[1] < 4.2 * costs[0]
        assert costs[1] < 25 * len(long)


TOKENS = st.lists(st.sampled_from(PIECES).map(piece_token), min_size=1, max_size=20)


@settings(deadline=None)  # the first call makes what takes long
@given(prompt=TOKENS, answer=TOKENS, name=st.sampled_from(list(TOKENIZERS)))
def test_completion_text_continues_prompt(prompt: list[int], answer: list[int], name: str) -> None:
    """Includes the leading space."""
    tokenizer = TOKENIZERS[name]
    before = tokenizer.decode(prompt)
    stream = TextStream(tokenizer.detokenizer, (), prompt[-8:])
    text = "".join(stream.push(token) for token in answer) + stream.finish()
    assert before + text == tokenizer.decode([*prompt, *answer])


def test_leading_space_is_dropped_without_prompt() -> None:
    """As mlx-lm renders chat answers."""
    token = piece_token(" a")
    assert "".join(run("bpe", [token], ())[0]) == "a"
