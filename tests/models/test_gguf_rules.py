"""Rules of llama.cpp that GGUF readers implement: markers, BOS, positions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Kind
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, pre_tokenizers

from penstock.errors import ModelError
from penstock.models.mlx_lm import completed_tokenizer
from penstock.plugins.gguf.architectures import END_MARKS, config, end_tokens
from penstock.plugins.gguf.header import Header, read_header
from penstock.plugins.gguf.tokenizer import write_tokenizer, write_without_merges
from support.gguf_files import small_model, write_model

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = [*LETTERS, "th", "the"]
FIRST, LAST = len(TEXTS), len(TEXTS) + 1
NORMAL, MARK, USER_DEFINED = 1, 3, 4


def vocabulary(
    folder: Path,
    *,
    marks: Iterable[tuple[str, int]] = (("<first>", MARK), ("<last>", MARK)),
    pre: str = "qwen2",
    name: str | None = None,
    more: Iterable[tuple[str, Any, Kind]] = (),
    merges: Iterable[str] = (),
) -> Header:
    """Write a byte vocabulary with special tokens to a file, and read its header."""
    file = folder / "v.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    given = list(marks)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    made = [merge.replace(" ", "") for merge in merges]
    writer.add_token_list([*TEXTS, *(text for text, _ in given), *made])
    kinds = [kind for _, kind in given]
    writer.add_token_types([NORMAL] * len(TEXTS) + kinds + [NORMAL] * len(made))
    writer.add_token_merges(["t h", "th e", *merges])
    writer.add_bos_token_id(FIRST)
    writer.add_eos_token_id(LAST)
    if name is not None:
        writer.add_name(name)
    for key, value, kind in more:
        writer.add_key_value(key, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_header(file)


def tokens(header: Header, folder: Path, text: str) -> list[int]:
    write_tokenizer(header, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize(
    ("pre", "begins"),
    [("llama-bpe", True), ("tekken", True), ("falcon3", True), ("qwen2", False), ("smollm", False)],
)
def test_bos_token_follows_vocabulary_rules(pre: str, begins: bool, tmp_path: Path) -> None:
    """Unless the file sets `add_bos_token`."""
    the = FIRST - 1
    assert tokens(vocabulary(tmp_path, pre=pre), tmp_path, "the") == [FIRST] * begins + [the]
    for said in (True, False):
        more = [("tokenizer.ggml.add_bos_token", said, Kind.BOOL)]
        header = vocabulary(tmp_path, pre=pre, more=more)
        assert tokens(header, tmp_path, "the") == [FIRST] * said + [the]


PIECES = {
    "default": "It|'|s|\u0120IT|'|S|\u0120|123|45|\u0120a|==|b|.",
    "gpt-2": "It|'s|\u0120IT|'|S|\u012012345|\u0120a|==|b|.",
    "smollm": "It|'s|\u0120IT|'|S|\u0120|1|2|3|4|5|\u0120a|==|b|.",
    "llama-bpe": "It|'s|\u0120IT|'S|\u0120|123|45|\u0120a|==|b|.",
    "qwen2": "It|'s|\u0120IT|'S|\u0120|1|2|3|4|5|\u0120a|==|b|.",
    "gpt-4o": "It's|\u0120IT'S|\u0120|123|45|\u0120a|==|b|.",
    "minicpm5": "It|'s|\u0120IT|'S|\u0120|123|45|\u0120a|==|b|.",
    "deepseek-coder": "It|'|s|\u0120IT|'|S|\u0120|1|2|3|4|5|\u0120a|==|b|.",
    "deepseek-llm": "It|'|s|\u0120IT|'|S|\u0120|12345|\u0120a|==|b|.",
    "deepseek-v3": "It|'s|\u0120IT|'S|\u0120|123|45|\u0120a|==|b|.",
    "bailingmoe": "It|'s|\u0120IT|'S|\u0120|1|2|3|4|5|\u0120a|==|b|.",
    "exaone-moe": "It|'s|\u0120IT|'S|\u0120|1|2|3|4|5|\u0120a|==|b|.",
    "falcon": "It|'|s|\u0120IT|'|S|\u0120|123|45|\u0120a|==|b|.",
    "laguna": "It|'s|\u0120IT|'S|\u0120|1|2|3|4|5|\u0120a|==|b|.",
}
"""Pieces of a text by the rules of llama.cpp, whose tokens `make peers GGUF=...` compares."""


@pytest.mark.parametrize("pre", PIECES)
def test_pretokenizers_match_llama_cpp(pre: str, tmp_path: Path) -> None:
    write_tokenizer(vocabulary(tmp_path, pre=pre), tmp_path)
    splitter = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    assert splitter is not None
    pieces = splitter.pre_tokenize_str("It's IT'S 12345 a==b.")
    assert "|".join(piece for piece, _ in pieces) == PIECES[pre]


@pytest.mark.parametrize(("pre", "whole"), [("glm4", True), ("glm5", True), ("qwen2", False)])
def test_whole_words_ignore_merges(pre: str, whole: bool, tmp_path: Path) -> None:
    """A word of the vocabulary that no merges lead to is one token with some rules."""
    header = vocabulary(tmp_path, pre=pre, marks=[("<first>", MARK), ("ht", NORMAL)])
    expected = [LAST] if whole else [TEXTS.index("h"), TEXTS.index("t")]
    assert tokens(header, tmp_path, "ht") == expected


def gemma4(folder: Path, template: str | None = None) -> Header:
    """Write a vocabulary of Gemma 4's kind to a file, and read its header."""
    pieces = ["\u2581", "t", "h", "e", "th", "the", "\u2581the", "\u2581the\u2581", "\n", "\n\n"]
    texts = ["<unk>", "<first>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    writer = gguf.GGUFWriter(folder / "v.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(texts)
    writer.add_token_types([2, MARK, *[6] * 256, *[NORMAL] * len(pieces)])
    merges = ["t h", "th e", "\u2581 the", "\u2581the \u2581", "\n \n"]
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_header(folder / "v.gguf")


@pytest.mark.parametrize("kind", ["gpt2", "gemma4"])
def test_tokenizer_completed_with_merges_is_that_of_whole_file(kind: str, tmp_path: Path) -> None:
    """The tokens of the marker of calls are those with merges, too."""
    template = "{{ messages }}<start_function_call>"
    key = "tokenizer.chat_template"
    header = gemma4(tmp_path, template)
    if kind == "gpt2":
        header = vocabulary(tmp_path, more=[(key, template, Kind.STRING)], merges=["t i", "r t"])
    write_tokenizer(header, tmp_path)
    expected = load_tokenizer(tmp_path)
    actual = completed_tokenizer(tmp_path, write_without_merges(header, tmp_path), [1])
    incomplete = load_tokenizer(tmp_path)
    backends = [wrapper._tokenizer.backend_tokenizer for wrapper in (expected, actual)]
    assert backends[0].to_str() == backends[1].to_str()
    for name, value in vars(expected).items():
        if name not in ("_tokenizer", "_detokenizer", "_eos_token_ids"):
            assert getattr(actual, name) == value
    assert actual._eos_token_ids >= {1}
    assert type(actual._detokenizer) is type(expected._detokenizer)
    assert actual._detokenizer.tokenmap == expected._detokenizer.tokenmap
    if kind == "gpt2":
        assert incomplete._tool_call_start_tokens != actual._tool_call_start_tokens  # control


def test_gemma4_pieces_are_merged_across_blanks(tmp_path: Path) -> None:
    """Lines end pieces, and a BOS token is added even if the file says no."""
    write_tokenizer(gemma4(tmp_path), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the the \n\n\nt\u00e9"
    found = tokenizer.encode(text)
    assert found.tokens == [
        *("<first>", "the", "\u2581the\u2581", "\n\n", "\n", "t", "<0xC3>", "<0xA9>")
    ]
    assert tokenizer.decode(found.ids) == text


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "deepseek-r1-qwen", "llama-bpe"])
def test_qwen_text_is_nfc_normalized(pre: str, tmp_path: Path) -> None:
    apart, together = (
        tokens(vocabulary(tmp_path, pre=pre), tmp_path, text) for text in ("e\u0301", "\u00e9")
    )
    assert (apart == together) is (pre != "llama-bpe")


@pytest.mark.parametrize("kind", [NORMAL, MARK, USER_DEFINED])
@pytest.mark.parametrize("mark", sorted(END_MARKS - {"<|tool_response>"}))
def test_end_of_text_tokens_are_recognized_by_text(mark: str, kind: int, tmp_path: Path) -> None:
    """Whatever its token type."""
    marks = [("<first>", MARK), ("<last>", MARK), (mark, kind), ("<|other|>", kind)]
    header = vocabulary(tmp_path, marks=marks)
    assert end_tokens(header) == [LAST, LAST + 1]
    assert tokens(header, tmp_path, f"the{mark}") == [FIRST - 1, LAST + 1]


@pytest.mark.parametrize(
    ("marks", "not_ends"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], "<|end|>"),
        (["<|end|>", "<|calls|>", "<|flush|>"], "<|end|>"),
        (["<|end|>", "<|return|>"], None),
        (["</s>", "<|tool_response>"], "</s>"),
        (["</s>", "<|plamo:eos|>"], "</s>"),
        (["</s>"], None),
    ],
)
def test_conflicting_end_of_text_tokens_are_excluded(
    marks: list[str], not_ends: str | None, tmp_path: Path
) -> None:
    given = [("<first>", MARK), ("<last>", MARK), *((mark, MARK) for mark in marks)]
    ends = end_tokens(vocabulary(tmp_path, marks=given))
    wanted = [mark for mark in marks if mark != not_ends and mark in END_MARKS]
    assert ends == [LAST, *(LAST + 1 + marks.index(mark) for mark in wanted)]


@pytest.mark.parametrize("key", ["eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_end_token_of_file_ends_answer(key: str, tmp_path: Path) -> None:
    more = [(f"tokenizer.ggml.{key}_token_id", 3, Kind.UINT32)]
    assert end_tokens(vocabulary(tmp_path, more=more)) == [LAST, 3]


def test_phi3_markers_strip_following_whitespace(tmp_path: Path) -> None:
    marks = [("<s>", MARK), ("<|endoftext|>", MARK), ("<|user|>", MARK)]
    user, the = LAST + 1, FIRST - 1
    blank, line = (TEXTS.index(sign) for sign in ("\u0120", "\u010a"))
    phi = vocabulary(tmp_path, marks=marks, name="Phi 3 Mini", pre="default")
    assert tokens(phi, tmp_path, "<|user|>\n the")[1:] == [line, blank, the], "no such name"
    phi = vocabulary(tmp_path, marks=marks, name="Phi-3 Mini", pre="default")
    assert tokens(phi, tmp_path, "<|user|>\n the") == [user, the]
    assert tokens(phi, tmp_path, "<|endoftext|> the") == [LAST, blank, the]


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    more = [
        ("tokenizer.chat_template", "{{ 1 }}", Kind.STRING),
        ("tokenizer.chat_template.tool_use", "{{ 2 }}", Kind.STRING),
        ("tokenizer.chat_template.rag", "{{ 3 }}", Kind.STRING),
    ]
    write_tokenizer(vocabulary(tmp_path, more=more), tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert {one["name"]: one["template"] for one in written} == {
        "default": "{{ 1 }}",
        "tool_use": "{{ 2 }}",
        "rag": "{{ 3 }}",
    }
    write_tokenizer(vocabulary(tmp_path, more=more[:1]), tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert written == "{{ 1 }}"


# ---- positions


def scaled(folder: Path, **given: Any) -> dict[str, Any]:
    """Return the config of a small llama with this RoPE scaling."""
    model, sizes = small_model("llama")
    kinds = {str: Kind.STRING, float: Kind.FLOAT32, int: Kind.UINT32}
    metadata = {
        f"llama.rope.{key.replace('__', '.')}": gguf.GGUFValue(value, kinds[type(value)])
        for key, value in given.items()
    }
    write_model(folder / "m.gguf", "llama", model, sizes, "F16", metadata)
    return config(read_header(folder / "m.gguf"))


@pytest.mark.parametrize(
    ("given", "factor"),
    [
        ({}, None),
        ({"scaling__factor": 4.0}, 4.0),
        ({"scale_linear": 2.0}, 2.0),
        ({"scale_linear": 2.0, "scaling__factor": 4.0}, 4.0),
        ({"scaling__type": "linear", "scaling__factor": 8.0}, 8.0),
        ({"scaling__type": "none", "scaling__factor": 8.0}, None),
        ({"scaling__factor": 0.0}, None),
    ],
)
def test_rope_factor_without_type_is_linear(
    given: dict[str, Any], factor: float | None, tmp_path: Path
) -> None:
    scaling = scaled(tmp_path, **given).get("rope_scaling")
    assert (scaling["factor"] if scaling else None) == factor
    assert scaling is None or scaling["rope_type"] == "linear"


@pytest.mark.parametrize("attention", [1.0, 0.8, 1.25])
def test_yarn_attention_factor_matches_llama_cpp(attention: float, tmp_path: Path) -> None:
    """llama.cpp multiplies by (0.1 ln(factor) + 1); so does mlx-lm with our config."""
    given = {"scaling__factor": 4.0, "scaling__attn_factor": attention}
    made = scaled(tmp_path, scaling__type="yarn", **given)
    assert (
        made["rope_scaling"]["original_max_position_embeddings"] == made["max_position_embeddings"]
    )
    rope = initialize_rope(16, 10_000.0, False, made["rope_scaling"], 2_048)
    wanted = (0.1 * np.log(4.0) + 1) * attention
    assert rope.mscale == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dimension_count": 8}, "8 of 16 numbers of a head"),
        ({"scaling__type": "yarn", "scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({"scaling__type": "yarn", "scaling__yarn_attn_factor": 2.0}, "yarn_attn_factor is 2"),
        ({"scaling__type": "other"}, "'other', which is not read"),
        ({"scaling__factor": -1.0}, "invalid RoPE scaling -1"),
    ],
)
def test_unsupported_rope_scaling_is_refused(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        scaled(tmp_path, **given)
