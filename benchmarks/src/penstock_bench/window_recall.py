"""`penstock bench recall`: facts known through a bounded window, by position.

The embedded model reads a dialogue through a window of `max_kv_size` tokens with `keep`, and is
asked for every fact. Facts within `keep` or the window must be known, others must not: any other
result is a cache fault.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from penstock import caches
from penstock.models.loading import load
from penstock.models.mlx_lm import render
from penstock.models.template_renderer import TemplateRenderer
from penstock.plurals import counted
from penstock.recall import MODEL_PATH
from penstock_bench import rivals
from penstock_bench.recall import count_tokens, dialogue
from penstock_bench.report import Line, Report

CLAIM = "Facts told within keep or within the window are known, the others are gone"
RIVAL = "mlx-lm"
ANSWER_TOKENS = 8
CHUNK_TOKENS = 256
PLACES = ("keep", "between", "window")
SCALE = 100


@dataclass(frozen=True, slots=True)
class RecallWindow:
    """Window setting. `keep` 0: only the most recent tokens."""

    max_kv_size: int
    keep: int = 0


SETTINGS = (
    RecallWindow(256),
    RecallWindow(256, 128),
    RecallWindow(512),
    RecallWindow(512, 128),
    RecallWindow(512, 256),
    RecallWindow(1_024),
    RecallWindow(1_024, 256),
    RecallWindow(1_024, 512),
    RecallWindow(4_096, 512),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One question: position of its fact, in tokens, and whether it was known."""

    told_at: int
    place: str | None
    """Location of the fact: keep, window or between; None if it spans an edge."""
    known: bool


@dataclass(frozen=True, slots=True)
class RecallLoad:
    """Size of the dialogues, and their questions."""

    dialogues: int = 8
    tokens: int = 2_000
    facts: int = 40
    settings: tuple[RecallWindow, ...] = SETTINGS


@dataclass(frozen=True, slots=True)
class Share:
    """Known of asked, with the standard error of a share."""

    asked: int
    known: int

    @property
    def share(self) -> float | None:
        """Known over asked; None without questions."""
        return self.known / self.asked if self.asked else None

    @property
    def standard_error(self) -> float | None:
        """Standard error of `share`, with half a success and half a failure added for 0 and 1."""
        if not self.asked:
            return None
        share = (self.known + 0.5) / (self.asked + 1)
        return math.sqrt(share * (1 - share) / self.asked)

    def as_object(self) -> dict[str, float | None]:
        """Return the figures by name."""
        return {
            "asked": self.asked,
            "known": self.known,
            "share": self.share,
            "standard_error": self.standard_error,
        }

    def __str__(self) -> str:
        return "-" if self.share is None else f"{SCALE * self.share:.0f} % of {self.asked}"


def place_of(start: int, end: int, read: int, setting: RecallWindow) -> str | None:
    """Return the location of tokens start..end-1 after `read` tokens, 0 the oldest."""
    oldest = read - (setting.max_kv_size - setting.keep)
    if oldest <= setting.keep or start >= oldest:
        return "window"
    if end <= setting.keep:
        return "keep"
    return "between" if start >= setting.keep and end <= oldest else None


def read(model: Any, tokens: Sequence[int], caches: list[Any]) -> mx.array:
    """Prefill tokens in chunks; return the logits (vocabulary,) after the last."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = mx.array(list(tokens[start : start + CHUNK_TOKENS]))[None]
        logits: mx.array = model(chunk, cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
    return logits


def answer(model: Any, tokenizer: Any, prompt: Sequence[int], caches: list[Any]) -> str:
    """Prefill `prompt` and generate greedily up to the end of the answer."""
    logits = read(model, prompt, caches)
    written: list[int] = []
    while len(written) < ANSWER_TOKENS:
        token: int = mx.argmax(logits).tolist()  # type: ignore[assignment]
        if token in tokenizer.eos_token_ids:
            break
        written.append(token)
        logits = read(model, [token], caches)
    return str(tokenizer.decode(written)).strip()


def trials(
    model: Any,
    tokenizer: Any,
    load_: RecallLoad,
    setting: RecallWindow,
    make: Callable[[], list[Any]],
) -> Iterator[Trial]:
    """Prefill every dialogue once through `make`'s caches; ask for each fact on a copy of them."""
    with TemplateRenderer() as renderer:
        for seed in range(load_.dialogues):
            talk = dialogue(seed, tokens=load_.tokens, facts=load_.facts)
            begun = render(tokenizer, talk.messages, answer=False, renderer=renderer)
            caches = make()
            read(model, begun, caches)
            for question in talk.questions:
                whole = render(tokenizer, talk.ask(question), renderer=renderer)
                rest, aside = whole[len(begun) :], copy.deepcopy(caches)
                known = answer(model, tokenizer, rest, aside) == question.answer
                end = question.token + count_tokens(talk.messages[question.message :][:1]) - 1
                last = len(whole) + len(question.answer.split())
                yield Trial(question.token, place_of(question.token, end, last, setting), known)


def makers(model: Any, setting: RecallWindow) -> dict[str, Callable[[], list[Any]]]:
    """Return the constructors of both sides' caches."""
    theirs = rivals.RotatingKVCache
    return {
        "penstock": lambda: caches.make_kv_cache(model, setting.max_kv_size, setting.keep),
        RIVAL: lambda: [theirs(setting.max_kv_size, setting.keep) for _ in model.layers],
    }


def measure(load_: RecallLoad) -> Report:
    """Ask everything in every setting, through our caches and mlx-lm's."""
    model, tokenizer = load(MODEL_PATH)
    answered = {
        setting: {
            side: list(trials(model, tokenizer, load_, setting, make))
            for side, make in makers(model, setting).items()
        }
        for setting in load_.settings
    }
    return report(load_, answered)


def shares(trials: Sequence[Trial]) -> dict[str, Share]:
    """Count by location."""
    placed = {place: [t.known for t in trials if t.place == place] for place in PLACES}
    return {place: Share(len(known), sum(known)) for place, known in placed.items()}


def report(load_: RecallLoad, trials: dict[RecallWindow, dict[str, list[Trial]]]) -> Report:
    """Format the shares and judge them."""
    goal = {"known_within_keep_or_window": 0.95, "known_between": 0.05}
    lines: list[Line] = []
    figures: dict[str, dict[str, Any]] = {"penstock": {}, RIVAL: {}}
    totals = {side: dict.fromkeys(PLACES, Share(0, 0)) for side in figures}
    for setting, sides in trials.items():
        counts = {side: shares(of_side) for side, of_side in sides.items()}
        name = f"{counted(setting.max_kv_size, 'token')}, keep {setting.keep}"
        for side, of_side in counts.items():
            figures[side][name] = {place: s.as_object() for place, s in of_side.items()}
            for place, s in of_side.items():
                before = totals[side][place]
                totals[side][place] = Share(before.asked + s.asked, before.known + s.known)
        for place in PLACES:
            ours = counts["penstock"][place]
            if ours.share is None:
                continue
            above = place != "between"
            bound = goal["known_within_keep_or_window" if above else "known_between"]
            lines.append(
                Line(
                    f"{name}: told in {place}" if place != "between" else f"{name}: in between",
                    str(ours),
                    str(counts[RIVAL][place]),
                    f">= {SCALE * bound:.0f} %" if above else f"<= {SCALE * bound:.0f} %",
                    ours.share >= bound if above else ours.share <= bound,
                )
            )
    return Report(
        name="recall",
        claim=CLAIM,
        rival=RIVAL,
        penstock=figures["penstock"],
        rival_figures=figures[RIVAL],
        ratio={place: _ratio(totals, place) for place in PLACES},
        goal=goal,
        met=all(line.met for line in lines),
        lines=lines,
        raw={
            "load": asdict(load_),
            "columns": ["told_at", "place", "known"],
            "trials": [
                {
                    **asdict(setting),
                    "side": side,
                    "rows": [[t.told_at, t.place, t.known] for t in of_side],
                }
                for setting, sides in trials.items()
                for side, of_side in sides.items()
            ],
        },
        dtype="float32",
    )


def _ratio(totals: dict[str, dict[str, Share]], place: str) -> float | None:
    """Return mlx-lm's share over ours, over all settings."""
    ours, theirs = totals["penstock"][place].share, totals[RIVAL][place].share
    return round(theirs / ours, 3) if ours and theirs is not None else None


def write_page(report_: Report, folder: Path) -> None:
    """Write recall.md and recall.png, the table and the picture, into `folder`."""
    from penstock_bench.recall_picture import draw

    draw(report_, folder / "recall.png")
    rows = [
        f"| {line.figure} | {line.ours} | {line.rival} | {line.goal} | "
        f"{'yes' if line.met else '**no**'} |"
        for line in report_.lines
    ]
    load_ = report_.raw["load"]
    text = PAGE.format(rows="\n".join(rows), chunk=CHUNK_TOKENS, **load_)
    (folder / "recall.md").write_text(text)


PAGE = """# What a bounded window remembers

![Share of facts known, by where in the dialogue they were told](recall.png)

The embedded model reads {dialogues} dialogues of {tokens:,} tokens and is asked for each of the
{facts} facts told in each. A window of `max_kv_size` tokens holds the first `keep` tokens and
the most recent ones; facts told in between are dropped by design. mlx-lm's `RotatingKVCache`
runs with the same size and the same `keep`, set by hand: its `make_prompt_cache` gives 4, or
nothing at all to a model that makes its own caches. Both are read in chunks of {chunk} tokens. A
fact that lies across an edge is not counted.

| window, and where the fact was told | penstock | mlx-lm | goal | met |
|---|---|---|---|---|
{rows}

Written by `penstock bench recall --docs benchmarks/notes`; every question is in
`benchmarks/results/`.
"""
