"""Agreement of native weights with float32 on beginnings of real text.

Both read the same tokens: the beginning of a paragraph, and float32's greedy continuation. The
first different token is where a greedy text of native weights would diverge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
import numpy as np

from penstock.errors import SettingError
from penstock.models.mlx_lm import encode
from penstock_bench.long_tasks import PARAGRAPH
from penstock_bench.report import Line, Notify
from penstock_bench.rivals import make_caches
from penstock_bench.serve_words import MODULES

ANSWER_TOKENS = 4
"""Greedy tokens after each prompt."""
NOISE = 0.01
"""Goal: largest lead of float32's token at the first difference, as a share of its logit.

Half precision rounds to 2^-11, and errors accumulate over thirty layers.
"""


@dataclass(frozen=True, slots=True)
class TextRun:
    """One prompt and its greedy continuation, read by both sides."""

    tokens: list[int]
    prompt_tokens: int
    same: list[bool]
    """Whether the most likely next token is the same, after each token but the last."""
    leads: list[float]
    """Lead of float32's most likely token over the other side's; 0 where both agree."""
    logits: list[float]
    """Float32's logits of its most likely tokens."""
    noise: float
    """Root mean square difference of the logits."""

    @property
    def difference(self) -> int | None:
        """Return the index of the first difference in the greedy text, or None."""
        places = range(self.prompt_tokens - 1, len(self.same))
        return next((place for place in places if not self.same[place]), None)

    def share(self, place: int) -> float:
        """Return the lead at a place as a share of the logit."""
        logit = abs(self.logits[place])
        return self.leads[place] / logit if logit else 0.0


def beginnings(tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    """Return the first tokens of `count` paragraphs from Python's library sources.

    Raises:
        SettingError: there are fewer paragraphs.
    """
    prompts = list(islice(_beginnings(tokenizer, tokens), count))
    if len(prompts) < count:
        raise SettingError(f"--texts {count}: only {len(prompts)} texts are at hand")
    return prompts


def _beginnings(tokenizer: Any, tokens: int) -> Iterator[list[int]]:
    known = set()
    for module in MODULES:
        for part in PARAGRAPH.split(Path(str(module.__file__)).read_text()):
            begun = tuple(encode(tokenizer, part.strip())[:tokens])
            if len(begun) == tokens and begun not in known:
                known.add(begun)
                yield list(begun)


def greedy(model: Any, prompt: Sequence[int], steps: int = ANSWER_TOKENS) -> list[int]:
    """Return a prompt with its greedy continuation."""
    caches, tokens = make_caches(model).caches, list(prompt)
    step = tokens
    for _ in range(steps):
        logits = model(mx.array(step)[None], cache=caches)[0, -1]
        step = [int(np.argmax(np.array(logits.astype(mx.float32))))]
        tokens = [*tokens, *step]
    return tokens


def next_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return the logits after each token but the last: float32, (tokens, vocabulary)."""
    logits = model(mx.array(list(tokens[:-1]))[None], cache=make_caches(model).caches)
    return np.array(logits[0].astype(mx.float32))


def read_both(
    float32: Any, native: Any, prompts: Sequence[Sequence[int]], notify: Notify
) -> list[TextRun]:
    """Read each prompt and float32's greedy continuation with both models."""
    runs: list[TextRun] = []
    for number, prompt in enumerate(prompts):
        notify("reading texts", number, len(prompts))
        tokens = greedy(float32, prompt)
        runs.append(
            compare_logits(
                tokens, len(prompt), next_logits(float32, tokens), next_logits(native, tokens)
            )
        )
    return runs


def compare_logits(
    tokens: Sequence[int], prompt_tokens: int, float32: np.ndarray, native: np.ndarray
) -> TextRun:
    """Return where the most likely tokens differ. Logits: (tokens, vocabulary) each."""
    rows, best, other = np.arange(len(float32)), float32.argmax(axis=-1), native.argmax(axis=-1)
    logits = float32[rows, best]
    return TextRun(
        tokens=list(tokens),
        prompt_tokens=prompt_tokens,
        same=(best == other).tolist(),
        leads=[round(float(lead), 5) for lead in logits - float32[rows, other]],
        logits=[round(float(logit), 3) for logit in logits],
        noise=round(float(np.sqrt(np.mean(np.square(native - float32)))), 5),
    )


def figures(runs: Sequence[TextRun]) -> dict[str, float]:
    """Return counts of texts and tokens, the largest leads where they differ, and the noise."""
    first = [(run, run.difference) for run in runs]
    shares = [run.share(place) for run, place in first if place is not None]
    leads = [run.leads[place] for run, place in first if place is not None]
    return {
        "texts": len(runs),
        "same_texts": len(runs) - len(leads),
        "lead_at_difference": max(leads, default=0.0),
        "share_at_difference": round(max(shares, default=0.0), 5),
        "tokens": sum(len(run.same) for run in runs),
        "same_tokens": sum(sum(run.same) for run in runs),
        "largest_lead": max(lead for run in runs for lead in run.leads),
        "noise": round(fmean(run.noise for run in runs), 5),
    }


def lines(runs: Sequence[TextRun]) -> list[Line]:
    """Return the lines of the table."""
    counts = figures(runs)
    share = counts["share_at_difference"]
    lead = f"{counts['lead_at_difference']:.3f}", f"{share:.2%} of the logit"
    return [
        Line("same greedy text", f"{counts['same_texts']:.0f}", f"of {counts['texts']:.0f}"),
        Line("lead where it differs first", *lead, f"<= {NOISE:.0%}", share <= NOISE),
        Line("same likeliest token", f"{counts['same_tokens']:.0f}", f"of {counts['tokens']:.0f}"),
        Line("largest lead of all tokens", f"{counts['largest_lead']:.3f}", ""),
        Line("how far logits are apart", f"{counts['noise']:.3f}", ""),
    ]
