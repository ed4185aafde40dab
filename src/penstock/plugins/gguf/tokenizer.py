"""Conversion of a GGUF file's tokenizer to tokenizer.json and tokenizer_config.json.

Three kinds are supported: byte-level BPE (`gpt2` in the metadata: GPT-2, Llama 3, Qwen, SmolLM),
SentencePiece's BPE with scores (`llama`: Llama 2, Mistral, Gemma, Phi 3), and with merges instead
(`gemma4`). `tokenizer.ggml.pre` is the name of the rules that split a text before BPE, which
llama.cpp defines in `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import ModelError
from penstock.plugins.gguf.architectures import CONTROL, END_MARKS, end_tokens
from penstock.plugins.gguf.header import Header
from penstock.plurals import counted

Merges: TypeAlias = list[tuple[str, str]]

GEMMA4 = "gemma4"
"""Kind of Gemma 4's tokenizer, which always adds a BOS token."""
USER_DEFINED, BYTE = 4, 6
"""Token types: a text that always becomes this token; a single byte."""
LONGEST_PIECE = 1_024
"""Maximum characters of a SentencePiece piece; real ones have up to 16 or 32."""
MOST_CHARACTERS = 16_000_000
"""Maximum characters of all pieces together; the largest vocabularies have two million."""
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
_ENDED = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDED}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDED}|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDINGS}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDINGS}"
)
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_ENDINGS}"
_MINICPM5 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_MARKS}|{_ENDINGS}"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDINGS}"
)
_CASED = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷ"
    r"ᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1f7d}ᾀ-ᾴᾶ-ᾼ\x{1fbe}ῂ-ῄῆ-ῌῐ-\x{1fd3}ῖ-\x{1fdb}ῠ-Ῥ"
    r"ῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    r"ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
"""Letters of scripts with two cases, as `deepseek-llm` lists them."""
_DIGIT = r"\p{N}"
_LLAMA3_NAMES = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
)
_GLM = ("glm4", "glm5")
SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), (_DIGIT, _GPT2)),
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe", *_GLM, "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "kormo", "hunyuan"), (_QWEN2,)
    ),
    **dict.fromkeys(("solar-open", "grok-2"), (_QWEN2,)),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "exaone-moe": (_EXAONE_MOE,),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT_4O,)),
    "seed-coder": (_SEED,),
    "minicpm5": (r"\p{N}{1,3}", _MINICPM5),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        r"\s?[!-/:-~！-／：-～\x{2018}-‟\x{3000}-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3),
    ),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
}
"""Patterns that split a text before BPE, applied in order, by name in the metadata."""
_BEGIN = frozenset((*_LLAMA3_NAMES, "tekken"))
"""Names of pre-tokenizers whose texts start with a BOS token."""
_WHOLE_WORDS = _BEGIN | {"minicpm5", *_GLM}
"""Names of pre-tokenizers with which a word in the vocabulary is one token, ignoring merges."""


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to a folder; ModelError if unsupported."""
    content, merges = _content(header)
    content["model"]["merges"] = merges
    _write(content, header, folder)


def write_without_merges(header: Header, folder: Path) -> Callable[[Tokenizer], None]:
    """Write a tokenizer's files without its merges; return a function that adds them to it.

    Saves memory: loaders parse the file twice into Python's objects, and merges are two thirds of
    Gemma 3's file, whose loading took 400 MB more with them.
    """
    content, merges = _content(header)
    content["model"]["merges"] = []
    _write(content, header, folder)
    vocabulary = content["model"]["vocab"]

    def complete(tokenizer: Tokenizer) -> None:
        old = tokenizer.model
        tokenizer.model = models.BPE(
            vocabulary,
            merges,
            unk_token=old.unk_token,
            fuse_unk=old.fuse_unk,
            byte_fallback=old.byte_fallback,
            ignore_merges=old.ignore_merges,
        )

    return complete


def _content(header: Header) -> tuple[dict[str, Any], Merges]:
    """Return the content of tokenizer.json without merges, and the merges."""
    texts = _texts(header)
    kind = str(header.get("tokenizer.ggml.model", str))
    build = {"gpt2": _byte_level, "llama": _sentence_piece, GEMMA4: _merged_pieces}.get(kind)
    if build is None:
        raise ModelError(
            f"{header.name} has a tokenizer of kind {kind[:64]!r}; only gpt2, llama and {GEMMA4} "
            f"are supported"
        )
    tokenizer, merges = build(header, texts)
    begin = _special(header, "bos", texts)
    adds = header.get("tokenizer.ggml.add_bos_token", bool, _begins(header)) or kind == GEMMA4
    if begin is not None and adds:
        _put_first(tokenizer, texts[begin], begin)
    # A library's object of the whole vocabulary would be built for this file alone.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = _added(header, texts)
    content["model"]["vocab"] = {text: token for token, text in enumerate(texts)}
    return content, merges


def _write(content: Mapping[str, Any], header: Header, folder: Path) -> None:
    config = _config(header, list(content["model"]["vocab"]))
    for name, values in (("tokenizer.json", content), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(values), encoding="utf-8")


def _begins(header: Header) -> bool:
    """Return whether texts start with a BOS token if the metadata does not specify it."""
    if header.get("tokenizer.ggml.model", str) == "llama":
        return True
    return str(header.get("tokenizer.ggml.pre", str, "default")) in _BEGIN


def _texts(header: Header) -> list[str]:
    """Return the texts of all tokens, with duplicates replaced by unique texts."""
    texts = header.get("tokenizer.ggml.tokens", list)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{header.name} has no vocabulary of texts")
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:  # bytes that are no text
        raw = (text.encode("utf-8", "surrogateescape") for text in texts)
        texts = [text.decode("utf-8", "replace") for text in raw]
    if len(set(texts)) == len(texts):
        return list(texts)
    seen: set[str] = set()
    unique = []
    for number, text in enumerate(texts):
        unique.append(text if text not in seen else f"<unused repeat {number}>")
        seen.add(unique[-1])
    return unique


def _types(header: Header, count: int) -> list[int]:
    types = header.get("tokenizer.ggml.token_type", np.ndarray)
    if types is None:
        return [1] * count
    if len(types) != count:
        raise ModelError(f"{header.name}: {len(types):,} types for {counted(count, 'token')}")
    return [int(kind) for kind in types.tolist()]


def _added(header: Header, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is split."""
    ends = {texts[token] for token in end_tokens(header) if token < len(texts)} & END_MARKS
    swallows = _swallows_blanks(header)
    return [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": swallows and text not in _KEEPS_BLANKS,
            "normalized": False,
            "special": kind == CONTROL or text in ends,
        }
        for token, (text, kind) in enumerate(zip(texts, _types(header, len(texts)), strict=True))
        if text and (kind in (CONTROL, USER_DEFINED) or text in ends)
    ]


_KEEPS_BLANKS = frozenset(("<unk>", "<s>", "<|endoftext|>"))


def _swallows_blanks(header: Header) -> bool:
    """Return whether special tokens absorb whitespace after them: Phi 3, recognized by name."""
    name = str(header.get("general.name", str, "")).lower()
    return any(sign in name for sign in ("phi-3", "phi3"))


def _special(header: Header, name: str, texts: Sequence[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in header.metadata:
        return None
    token = header.integer(key)
    if token >= len(texts):
        raise ModelError(f"{header.name}: {key} is {token:,} of {counted(len(texts), 'token')}")
    return token


def _byte_level(header: Header, texts: Sequence[str]) -> tuple[Tokenizer, Merges]:
    """Return a tokenizer without its vocabulary, and its merges."""
    name = str(header.get("tokenizer.ggml.pre", str, "default"))
    if name not in SPLITS:
        raise ModelError(
            f"{header.name}: the pre-tokenizer {name[:64]!r} is not supported; supported are "
            f"{', '.join(sorted(SPLITS))}"
        )
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in _WHOLE_WORDS))
    if name in ("qwen2", "qwen35", "deepseek-r1-qwen"):
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
    return tokenizer, _listed_merges(header, texts)


def _listed_merges(header: Header, texts: Sequence[str]) -> Merges:
    pairs = [merge.partition(" ") for merge in header.get("tokenizer.ggml.merges", list, [])]
    known = {text: text for text in texts}  # to keep no second copy of a text
    return [
        (known[left], known[right])
        for left, blank, right in pairs
        if blank and left in known and right in known and left + right in known
    ]


def _merged_pieces(header: Header, texts: Sequence[str]) -> tuple[Tokenizer, Merges]:
    """Return a tokenizer like Gemma 4's, whose pieces may have several words."""
    tokenizer = _pieces(header, texts, prefixed=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return tokenizer, _listed_merges(header, texts)


def _sentence_piece(header: Header, texts: Sequence[str]) -> tuple[Tokenizer, Merges]:
    """Return a tokenizer without its vocabulary, and its merges."""
    scores = header.get("tokenizer.ggml.scores", np.ndarray)
    if scores is None or len(scores) != len(texts):
        raise ModelError(
            f"{header.name} does not have one score for each of {counted(len(texts), 'token')}"
        )
    types = _types(header, len(texts))
    normal = [kind not in (CONTROL, USER_DEFINED, BYTE) for kind in types]
    lengths = [len(text) for text, merged in zip(texts, normal, strict=True) if merged]
    if max(lengths, default=0) > LONGEST_PIECE or sum(lengths) > MOST_CHARACTERS:
        raise ModelError(
            f"{header.name}: its pieces have up to {counted(max(lengths), 'character')}, and "
            f"{sum(lengths):,} in all; the limits are {LONGEST_PIECE:,} and {MOST_CHARACTERS:,}"
        )
    prefixed = bool(header.get("tokenizer.ggml.add_space_prefix", bool, True))
    tokenizer = _pieces(header, texts, prefixed=prefixed)
    return tokenizer, _merges(texts, scores, normal)


def _pieces(header: Header, texts: Sequence[str], *, prefixed: bool) -> Tokenizer:
    """Return a tokenizer of pieces whose blanks are `▁`, without its vocabulary."""
    unknown = _special(header, "unknown", texts)
    tokenizer = Tokenizer(
        models.BPE(
            unk_token=None if unknown is None else texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(texts: Sequence[str], scores: np.ndarray, normal: Sequence[bool]) -> Merges:
    """Return all pairs of pieces that form a piece, in merge order.

    SentencePiece merges the adjacent pair with the best score, on a tie the left-most. BPE merges
    have a fixed order instead, so ties are broken by vocabulary order.
    """
    ranks = {text: token for token, text in enumerate(texts)}
    # Token, left and right of each merge; as objects they would take ten times as much.
    numbers = array("q")
    for token, text in enumerate(texts):
        for cut in range(1, len(text) if normal[token] else 1):
            left, right = ranks.get(text[:cut]), ranks.get(text[cut:])
            if left is not None and right is not None:
                numbers.extend((token, left, right))
    merged, lefts, rights = np.array(numbers).reshape(-1, 3).T
    order = np.lexsort((lefts, merged, -np.asarray(scores)[merged]))
    pairs = zip(lefts[order].tolist(), rights[order].tolist(), strict=True)
    return [(texts[left], texts[right]) for left, right in pairs]


def _put_first(tokenizer: Tokenizer, text: str, token: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text} $A", pair=f"{text} $A {text}:1 $B:1", special_tokens=[(text, token)]
    )


def _config(header: Header, texts: Sequence[str]) -> dict[str, Any]:
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = {
        key: texts[token]
        for name, key in roles.items()
        if (token := _special(header, name, texts)) is not None
    }
    template = _templates(header)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokens,
        **({} if template is None else {"chat_template": template}),
    }


def _templates(header: Header) -> str | list[dict[str, str]] | None:
    prefix = "tokenizer.chat_template"
    plain = header.get(prefix, str)
    named = {
        key.removeprefix(f"{prefix}."): str(text)
        for key, text in header.metadata.items()
        if key.startswith(f"{prefix}.") and isinstance(text, str)
    }
    if not named:
        return None if plain is None else str(plain)
    default = str(plain) if plain is not None else next(iter(named.values()))
    return [
        {"name": name, "template": text} for name, text in {"default": default, **named}.items()
    ]
