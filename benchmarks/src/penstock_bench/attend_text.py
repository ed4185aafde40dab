"""Pieces of a text whose last tokens are given one by one: all are read, a choice, or a window."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from penstock.attention import devices
from penstock.attention.selection.key_index import KeyIndex
from penstock.caches import SelectiveKVCache, make_kv_cache
from penstock.engine.model.runner import Runner
from penstock.kv.numpy_arrays import Floats
from penstock.kv.tails import LayerShape, token_bytes
from penstock.plurals import counted
from penstock_bench.eval_texts import EvalPiece
from penstock_bench.forcing import Forced, PieceFigures, log_probabilities

STEP_TOKENS = 64
"""Tokens of each piece that are given one by one; of each the next token is known."""
KEPT_TOKENS = 64
"""First tokens that a window keeps: without them it loses ten times as much."""
PROMPT_TOKENS = 512
"""Tokens of a prompt that are read together."""


class AttendText:
    """The pieces of a text as a model has read them, and its predictions of their last tokens.

    Args:
        model: it must be known to `penstock.attach`.
        text: pieces, all longer than `STEP_TOKENS` + 1.
        step: called with a description before each piece that is read or measured.
        rest: whether steps read the other tokens from the index.
    """

    def __init__(
        self,
        model: Any,
        text: Sequence[EvalPiece],
        step: Callable[[str], None] = lambda _: None,
        *,
        rest: bool = False,
    ) -> None:
        self._model = model
        self._rest = rest
        self._text = text
        self._step = step
        self._read: list[list[Any]] = []
        self._all: list[Floats] = []
        most = max(len(piece.tokens) for piece in text)
        self._shapes = Runner(model, devices.current(), max_kv_size=most, keep=0).shapes
        for piece in text:
            step("reading all")
            self._read.append(self._prompt(piece, self._caches(most)))
            self._all.append(self._steps(piece, copy.deepcopy(self._read[-1])))
        self.whole = self._figures(self._all)
        """Figures of steps that read all tokens."""

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that can choose."""
        caches = self._read[0]
        return [n for n, cache in enumerate(caches) if isinstance(cache, SelectiveKVCache)]

    def choice(self, tokens: int, whole: Collection[int] = ()) -> Forced:
        """Return figures of steps that read so many tokens in each layer.

        Args:
            tokens: number of tokens that are read.
            whole: numbers of the layers that read all.
        """
        logs = []
        for piece, read in zip(self._text, self._read, strict=True):
            self._step(f"{counted(tokens, 'token')} read")
            caches = copy.deepcopy(read)
            for layer in self.layers:
                if layer not in whole:
                    caches[layer].attend_tokens = tokens
            logs.append(self._steps(piece, caches))
        return self._figures(logs)

    def kl(self, tokens: int, whole: Collection[int] = ()) -> float:
        """Return the mean KL of `choice`, from steps that read all."""
        return mean(self.choice(tokens, whole).kl)

    def window(self, tokens: int) -> Forced:
        """Return figures of a window of as many bytes as a choice of so many tokens, and its index.

        The whole piece is read in the window, which keeps its first tokens.
        """
        logs = []
        for piece, size in zip(self._text, self.window_tokens(tokens), strict=True):
            self._step(f"window of {counted(size, 'token')}")
            caches = make_kv_cache(self._model, size, KEPT_TOKENS)
            logs.append(self._steps(piece, self._prompt(piece, caches)))
        return self._figures(logs)

    def window_tokens(self, tokens: int) -> list[int]:
        """Return the tokens of such a window, for each piece."""
        return [
            window_tokens(self._shapes, self.layers, tokens, len(piece.tokens), rest=self._rest)
            for piece in self._text
        ]

    def _caches(self, attend: int) -> list[Any]:
        return make_kv_cache(self._model, attend, attend=attend, attend_rest=self._rest)

    def _prompt(self, piece: EvalPiece, caches: list[Any]) -> list[Any]:
        """Return caches that have read a piece but for the tokens of steps."""
        prompt = list(piece.tokens[: -STEP_TOKENS - 1])
        for start in range(0, len(prompt), PROMPT_TOKENS):
            self._model(mx.array([prompt[start : start + PROMPT_TOKENS]]), cache=caches)
            mx.eval([cache.state for cache in caches])  # the head is not computed
        return caches

    def _steps(self, piece: EvalPiece, caches: list[Any]) -> Floats:
        """Return log-probabilities of the token behind each that is given."""
        steps = (
            self._model(mx.array([[token]]), cache=caches)[0]
            for token in piece.tokens[-STEP_TOKENS - 1 : -1]
        )
        return np.concatenate([log_probabilities(logits) for logits in steps])

    def _figures(self, logs: Sequence[Floats]) -> Forced:
        forced = Forced()
        for piece, ours, whole in zip(self._text, logs, self._all, strict=True):
            figures = PieceFigures()
            figures.note(ours, whole, np.exp(whole), piece.tokens[-STEP_TOKENS:])
            forced.add(figures, (0, 0))
        return forced


def window_tokens(
    shapes: Sequence[LayerShape],
    layers: Sequence[int],
    attend: int,
    length: int,
    *,
    rest: bool = False,
) -> int:
    """Return the tokens of a window that takes the bytes of a choice and of its index.

    Args:
        shapes: shape of one token in each layer.
        layers: numbers of the layers that choose.
        attend: tokens that a step reads.
        length: tokens that have an index.
        rest: whether it has values, too.
    """
    index = KeyIndex(frozenset(layers), rest).token_bytes(shapes)
    return attend + length * index // token_bytes([shapes[layer] for layer in layers])


def mean(groups: Sequence[Sequence[float]]) -> float:
    """Return the mean of all values of some groups."""
    values = [value for group in groups for value in group]
    return math.fsum(values) / len(values)
