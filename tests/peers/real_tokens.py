"""Compare the tokens of GGUF vocabularies with those of llama.cpp: each text, each `pre`.

    python tests/peers/real_tokens.py FOLDER

A folder is searched for `*.gguf`. Files of vocabularies alone do; llama.cpp has some in `models`,
also in the sdist of `llama-cpp-python`. Its tokenizer is that of the package `llama_cpp`. Without
that package the texts and tokens that lie beside some files (`NAME.gguf.inp`, `.out`) are compared
alone. None of them is part of this project. Exit code 0: all tokens are equal. 1: not so. 2: there
is no file that is read.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from penstock.errors import ModelError
from penstock.plugins.gguf.header import Header, read_header
from penstock.plugins.gguf.tokenizer import SPLITS, write_tokenizer

TEXTS = 300
"""Texts that are drawn for each vocabulary and each `pre`."""
BESIDE = "\n__ggml_vocab_test__\n"
"""Mark between the texts beside a file."""
PRE = "tokenizer.ggml.pre"
PARTS = (
    *("", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "    return x\n", "\x0b"),
    *(
        "Hello",
        " world",
        "HELLO",
        "iPhone",
        "camelCaseWord",
        "snake_case",
        "don't",
        "I'LL",
        "we'Ve",
    ),
    *(
        "'s",
        "'S",
        "`'ll",
        "1",
        "12",
        "123",
        "1234",
        "3.14159",
        "1,000,000",
        "\u00bd",
        "\u0664\u0665",
    ),
    *(
        "\u00c4pfel",
        "na\u00efve",
        "\u043d\u0435\u0449\u043e",
        "\u65e5\u672c\u8a9e",
        "\ud55c\uad6d",
        "\u0939\u093f\u0928\u094d\u0926\u0940",
    ),
    *(
        "\u0e44\u0e17\u0e22",
        "\u0627\u0644\u0639",
        "e\u0301",
        "\u01c5",
        "\u02b0x",
        "\U0001f600",
        "\U0001f468\u200d\U0001f469",
    ),
    *(
        "\u00a0",
        "\u3000",
        "\u200b",
        "\ufeff",
        "\u2026",
        "\u201cso\u201d",
        "!!!",
        "...",
        "==",
        "+=",
        "</p>",
        "{}",
        "[/",
    ),
    *(
        "(a)",
        "a/b",
        "//",
        "#",
        "$5",
        "~`^|",
        "\u20ac",
        "\\n",
        "x\u0308y",
        "\u2581",
        "\u00b5m",
        "\ufb01",
        "\u0130I\u0131",
    ),
)
"""Parts of texts: what rules for splitting, merging and marks tell apart."""


def drawn(marks: Sequence[str]) -> list[str]:
    """Return reproducible random texts, some with special tokens of the vocabulary."""
    random = Random(1)
    parts = [*PARTS, *random.sample(marks, min(len(marks), 6))]
    texts = [*PARTS[1:], *marks[:3]]
    texts += ["".join(random.choices(parts, k=random.randint(2, 9))) for _ in range(TEXTS)]
    return texts[-TEXTS:]


def ours(header: Header) -> Tokenizer:
    """Return our tokenizer of a vocabulary; raises `ModelError`."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(header, Path(folder))
        return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def theirs(file: Path, pre: str | None) -> Callable[[str], list[int]] | None:
    """Return llama.cpp's tokenizer; None without the package, or where it refuses the file."""
    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    changed = {PRE: pre} if pre is not None else None
    try:
        model = Llama(str(file), vocab_only=True, verbose=False, kv_overrides=changed)
    except ValueError:
        return None

    def tokens(text: str) -> list[int]:
        return list(model.tokenize(text.encode(), add_bos=True, special=True))

    return tokens


def compare_drawn(label: str, tokenizer: Tokenizer, tokens: Callable[[str], list[int]]) -> int:
    """Compare drawn texts; return how many differ.

    Qwen's own tokenizer puts a letter and its accent together, and Phi's drops all blanks behind a
    mark. llama.cpp does not compose, and drops ASCII's: there it is given the text as it is then.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    texts = drawn([token.content for token in added])
    composes = type(tokenizer.normalizer).__name__ == "NFC"
    given = [unicodedata.normalize("NFC", text) if composes else text for text in texts]
    if swallowing := "|".join(re.escape(token.content) for token in added if token.rstrip):
        given = [re.sub(rf"({swallowing})\s+", r"\1", text) for text in given]
    return compare(label, tokenizer, texts, [tokens(text) for text in given])


def compare(
    label: str,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    expected: Sequence[Sequence[int]],
    *,
    begins: bool = True,
) -> int:
    """Print how many texts have the same tokens, and the first of the others; return these.

    Args:
        begins: whether the expected tokens may start with a BOS token.
    """
    outcomes: Counter[str] = Counter()
    wrong = []
    for text, tokens in zip(texts, expected, strict=True):
        own = tokenizer.encode(text, add_special_tokens=begins).ids
        outcomes["equal" if own == list(tokens) else "WRONG"] += 1
        if own != list(tokens):
            wrong.append((text, own, list(tokens)))
    print(f"{label:<50} {', '.join(f'{count} {what}' for what, count in outcomes.items())}")
    for text, own, tokens in wrong[:3]:
        print(f"    {text!r}: {own} for {tokens}")
    return len(wrong)


def beside(file: Path, header: Header) -> int:
    """Compare the texts and tokens stored beside a file; return the number that differ."""
    texts, tokens = file.with_name(f"{file.name}.inp"), file.with_name(f"{file.name}.out")
    if not (texts.is_file() and tokens.is_file()):
        return 0
    expected = [[int(token) for token in line.split()] for line in tokens.read_text().splitlines()]
    given = texts.read_text(encoding="utf-8").split(BESIDE)
    pairs = [*zip(given, expected, strict=False)]  # behind the last mark there is no text
    tokenizer = ours(header)
    if type(tokenizer.normalizer).__name__ == "NFC":
        pairs = [pair for pair in pairs if unicodedata.is_normalized("NFC", pair[0])]
    given, expected = [text for text, _ in pairs], [tokens for _, tokens in pairs]
    return compare(f"{file.stem}, beside it", tokenizer, given, expected, begins=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with GGUF files")
    folder = parser.parse_args().folder
    read, wrong, byte_level = 0, 0, None
    for file in sorted(folder.glob("*.gguf")):
        header = read_header(file)
        try:
            tokenizer = ours(header)
        except ModelError as error:
            print(f"{file.stem:<50} not read: {str(error)[:90]}")
            continue
        read += 1
        wrong += beside(file, header)
        if tokens := theirs(file, None):
            wrong += compare_drawn(file.stem, tokenizer, tokens)
            if header.metadata["tokenizer.ggml.model"] == "gpt2" and header.metadata.get(PRE):
                byte_level = file
    for pre in SPLITS if byte_level is not None else ():
        if tokens := theirs(byte_level, pre):
            header = read_header(byte_level)
            tokenizer = ours(replace(header, metadata={**header.metadata, PRE: pre}))
            wrong += compare_drawn(f"{byte_level.stem}, read as {pre}", tokenizer, tokens)
        else:
            print(f"{pre}: llama.cpp does not know it")
    print(f"{read} vocabularies, {wrong} texts with other tokens")
    return 2 if not read else 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
