"""Text around the names and arguments of calls, for grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple


class ParameterTags(NamedTuple):
    """Text around one argument, in formats with a tag for each.

    before NAME as_text TEXT gap end after     before NAME as_json JSON gap end after
    """

    before: str
    as_text: str
    as_json: str
    """Text before a JSON value; `TYPE` stands for its JSON type."""
    end: str
    """Text that ends a value and occurs in no value."""
    gap: str = ""
    """Optional text before the end."""
    after: str = ""
    separator: str = ""
    """Text between two arguments."""
    notation: Literal["tags", "json", "gemma"] = "tags"
    """Notation of strings: verbatim, JSON, or verbatim also within JSON (Gemma)."""
    keys: str = r'[^\s<>"]{1,128}'
    """Regular expression of valid argument names."""
    outside: Collection[str] = ()
    """Other texts that no value contains."""


class CallShape(NamedTuple):
    """Text around the parts of calls.

    opening (before NAME between ARGUMENTS after) separator (before ...) closing
    """

    opening: str
    """Mark that begins calls and occurs nowhere else."""
    before: str
    between: str
    after: str
    closing: str = ""
    separator: str | None = ""
    """Text between two calls; None if each opening has only one call."""
    json: bool = False
    """Whether the surrounding text is JSON, with optional whitespace."""
    tags: ParameterTags | None = None
    """Text around each argument; None if the arguments are one JSON object."""
    names: str = ".+"
    """Regular expression of valid tool names."""


def json_shape(opening: str, closing: str) -> CallShape:
    """Return the shape of JSON calls between marks.

    >>> json_shape("<TOOLCALL>[", "]</TOOLCALL>").separator, json_shape("<a>", "</a>").separator
    (', ', None)
    """
    listed = ", " if opening.endswith("[") else None
    marks = ('{"name": "', '", "arguments": ', "}")
    return CallShape(opening, *marks, closing, separator=listed, json=True)


class Marks(NamedTuple):
    special: Mapping[str, int]
    ends: Collection[int] = ()

    def of(self, text: str) -> str:
        r"""Return a text in Lark syntax: strings, and special tokens by id.

        >>> Marks({"<|call|>": 7}).of("<|call|>a\n")
        '<[7]> "a\\n"'
        """
        return " ".join(self._parts(text)) or '""'

    def token(self, text: str) -> int | None:
        return next((self.special[mark] for mark in self.special if text.startswith(mark)), None)

    def others(self, *excluded: int | None) -> str | None:
        """Return a Lark expression for all special tokens except `ends` and `excluded`."""
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
    ends = {token for token in tokenizer.eos_token_ids if token is not None}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        added = backend.get_added_tokens_decoder().items()
        return Marks({token.content: number for number, token in added if token.special}, ends)
    vocabulary = tokenizer.get_vocab()
    special = getattr(tokenizer, "all_special_tokens", ())
    return Marks({text: vocabulary[text] for text in special if text in vocabulary}, ends)
