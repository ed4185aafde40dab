"""Long texts give equal tokens split and whole, for any tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from penstock.models.byte_level import token_bytes
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH
from penstock.server.pieces import SAMPLE, FairLock, PieceEncoder

GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How the tokenizers of GPT-4, Llama 3 and Qwen divide a text into words."""
TEXTS = [SAMPLE, "def f(x):\n    return x\n\nclass A:\n    pass\nclass B:\n    pass\n" * 3]


def trained(raw: Tokenizer, alphabet: list[str]) -> Any:
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    raw.train_from_iterator(TEXTS, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def byte_level(pattern: str | None) -> Any:
    raw = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    raw.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    raw.decoder = decoders.ByteLevel()
    return trained(raw, pre_tokenizers.ByteLevel.alphabet())


def sentence_piece() -> Any:
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="</s>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return trained(raw, [chr(code) for code in range(9, 127)])


KINDS: dict[str, Callable[[], Any]] = {
    "embedded": lambda: load_all(str(MODEL_PATH)).tokenizer,
    "gpt-2": lambda: byte_level(None),
    "gpt-4": lambda: byte_level(GPT_4),
    "sentence-piece": sentence_piece,
}
LINES = st.lists(
    st.one_of(
        st.sampled_from(["def f(x):", "    return x", "", " ", "7 a", "I'm", "\t", "a  b \r"]),
        st.text(max_size=12),
    ),
    max_size=12,
).map("\n".join)


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def test_byte_fallback_token_is_decoded_to_its_byte() -> None:
    tokenizer = sentence_piece()
    tokenizer.add_tokens(["<0xE4>", "<0xG4>"])
    byte, other = (tokenizer.convert_tokens_to_ids(text) for text in ("<0xE4>", "<0xG4>"))
    assert token_bytes(tokenizer, byte) == b"\xe4"
    assert token_bytes(tokenizer, other) == b"<0xG4>"


@pytest.mark.parametrize("kind", ["embedded", "gpt-2", "gpt-4"])
@pytest.mark.parametrize("text", ["\U0001fabf", "\U0001f469\u200d\U0001f680", "\u4e2d"])
def test_tokens_of_split_character_have_bytes(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    parts = [token for token in tokens if "\ufffd" in tokenizer.decode([token])]
    found = [token_bytes(tokenizer, token) for token in parts]
    assert len(parts) > 1 and None not in found
    assert b"".join(filter(None, found)) == text.encode()


@given(text=LINES, special=st.booleans())
def test_tokens_of_split_text_match_whole_text(tokenizer: Any, text: str, special: bool) -> None:
    text = "".join(c for c in text if not "\ud800" <= c <= "\udfff")
    seen: list[int] = []
    encoder = PieceEncoder(tokenizer, FairLock(), size=1)
    tokens = encoder.encode(
        text,
        special=special,
        check=lambda count, characters: seen.append(characters),
        large=lambda characters: None,
    )
    assert tokens == tokenizer.encode(text, add_special_tokens=special)
    assert not seen or seen[-1] == len(text)


@pytest.mark.parametrize("kind", ["embedded", "gpt-2", "gpt-4"])
def test_text_is_split_at_line_ends(kind: str) -> None:
    """A tokenizer that is never split would pass the test above."""
    encoder = PieceEncoder(KINDS[kind](), FairLock(), size=10)
    seen: list[int] = []
    encoder.encode(
        "a line of words\n" * 20,
        special=True,
        check=lambda count, characters: seen.append(characters),
        large=lambda characters: None,
    )
    assert encoder.can_cut and len(seen) == 20


def test_text_is_not_split_if_tokens_cross_lines() -> None:
    """Its tokens continue across line ends."""
    raw = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, "Ċ": 2, "a": 3, "Ċa": 4}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z0-9]+\n[a-zA-Z0-9]+"), "removed")
    encoder = PieceEncoder(PreTrainedTokenizerFast(tokenizer_object=raw), FairLock(), size=1)
    assert not encoder.can_cut
