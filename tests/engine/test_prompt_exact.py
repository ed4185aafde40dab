"""Completions continue the prompt's text exactly, with every kind of tokenizer.

`decode(prompt + answer)` begins with `decode(prompt)`, and the answer's text is the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import add_sentencepiece, add_vocabulary
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from penstock.engine.model.text import REPLACEMENT, TextStream
from penstock.engine.model.text_decoding import TEXT_BEFORE_TOKENS
from penstock.engine.request import Token
from penstock.plugins.gguf.header import read_header
from penstock.plugins.gguf.tokenizer import write_tokenizer
from penstock.recall import MODEL_PATH
from penstock.server.openai.logprobs import Logprobs

KINDS = ("embedded", "metaspace", "gguf bytes", "gguf sentencepiece")
SAMPLE = "The code of the amber falcon is 4821.\n    def f(x):\n\treturn [x, -1]  é 日本 🦫\n\n"


def metaspace(folder: Path) -> Any:
    """Write a tokenizer like Llama 2's: metaspace words, bytes as fallback."""
    marks = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "▁▁", "▁▁▁▁", "▁a", "▁amber", "amber", "a", "b", ".", "\n", "é", "日"]
    vocabulary = {piece: number for number, piece in enumerate([*marks, *words])}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def gguf_bytes(folder: Path) -> None:
    """Write the tokenizer of a GGUF file with a byte-level vocabulary."""
    writer = gguf.GGUFWriter(folder / "v.gguf", "llama")
    add_vocabulary(writer)
    _tokenizer_of(writer, folder)


def gguf_sentencepiece(folder: Path) -> None:
    """Write the tokenizer of a GGUF file with a SentencePiece vocabulary."""
    lines = [*SAMPLE.splitlines(), "amber falcon", "def f", "the code of"] * 50
    writer = gguf.GGUFWriter(folder / "v.gguf", "llama")
    add_sentencepiece(writer, lines, 330)
    _tokenizer_of(writer, folder)


def _tokenizer_of(writer: gguf.GGUFWriter, folder: Path) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    write_tokenizer(read_header(folder / "v.gguf"), folder)


WRITERS = {
    "metaspace": metaspace,
    "gguf bytes": gguf_bytes,
    "gguf sentencepiece": gguf_sentencepiece,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer as a server has it: mlx-lm's wrapper, with the detokenizer it chooses."""
    if request.param == "embedded":
        return load_tokenizer(Path(MODEL_PATH))
    folder = tmp_path_factory.mktemp("tokenizer")
    WRITERS[request.param](folder)
    return load_tokenizer(folder)


def continued_pieces(
    tokenizer: TokenizerWrapper, prompt: Sequence[int], answer: Sequence[int]
) -> list[str]:
    """Return the text pieces of an answer, one per token and one for the end."""
    stream = TextStream(tokenizer.detokenizer, (), prompt[-TEXT_BEFORE_TOKENS:])
    return [*(stream.push(token) for token in answer), stream.finish()]


PARTS = [*"ab. \n\t0", "é", "日", "🦫", " amber", "    ", "the"]
TEXT = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def shorter(prompt: list[int]) -> Iterator[list[int]]:
    """Yield a prompt, and the prompt without its last tokens, perhaps inside a character."""
    for size in range(len(prompt), -1, -1):
        yield prompt[:size]


def check(tokenizer: Any, prompt: list[int], answer: list[int]) -> None:
    whole, texts = tokenizer.decode([*prompt, *answer]), map(tokenizer.decode, shorter(prompt))
    known = next(text for text in texts if not text.endswith(REPLACEMENT))
    assert whole.startswith(known)
    pieces = continued_pieces(tokenizer, prompt, answer)
    assert known + "".join(pieces) == whole
    tokens = [
        Token(0, token, piece, -1.0, ()) for token, piece in zip(answer, pieces, strict=False)
    ]
    told = Logprobs(tokenizer).completion(tokens)
    assert "".join(told["tokens"]) + pieces[-1] == "".join(pieces)
    for text, at in zip(told["tokens"], told["text_offset"], strict=True):
        assert "".join(pieces)[at : at + len(text)] == text


SETTINGS = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)


@SETTINGS
@given(text=TEXT, more=TEXT, cut=st.integers(0, 40))
@example(text="the code", more=" amber amber", cut=0)
@example(text="x:\n", more="    y", cut=0)
@example(text="🦫", more="🦫🦫", cut=2)
def test_completion_continues_text_at_any_token(
    tokenizer: Any, text: str, more: str, cut: int
) -> None:
    """Also inside a character."""
    tokens = list(tokenizer.encode(f"a{text}{more}"))
    place = max(1, len(tokens) - cut)
    check(tokenizer, tokens[:place], tokens[place:])


@SETTINGS
@given(data=st.data())
def test_completion_of_random_tokens_continues_text(tokenizer: Any, data: Any) -> None:
    """Tokens of single bytes are excluded: decoders of invalid UTF-8 differ."""
    ids = sorted(
        number
        for name, number in tokenizer.get_vocab().items()
        if number not in tokenizer.all_special_ids
        and not name.startswith(("<spare", "<0x"))
        and tokenizer.decode([number]).strip("\0")
        and REPLACEMENT not in tokenizer.decode([number])
    )
    prompt, answer = (
        data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=20)) for _ in range(2)
    )
    check(tokenizer, [*tokenizer.encode("a"), *prompt], answer)
