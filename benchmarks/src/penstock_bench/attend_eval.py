"""`penstock eval --attend`: loss of a model whose decode steps read selected tokens.

Each piece of the text is prefilled except for its last tokens, which are decoded one by one. For
each number of selected tokens the steps are compared with full attention, and so is a window of as
many bytes. Optionally, selection is measured in each layer alone; the worst layers are then left
full, one after the other, until the smallest number of tokens reaches the goal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from penstock.errors import SettingError
from penstock.models.layer_seams import attach
from penstock.models.loading import load
from penstock.plurals import counted
from penstock_bench.attend_text import KEPT_TOKENS, STEP_TOKENS, AttendText, mean
from penstock_bench.eval_load import EvalLoad
from penstock_bench.eval_texts import EvalPiece, pieces
from penstock_bench.evaluate import Estimate, Progress
from penstock_bench.forcing import Forced
from penstock_bench.report import Line, Notify, Report

CLAIM = "Steps that read a choice of a text expect what those expect that read all"
RIVAL = "window"
MOST_KL = 0.02
"""Goal: KL divergence of the next token from full attention, in nats."""
MOST_OF_WINDOW = {False: 0.25, True: 0.1}
"""Goal: KL as a share of the KL of a window of as many bytes, by `attend_rest`."""
MOST_PERPLEXITY = 1.0
"""Goal: change of perplexity against full attention, in percent."""
MOST_WHOLE = 4
"""Inverse of the largest share of layers that may be left full."""
Proposal = tuple[int, tuple[int, ...], float]
"""Tokens to read, layers left full, and the resulting KL."""


class ReadText(Protocol):
    """Prefilled text whose decode steps read selected tokens."""

    def kl(self, tokens: int, whole: Collection[int] = ()) -> float:
        """Return the mean KL of steps that read `tokens` tokens."""


@dataclass(frozen=True, slots=True)
class ChoiceOutcome:
    """Selective attention and a window of as many bytes, measured on the same tokens."""

    choice: Forced
    window: Forced
    window_tokens: int
    """Window size for the longest piece, in tokens."""

    def figures(self, whole: Forced) -> dict[str, Estimate]:
        """Return the figures by name; perplexity as change against full attention, in percent."""
        return {
            "kl": Estimate.of(self.choice.kl),
            "window_kl": Estimate.of(self.window.kl),
            "kl_over_window": over(self.choice.kl, self.window.kl),
            "perplexity": change(self.choice.losses, whole.losses),
            "window_perplexity": change(self.window.losses, whole.losses),
        }


def over(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Estimate:
    """Return the ratio of two means over the same tokens, with its standard error."""
    below = mean(theirs)
    ratio = mean(ours) / below if below else math.nan
    rest = Estimate.of(_paired(ours, theirs, ratio))
    return Estimate(rest.n, ratio, rest.standard_error / below if below else math.nan)


def change(ours: Sequence[Sequence[float]], whole: Sequence[Sequence[float]]) -> Estimate:
    """Return the change of perplexity in percent, from the losses of each token."""
    more = Estimate.of(_paired(ours, whole, 1.0))
    ratio = math.exp(more.mean)
    return Estimate(more.n, 100 * (ratio - 1), 100 * ratio * more.standard_error)


def _paired(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], times: float
) -> list[list[float]]:
    return [
        [a - times * b for a, b in zip(ours_group, theirs_group, strict=True)]
        for ours_group, theirs_group in zip(ours, theirs, strict=True)
    ]


def measure(
    load_: EvalLoad,
    attend: Sequence[int],
    notify: Notify = lambda *_: None,
    *,
    by_layer: bool = False,
) -> Report:
    """Measure all numbers of tokens, and propose settings.

    Args:
        load_: the model and its text.
        attend: numbers of tokens that a step reads.
        notify: takes a description, the completed steps, and the total.
        by_layer: also measure each layer alone, and leave the worst ones full if that helps.

    Raises:
        SettingError: no layer supports selection, or the pieces of the text are too short.
    """
    sizes = sorted(set(attend))
    model, tokenizer = load(load_.model)
    attach(model)
    text = pieces(tokenizer, load_)
    _check(text, sizes[-1])
    progress = Progress(notify, len(text) * (1 + 2 * len(sizes)))
    read = AttendText(model, text, progress.step, rest=load_.attend_rest)
    layers = read.layers
    if not layers:
        raise SettingError(
            "--attend: this model has no full-attention layer, so no layer can select tokens"
        )
    progress.of += len(text) * len(layers) * by_layer
    outcomes = {
        size: ChoiceOutcome(read.choice(size), read.window(size), max(read.window_tokens(size)))
        for size in sizes
    }
    alone = {
        layer: read.kl(sizes[0], set(layers) - {layer}) for layer in (layers if by_layer else ())
    }
    kl = {size: mean(outcome.choice.kl) for size, outcome in outcomes.items()}
    return report(load_, text, read.whole, outcomes, alone, proposal(read, kl, alone))


def _check(text: Sequence[EvalPiece], attend: int) -> None:
    """Raise SettingError if a step would read a whole piece."""
    shortest = min(len(piece.tokens) for piece in text)
    if shortest - STEP_TOKENS - 1 <= attend:
        raise SettingError(
            f"--attend {attend}: a piece of the text has "
            f"{counted(shortest, 'token')}, of which the last "
            f"{STEP_TOKENS} are given one by one; make pieces longer (--piece, --text-tokens), "
            f"{counted(attend + STEP_TOKENS + 2, 'token')} at least"
        )


def proposal(read: ReadText, by_size: dict[int, float], alone: dict[int, float]) -> Proposal | None:
    """Return the fewest tokens that reach the goal, the layers left full, and the KL.

    None if no number of tokens does, even with one layer in `MOST_WHOLE` left full.
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
    text: Sequence[EvalPiece],
    whole: Forced,
    outcomes: dict[int, ChoiceOutcome],
    alone: dict[int, float],
    proposed: Proposal | None,
) -> Report:
    """Format the figures and the proposed flags."""
    by_size = {size: outcome.figures(whole) for size, outcome in outcomes.items()}
    perplexity = math.exp(mean(whole.losses))
    lines = [Line("all tokens read: perplexity", f"{perplexity:.2f}", "")]
    for size, figures in by_size.items():
        max_ratio = MOST_OF_WINDOW[load_.attend_rest]
        lines += _lines(size, outcomes[size].window_tokens, figures, max_ratio)
    lines += [
        Line(f"layer {layer} alone reads {min(by_size):,}: KL", f"{kl:.4f}", "")
        for layer, kl in alone.items()
    ]
    flags = _flags(proposed, rest=load_.attend_rest)
    if proposed is not None:
        lines.append(Line(f"proposed: {flags}: KL", f"{proposed[2]:.4f}", "", _at_most(), True))
    named = {str(size): _named(figures) for size, figures in by_size.items()}
    return Report(
        name="eval_attend",
        claim=CLAIM,
        rival=RIVAL,
        penstock={
            "kl": {size: figures["kl"]["mean"] for size, figures in named.items()},
            "figures": named,
            "perplexity_of_all": perplexity,
            "proposed": flags,
        },
        rival_figures={
            "tokens": {str(size): outcome.window_tokens for size, outcome in outcomes.items()},
            "keep": KEPT_TOKENS,
            "kl": {size: figures["window_kl"]["mean"] for size, figures in named.items()},
        },
        ratio={},
        goal={
            "kl": MOST_KL,
            "kl_over_window": MOST_OF_WINDOW[load_.attend_rest],
            "perplexity_percent": MOST_PERPLEXITY,
            "least_tokens": min(by_size),
        },
        met=proposed is not None,
        lines=lines,
        raw={
            "kl_of_one_layer": {str(layer): kl for layer, kl in alone.items()},
            "pieces": [len(piece.tokens) for piece in text],
            "step_tokens": STEP_TOKENS,
            "losses_of_all": _means(whole.losses),
            "by_piece": {str(size): _by_piece(outcome) for size, outcome in outcomes.items()},
            "load": load_.model_dump(mode="json", exclude={"settings", "texts", "model"}),
        },
        dtype="float32",
    )


def _lines(
    size: int, window: int, figures: dict[str, Estimate], max_ratio: float
) -> Iterator[Line]:
    kl, ratio, perplexity = (figures[name] for name in ("kl", "kl_over_window", "perplexity"))
    name = f"{counted(size, 'token')} read"
    theirs = f"{_plain(figures['window_kl'], '.4f')} ({counted(window, 'token')})"
    yield Line(f"{name}: KL", _plain(kl, ".4f"), theirs, _at_most(), kl.mean <= MOST_KL)
    met = ratio.mean <= max_ratio
    yield Line(f"{name}: KL over the window's", _plain(ratio, ".3f"), "1", f"<= {max_ratio}", met)
    theirs = _plain(figures["window_perplexity"], ".2f") + " %"
    goal, met = f"+-{MOST_PERPLEXITY} %", abs(perplexity.mean) <= MOST_PERPLEXITY
    yield Line(f"{name}: perplexity", _plain(perplexity, "+.2f") + " %", theirs, goal, met)


def _at_most() -> str:
    return f"<= {MOST_KL}"


def _flags(proposed: Proposal | None, *, rest: bool) -> str:
    if proposed is None:
        return ""
    size, whole, _ = proposed
    layers = f" --attend-full-layers {','.join(map(str, whole))}" if whole else ""
    return f"--attend-tokens {size}{' --attend-rest' if rest else ''}{layers}"


def _named(figures: dict[str, Estimate]) -> dict[str, dict[str, Any]]:
    return {name: asdict(estimate) for name, estimate in figures.items()}


def _by_piece(outcome: ChoiceOutcome) -> dict[str, list[float]]:
    return {
        f"{side}_{what}": _means(groups)
        for side, forced in (("choice", outcome.choice), ("window", outcome.window))
        for what, groups in (("kl", forced.kl), ("losses", forced.losses), ("same", forced.same))
    }


def _means(groups: Sequence[Sequence[float]]) -> list[float]:
    return [round(mean([group]), 6) for group in groups]


def _plain(estimate: Estimate, form: str) -> str:
    return f"{estimate.mean:{form}}+-{estimate.standard_error:{form.lstrip('+')}}"
