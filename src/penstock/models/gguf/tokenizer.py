"""The tokenizer of a GGUF file, as the files of a model folder: tokenizer.json and its config.

Two kinds are read: byte-level BPE (`gpt2` in the metadata: GPT-2, Llama 3, Qwen, SmolLM) and
SentencePiece's BPE with scores (`llama`: Llama 2, Mistral, Gemma, Phi 3). How a text is split
before BPE stands in the metadata as a name, `tokenizer.ggml.pre`; the rules behind the names are
those of llama.cpp's `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from penstock.errors import ModelError
from penstock.models.gguf.architectures import CONTROL
from penstock.models.gguf.header import Header

USER_DEFINED, BYTE = 4, 6
"""Types of tokens: text that is always one token; one byte."""
LONGEST_PIECE = 1_024
"""Characters of one piece of SentencePiece; trained ones have 16 or 32."""
MOST_CHARACTERS = 16_000_000
"""Characters of all its pieces; the largest vocabularies have two million."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDINGS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_ENDINGS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS}|{_ENDINGS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDINGS}"
)
_DIGIT = r"\p{N}"
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jina-en"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGIT, _GPT2)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe", "falcon3"), (_LLAMA3,)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
"""Patterns that split a text before BPE, in turn, by the name in the metadata."""
_WHOLE_WORDS = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"))
"""Names of the rules by which a word in the vocabulary is one token, with or without merges."""


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into a folder.

    Raises:
        ModelError: a kind of tokenizer that is not read, or lists that do not fit together.
    """
    texts = _texts(header)
    build = {"gpt2": _byte_level, "llama": _sentence_piece}.get(
        str(header.get("tokenizer.ggml.model", str))
    )
    if build is None:
        kind = header.metadata.get("tokenizer.ggml.model")
        raise ModelError(f"{header.name} has a tokenizer of kind {kind!r}; gpt2 and llama are read")
    tokenizer = build(header, texts)
    tokenizer.add_tokens(_added(header, texts))
    begin = _special(header, "bos", texts)
    if begin is not None and header.get(
        "tokenizer.ggml.add_bos_token", bool, build is not _byte_level
    ):
        _put_first(tokenizer, texts[begin], begin)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(_config(header, texts)), encoding="utf-8"
    )


def _texts(header: Header) -> list[str]:
    """Return the vocabulary, each text once: a repeated one cannot be told from the first."""
    texts = header.get("tokenizer.ggml.tokens", list)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{header.name} has no vocabulary of texts")
    seen: set[str] = set()
    unique = []
    for number, text in enumerate(texts):
        clean = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        unique.append(clean if clean not in seen else f"<unused repeat {number}>")
        seen.add(unique[-1])
    return unique


def _types(header: Header, count: int) -> list[int]:
    """Return the type of each token; normal ones where the file does not say."""
    types = header.get("tokenizer.ggml.token_type", np.ndarray)
    if types is None:
        return [1] * count
    if len(types) != count:
        raise ModelError(f"{header.name}: {len(types):,} types for {count:,} tokens")
    return [int(kind) for kind in types]


def _added(header: Header, texts: Sequence[str]) -> list[AddedToken]:
    """Return the tokens that are found in a text before anything else."""
    types = _types(header, len(texts))
    return [
        AddedToken(text, special=kind == CONTROL, normalized=False)
        for text, kind in zip(texts, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _special(header: Header, name: str, texts: Sequence[str]) -> int | None:
    """Return the token of a role; None if the file names none.

    Raises:
        ModelError: it is not in the vocabulary.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in header.metadata:
        return None
    token = header.integer(key)
    if token >= len(texts):
        raise ModelError(f"{header.name}: {key} is {token:,} of {len(texts):,} tokens")
    return token


def _byte_level(header: Header, texts: Sequence[str]) -> Tokenizer:
    """Return a tokenizer that merges bytes."""
    name = str(header.get("tokenizer.ggml.pre", str, "default"))
    if name not in SPLITS:
        raise ModelError(
            f"{header.name}: texts are split as {name[:64]!r} says, which is not known; known are "
            f"{', '.join(sorted(SPLITS))}"
        )
    pairs = [tuple(merge.split(" ", 1)) for merge in header.get("tokenizer.ggml.merges", list, [])]
    vocabulary = {text: token for token, text in enumerate(texts)}
    merges = [
        pair for pair in pairs if len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys()
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    if name.startswith(("qwen2", "deepseek-r1-qwen")):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[name]),
            pre_tokenizers.ByteLevel(
                add_prefix_space=bool(header.get("tokenizer.ggml.add_space_prefix", bool, False)),
                use_regex=False,
            ),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(header: Header, texts: Sequence[str]) -> Tokenizer:
    """Return a tokenizer that merges pieces, the one with the best score first."""
    scores = header.get("tokenizer.ggml.scores", np.ndarray)
    if scores is None or len(scores) != len(texts):
        raise ModelError(f"{header.name} has not one score for each of {len(texts):,} tokens")
    types = _types(header, len(texts))
    normal = [kind not in (CONTROL, USER_DEFINED, BYTE) for kind in types]
    lengths = [len(text) for text, merged in zip(texts, normal, strict=True) if merged]
    if max(lengths, default=0) > LONGEST_PIECE or sum(lengths) > MOST_CHARACTERS:
        raise ModelError(
            f"{header.name}: its pieces have up to {max(lengths):,} characters, and "
            f"{sum(lengths):,} together; at most {LONGEST_PIECE:,} and {MOST_CHARACTERS:,} are read"
        )
    vocabulary = {text: token for token, text in enumerate(texts)}
    unknown = _special(header, "unknown", texts)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(texts, scores.tolist(), normal),
            unk_token=None if unknown is None else texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(header.get("tokenizer.ggml.add_space_prefix", bool, True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(
    texts: Sequence[str], scores: Sequence[float], normal: Sequence[bool]
) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, in the order in which they are merged.

    SentencePiece merges the neighbors whose piece has the best score, and of pieces with one score
    the left-most. A fixed order cannot say that, so the order of the vocabulary stands for it.
    """
    ranks = {text: token for token, text in enumerate(texts)}
    merges = [
        (-scores[token], token, ranks[text[:cut]], text[:cut], text[cut:])
        for token, text in enumerate(texts)
        if normal[token]
        for cut in range(1, len(text))
        if text[:cut] in ranks and text[cut:] in ranks
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _put_first(tokenizer: Tokenizer, text: str, token: int) -> None:
    """Let every text begin with a token."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text} $A", pair=f"{text} $A {text}:1 $B:1", special_tokens=[(text, token)]
    )


def _config(header: Header, texts: Sequence[str]) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = {
        key: texts[token]
        for name, key in roles.items()
        if (token := _special(header, name, texts)) is not None
    }
    template = header.get("tokenizer.chat_template", str)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokens,
        **({} if template is None else {"chat_template": template}),
    }
