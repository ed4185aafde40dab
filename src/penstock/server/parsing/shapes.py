"""Text around the names and the arguments of calls, which a grammar can keep to."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple


class ParameterTags(NamedTuple):
    """Text around one argument of a call that has tags for each of them.

    before NAME as_text TEXT gap end after     before NAME as_json JSON gap end after
    """

    before: str
    as_text: str
    as_json: str
    """Text in front of JSON, in which `TYPE` stands for the value's JSON type."""
    end: str
    """Text that no value holds."""
    gap: str = ""
    """Text in front of the end, which may be missing."""
    after: str = ""
    separator: str = ""
    """Text between two arguments."""
    notation: Literal["tags", "json", "gemma"] = "tags"
    """Whether texts are written as they are, as JSON, or so within JSON, too, as Gemma's are."""
    keys: str = r'[^\s<>"]{1,128}'
    """Regular expression of the names that can be written."""
    outside: Collection[str] = ()
    """Texts that no text holds, beside its end and that of the call."""


class CallShape(NamedTuple):
    """Text around the parts of calls whose arguments are JSON, or stand between tags.

    opening (before NAME between ARGUMENTS after) separator (before ...) closing
    """

    opening: str
    """Mark that begins calls, and nothing else."""
    before: str
    between: str
    after: str
    closing: str = ""
    separator: str | None = ""
    """Text between two calls behind one opening; None where there can be one alone."""
    json: bool = False
    """Whether the text around is JSON, in which blanks may stand."""
    tags: ParameterTags | None = None
    """Tags of each argument; None where all arguments are one JSON object."""
    names: str = ".+"
    """Regular expression of the names of tools that can be called."""


def json_shape(opening: str, closing: str) -> CallShape:
    """Return the shape of calls that are JSON objects between marks.

    >>> json_shape("<TOOLCALL>[", "]</TOOLCALL>").separator, json_shape("<a>", "</a>").separator
    (', ', None)
    """
    listed = ", " if opening.endswith("[") else None
    marks = ('{"name": "', '", "arguments": ', "}")
    return CallShape(opening, *marks, closing, separator=listed, json=True)


class Marks(NamedTuple):
    """Special tokens of a tokenizer, by their texts."""

    special: Mapping[str, int]
    ends: Collection[int] = ()
    """Those that end an answer."""

    def of(self, text: str) -> str:
        r"""Return a text as Lark has it: strings, and special tokens by their numbers.

        >>> Marks({"<|call|>": 7}).of("<|call|>a\n")
        '<[7]> "a\\n"'
        """
        return " ".join(self._parts(text)) or '""'

    def token(self, text: str) -> int | None:
        """Return the special token that a text begins with; None if it begins with none."""
        return next((self.special[mark] for mark in self.special if text.startswith(mark)), None)

    def others(self, *excluded: int | None) -> str | None:
        """Return an expression for all special tokens but some; None without any."""
        left_out = {*self.ends, *excluded}
        tokens = sorted({*self.special.values()} - left_out)
        return f"<[{','.join(map(str, tokens))}]>" if tokens else None

    def _parts(self, text: str) -> Iterator[str]:
        marks = sorted(self.special, key=len, reverse=True)
        pattern = "|".join(map(re.escape, marks)) or "(?!)"
        for part in re.split(f"({pattern})", text):
            if part:
                token = self.special.get(part)
                yield f"<[{token}]>" if token is not None else json.dumps(part, ensure_ascii=False)


NO_MARKS = Marks({})


def marks_of(tokenizer: Any) -> Marks:
    """Return the special tokens of mlx-lm's wrapper of a tokenizer."""
    ends = {token for token in tokenizer.eos_token_ids if token is not None}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        added = backend.get_added_tokens_decoder().items()
        return Marks({token.content: number for number, token in added if token.special}, ends)
    vocabulary = tokenizer.get_vocab()
    special = getattr(tokenizer, "all_special_tokens", ())
    return Marks({text: vocabulary[text] for text in special if text in vocabulary}, ends)
