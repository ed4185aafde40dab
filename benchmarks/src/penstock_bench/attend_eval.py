"""`penstock eval --attend`: the loss of a model while a step reads a choice of a text.

Each piece of the text is read whole but for its last tokens, which are given one by one. Their
distributions are compared with the distributions of steps that read all tokens: for each number of
tokens, and for each layer that alone chooses the fewest. The worst layers are left whole, one after
the other, until the smallest number of tokens is enough.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from penstock.caches import SelectiveKVCache, make_kv_cache
from penstock.errors import SettingError
from penstock.kv.sign_products import Floats
from penstock.models.layer_seams import attach
from penstock.models.mlx_lm import load
from penstock_bench.eval_load import EvalLoad
from penstock_bench.eval_texts import EvalPiece, pieces
from penstock_bench.forcing import log_probabilities
from penstock_bench.report import Line, Notify, Report

CLAIM = "Steps that read a choice of a text expect what those expect that read all"
STEP_TOKENS = 32
"""Last tokens of each piece, which are given one by one."""
MOST_KL = 0.02
"""Goal: KL of the next token from full attention, in nats."""
MOST_WHOLE = 4
"""One layer of so many may be left whole, at most."""
PROMPT_TOKENS = 512
"""Tokens of a prompt that are read together."""


class Text:
    """The pieces of a text as a model has read them, and its predictions of their last tokens."""

    def __init__(self, model: Any, text: Sequence[EvalPiece]) -> None:
        self._model = model
        self._read = [(piece, self._prompt(piece)) for piece in text]
        everything = max(len(piece.tokens) for piece in text)
        self._all = [self._steps(piece, read, everything, ()) for piece, read in self._read]

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that can choose."""
        caches = self._read[0][1]
        return [n for n, cache in enumerate(caches) if isinstance(cache, SelectiveKVCache)]

    def kl(self, tokens: int, whole: Collection[int] = ()) -> float:
        """Return the mean KL of steps that read so many tokens, from steps that read all.

        Args:
            tokens: number of tokens that are read in each layer.
            whole: numbers of the layers that read all.
        """
        divergences = []
        for (piece, read), logs in zip(self._read, self._all, strict=True):
            chosen = self._steps(piece, read, tokens, whole)
            divergences += (np.exp(logs) * (logs - chosen)).sum(axis=-1).tolist()
        return math.fsum(divergences) / len(divergences)

    def _prompt(self, piece: EvalPiece) -> list[Any]:
        caches = make_kv_cache(self._model, max_kv_size=len(piece.tokens), attend=len(piece.tokens))
        prompt = list(piece.tokens[:-STEP_TOKENS])
        for start in range(0, len(prompt), PROMPT_TOKENS):
            logits = self._model(mx.array([prompt[start : start + PROMPT_TOKENS]]), cache=caches)
            mx.eval(logits)
        return caches

    def _steps(
        self, piece: EvalPiece, read: Sequence[Any], tokens: int, whole: Collection[int]
    ) -> Floats:
        """Return log-probabilities of the token behind each of the last ones."""
        caches = copy.deepcopy(read)
        for layer in self.layers:
            if layer not in whole:
                caches[layer].attend_tokens = tokens
        steps = (
            self._model(mx.array([[token]]), cache=caches)[0]
            for token in piece.tokens[-STEP_TOKENS:]
        )
        return np.concatenate([log_probabilities(logits) for logits in steps])


def measure(load_: EvalLoad, attend: Sequence[int], notify: Notify = lambda *_: None) -> Report:
    """Measure all numbers of tokens and all layers, and propose settings.

    Raises:
        SettingError: no layer can choose, or the pieces of the text are too short.
    """
    sizes = sorted(set(attend))
    model, tokenizer = load(load_.model)
    attach(model)
    text = pieces(tokenizer, load_)
    shortest = min(len(piece.tokens) for piece in text)
    if shortest - STEP_TOKENS <= sizes[-1]:
        raise SettingError(
            f"--attend {sizes[-1]}: a piece of the text has {shortest:,} tokens, of which the last "
            f"{STEP_TOKENS} are given one by one; make pieces longer (--piece, --text-tokens), "
            f"{sizes[-1] + STEP_TOKENS + 1:,} tokens at least"
        )
    read = Text(model, text)
    layers = read.layers
    if not layers:
        raise SettingError("--attend: no layer of this model sees all tokens, so none can choose")
    steps = len(sizes) + len(layers)
    by_size, alone = {}, {}
    for number, size in enumerate(sizes):
        notify(f"{size:,} tokens read", number, steps)
        by_size[size] = read.kl(size)
    for number, layer in enumerate(layers):
        notify(f"layer {layer} chooses", len(sizes) + number, steps)
        alone[layer] = read.kl(sizes[0], set(layers) - {layer})
    return report(load_, by_size, alone, proposal(read, by_size, alone))


def proposal(
    read: Text, by_size: dict[int, float], alone: dict[int, float]
) -> tuple[int, tuple[int, ...], float] | None:
    """Return the fewest tokens that are enough, with layers left whole, and their KL.

    None if no number is enough, also with one layer in `MOST_WHOLE` left whole.
    """
    worst = sorted(alone, key=lambda layer: -alone[layer])
    for size, kl in by_size.items():
        whole: tuple[int, ...] = ()
        while kl > MOST_KL and len(whole) < len(worst) // MOST_WHOLE:
            whole = tuple(sorted(worst[: len(whole) + 1]))
            kl = read.kl(size, whole)
        if kl <= MOST_KL:
            return size, whole, kl
    return None


def report(
    load_: EvalLoad,
    by_size: dict[int, float],
    alone: dict[int, float],
    proposed: tuple[int, tuple[int, ...], float] | None,
) -> Report:
    """Lay out the figures, and the flags that they propose."""
    least = min(by_size)
    goal = f"<= {MOST_KL}"
    lines = [
        Line(f"{size:,} tokens read: KL", f"{kl:.4f}", "0", goal, kl <= MOST_KL)
        for size, kl in by_size.items()
    ]
    lines += [
        Line(f"layer {layer} alone reads {least:,}: KL", f"{kl:.4f}", "0")
        for layer, kl in alone.items()
    ]
    flags = ""
    if proposed is not None:
        size, whole, kl = proposed
        flags = f"--attend-tokens {size}"
        if whole:
            flags += f" --attend-full-layers {','.join(map(str, whole))}"
        lines.append(Line(f"proposed: {flags}: KL", f"{kl:.4f}", "0", goal, True))
    return Report(
        name="eval_attend",
        claim=CLAIM,
        rival="all tokens",
        penstock={"kl": {str(size): kl for size, kl in by_size.items()}, "proposed": flags},
        rival_figures={},
        ratio={},
        goal={"kl": MOST_KL, "least_tokens": least},
        met=proposed is not None,
        lines=lines,
        raw={
            "kl_of_one_layer": {str(layer): kl for layer, kl in alone.items()},
            "load": load_.model_dump(mode="json", exclude={"settings", "texts", "model"}),
        },
        dtype="float32",
    )
