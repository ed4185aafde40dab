"""Tokenization for encoders: special tokens, pairs of texts, truncation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tokenizers import Tokenizer

from penstock.encoders.bert import EncoderRow
from penstock.errors import ModelError
from penstock.models.source import first_line
from penstock.regular_files import check_regular

Truncation: TypeAlias = Literal["start", "end"]
"""The end of a text from which tokens are dropped if it is too long."""
Check: TypeAlias = Callable[[], None]
"""Called between pieces of a long text; raises if the text is no longer needed."""

SAMPLE = "a"
"""Text that shows which special tokens stand before and after a text."""
PIECE_CHARACTERS = 65_536
"""Longest text that is tokenized at once; a longer one is split at spaces."""


class TextTooLong(Exception):
    """A text exceeds the encoder's maximum length, and truncation was not allowed."""

    def __init__(self, tokens: int, most_tokens: int) -> None:
        super().__init__(f"{tokens} tokens are more than {most_tokens}")
        self.tokens = tokens
        self.most_tokens = most_tokens


@dataclass(frozen=True, slots=True)
class TokenizedText:
    row: EncoderRow
    tokens: int
    """Number of tokens before truncation, special tokens included."""

    @property
    def truncated(self) -> bool:
        return self.tokens > len(self.row)


class EncoderTokenizer:
    """The tokenizer of an encoder's folder. Thread-safe."""

    def __init__(self, folder: Path, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        file = folder / "tokenizer.json"
        try:
            check_regular(file)
            self._tokenizer: Any = Tokenizer.from_file(str(file))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            alone = self._tokenizer.encode(SAMPLE)
            bare = self._tokenizer.encode(SAMPLE, add_special_tokens=False).ids
            pair = self._tokenizer.encode("", "")
        except FileNotFoundError as error:
            raise ModelError(f"{folder} has no tokenizer.json") from error
        # A boundary: the tokenizers library raises bare exceptions of its own.
        except Exception as error:
            raise ModelError(f"cannot read {file}: {first_line(error)}") from error
        before = alone.special_tokens_mask.index(0) if 0 in alone.special_tokens_mask else 1
        self._before = alone.ids[:before]
        self._after = alone.ids[before + len(bare) :]
        self._between = pair.ids[len(self._before) : len(pair.ids) - len(self._after)]
        self._second = pair.type_ids.index(1) if 1 in pair.type_ids else None

    def text(self, text: str, truncation: Truncation | None, check: Check) -> TokenizedText:
        """Tokenize a text. Raises TextTooLong if it is too long and `truncation` is None."""
        special = len(self._before) + len(self._after)
        read = self._read(text, self.most_tokens - special, truncation, check, special)
        row = [*self._before, *read.ids, *self._after]
        return TokenizedText(EncoderRow(row), read.tokens + special)

    def given(self, ids: Sequence[int], truncation: Truncation | None) -> TokenizedText:
        """Wrap token ids of a client; adds no special tokens. Raises TextTooLong."""
        read = _Read(self.most_tokens, truncation)
        read.add(ids)
        self._check_length(read, 0, truncation)
        return TokenizedText(EncoderRow(read.ids), read.tokens)

    def query(self, text: str, check: Check) -> list[int]:
        """Tokenize a query once for several calls of `pair`. Raises TextTooLong."""
        special = self._pair_tokens
        return self._read(text, self.most_tokens - special - 1, None, check, special).ids

    def pair(
        self, query: Sequence[int], text: str, truncation: Truncation | None, check: Check
    ) -> TokenizedText:
        """Tokenize a query's pair with a text; only the text is truncated. Raises TextTooLong."""
        before = self._pair_tokens + len(query)
        read = self._read(text, self.most_tokens - before, truncation, check, before)
        row = [*self._before, *query, *self._between, *read.ids, *self._after]
        first = None if self._second is None else self._second + len(query)
        return TokenizedText(EncoderRow(row, first), read.tokens + before)

    @property
    def _pair_tokens(self) -> int:
        return len(self._before) + len(self._between) + len(self._after)

    def _read(
        self, text: str, most: int, truncation: Truncation | None, check: Check, beside: int
    ) -> _Read:
        read = _Read(most, truncation)
        while True:
            check()
            end = len(text)
            if end > PIECE_CHARACTERS:
                blank = text.rfind(" ", 1, PIECE_CHARACTERS)
                end = PIECE_CHARACTERS if blank < 0 else blank
            read.add(self._tokenizer.encode(text[:end], add_special_tokens=False).ids)
            text = text[end:]
            if not text:
                self._check_length(read, beside, truncation)
                return read

    def _check_length(self, read: _Read, beside: int, truncation: Truncation | None) -> None:
        if truncation is None and read.tokens > read.most:
            raise TextTooLong(read.tokens + beside, self.most_tokens)


class _Read:
    """Collects a text's tokens; keeps only those that fit."""

    def __init__(self, most: int, truncation: Truncation | None) -> None:
        self.most = max(0, most)
        self.ids: list[int] = []
        self.tokens = 0
        """Number of tokens of the whole text."""
        self._from_end = truncation == "start"

    def add(self, ids: Sequence[int]) -> None:
        self.tokens += len(ids)
        if self._from_end:
            joined = [*self.ids, *ids]
            self.ids = joined[max(0, len(joined) - self.most) :]
        else:
            self.ids += ids[: self.most - len(self.ids)]
