"""Compact list of a vocabulary's texts, for mlx-lm's streaming detokenizers.

They keep a Python object for every token: 16 MiB for 262,144 tokens, 3 MiB as one piece.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, AnyStr, overload


class TokenTexts(Sequence[AnyStr]):
    """Immutable list of `str` or `bytes`, stored as one `bytes` and the end of each text."""

    def __init__(self, texts: Sequence[AnyStr]) -> None:
        """Take texts that are all `str` or all `bytes`."""
        whole, ends = bytearray(), array("I", [0])
        self._decodes = all(isinstance(text, str) for text in texts)
        for text in texts:
            whole += text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
            ends.append(len(whole))
        self._all, self._ends = bytes(whole), ends

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
        text = self._all[self._ends[place] : self._ends[place + 1]]
        return text.decode(errors="surrogatepass") if self._decodes else text


def compact(detokenizer: Any) -> None:
    """Replace the texts that a streaming detokenizer of mlx-lm holds, if it holds any, in place."""
    texts = getattr(detokenizer, "tokenmap", None)
    if isinstance(texts, list) and {type(text) for text in texts} in ({str}, {bytes}):
        detokenizer.tokenmap = TokenTexts(texts)
