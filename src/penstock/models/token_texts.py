"""Compact list of a vocabulary's texts, for mlx-lm's streaming detokenizers.

They keep a Python object for every token: 16 MiB for 262,144 tokens, 3 MiB as one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, AnyStr, overload

import numpy as np


class TokenTexts(Sequence[AnyStr]):
    """Immutable list of `str` or `bytes`, stored as one `bytes` and the end of each text."""

    def __init__(self, texts: Sequence[AnyStr]) -> None:
        """Take texts that are all `str` or all `bytes`; raise TypeError otherwise."""
        if not all(isinstance(text, str) for text in texts):
            self._decodes, self._all = False, b"".join(texts)  # type: ignore[arg-type]
            lengths = map(len, texts)
        else:
            encoded = [_encoded(text) for text in texts]  # type: ignore[arg-type]
            self._decodes, self._all = True, b"".join(encoded)
            lengths = map(len, encoded)
        ends = accumulate(lengths, initial=0)
        self._ends = np.fromiter(ends, np.uint32, len(texts) + 1)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> AnyStr: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[AnyStr]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        text = self._all[int(self._ends[place]) : int(self._ends[place + 1])]
        return text.decode(errors="surrogatepass") if self._decodes else text


def compact(detokenizer: Any) -> None:
    """Replace the texts that a streaming detokenizer of mlx-lm holds, if it holds any, in place."""
    texts = getattr(detokenizer, "tokenmap", None)
    if isinstance(texts, list) and all(isinstance(text, str | bytes) for text in texts):
        detokenizer.tokenmap = TokenTexts(texts)


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
