"""`penstock bench remember`: facts known in long dialogues with selective attention.

The embedded model is asked for facts anywhere in a dialogue. Its steps use full attention, tokens
selected by the key index, as many tokens selected by Quest's bound, or a window. The window reads
as many bytes per step as the selection with its index.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from penstock.attention import devices
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.selection import block_choice
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS
from penstock.attention.selection.selected_reads import ChoiceReader
from penstock.attention.selection.selection import FIRST_TOKENS, Selection, pieces
from penstock.engine.core import Core
from penstock.engine.request import Request
from penstock.engine.schedule.sequence import Sequence
from penstock.kv.segment import ColumnRange
from penstock.models.loading import load
from penstock.models.mlx_lm import render
from penstock.models.template_renderer import TemplateRenderer
from penstock.plurals import counted
from penstock.recall import MODEL_PATH
from penstock_bench.recall import Question, dialogue
from penstock_bench.report import Line, Notify, Report
from penstock_bench.window_recall import ANSWER_TOKENS, Share

CLAIM = "Facts anywhere in a dialogue are known, though a step reads a part of it"
RIVAL = "window"
SIDES = ("all", "index", "quest", RIVAL)
LEAST_OF_ALL = 0.99
"""Goal: facts known with the index, as a share of those known with full attention."""
JUDGED_TOKENS = 512
"""Minimum number of selected tokens for which the goal is judged."""
MEMORY = "400MB"


@dataclass(frozen=True, slots=True)
class RememberLoad:
    """Size of the dialogues, and their questions."""

    dialogues: int = 2
    facts: int = 24
    lengths: tuple[int, ...] = (2_000, 4_000, 8_000)
    """Dialogue lengths, in tokens."""
    attend: tuple[int, ...] = (128, 512)
    """Numbers of selected tokens."""
    batch: int = 4


def quest_score(
    selection: Selection,
    rows: Items[DecodeRow],
    queries: mx.array,
    scale: float,
    layer: int,
    *_: Any,
) -> list[mx.array]:
    """Score blocks by Quest's bound: the largest product that their extremes allow.

    Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference". Each
    element of a query is multiplied with the minimum and maximum of its channel in the block, and
    the larger product counts. In float16 the extremes of blocks of 16 take a sixteenth of the KV.
    Replaces `block_choice.block_scores`.
    """
    return [
        _bounds(selection, row, query * scale, layer)
        for row, query in zip(rows, queries, strict=True)
    ]


def _bounds(selection: Selection, row: DecodeRow, query: mx.array, layer: int) -> mx.array:
    runs = pieces(row.parts, 0, selection.recent_start(row.position))
    keys = mx.concatenate([_keys(run, layer) for run in runs], axis=1)
    blocks = mx.unflatten(keys, 1, (-1, BLOCK_TOKENS))
    smallest, largest = blocks.min(axis=2).swapaxes(1, 2), blocks.max(axis=2).swapaxes(1, 2)
    return mx.maximum(query, 0) @ largest + mx.minimum(query, 0) @ smallest


@contextmanager
def _scoring(side: str) -> Iterator[None]:
    """Select tokens in every step, by Quest's bound on that side.

    Answers have few tokens, and normally the first one uses full attention and determines most of
    them.
    """
    by_index, of_prompts = block_choice.block_scores, Sequence.follows_prompt
    device = type(devices.current())
    by_loops = device.choice_reader
    if side == "quest":
        block_choice.block_scores = quest_score  # type: ignore[assignment]
        device.choice_reader = (  # type: ignore[method-assign]
            lambda self, selection, *sizes: ChoiceReader(selection, self, self.facts)
        )
    Sequence.follows_prompt = property(lambda _: False)  # type: ignore[assignment]
    try:
        yield
    finally:
        block_choice.block_scores = by_index
        device.choice_reader = by_loops  # type: ignore[method-assign]
        Sequence.follows_prompt = of_prompts  # type: ignore[method-assign]


def _keys(run: ColumnRange, layer: int) -> mx.array:
    segment, start, stop = run
    keys = segment.layers[layer][0]
    assert isinstance(keys, mx.array)
    return keys[0, :, start:stop]


@dataclass(frozen=True, slots=True)
class RecallOutcome:
    """Answers of one side to the questions about one dialogue."""

    side: str
    attend: int
    """Selected tokens; 0 with full attention."""
    window: int
    """Window size, in tokens; 0 without a window."""
    length: int
    known: list[bool]
    step_bytes: int
    """Bytes of keys, values and index that a step reads at the end of the dialogue."""


def measure(load_: RememberLoad, notify: Notify = lambda what, done, of: None) -> Report:
    """Ask every side for every fact."""
    model, tokenizer = load(MODEL_PATH)
    runs = [
        (length, side, attend)
        for length in load_.lengths
        for side in SIDES
        for attend in (load_.attend if side != "all" else (0,))
    ]
    outcomes: list[RecallOutcome] = []
    for number, (length, side, attend) in enumerate(runs):
        notify(f"{counted(length, 'token')}, {side}", number, len(runs))
        outcomes += _asked(load_, model, tokenizer, length, side, attend)
    return report(load_, outcomes)


def _asked(
    load_: RememberLoad, model: Any, tokenizer: Any, length: int, side: str, attend: int
) -> Iterator[RecallOutcome]:
    """Yield the outcome of one side for each dialogue of a length."""
    for seed in range(load_.dialogues):
        talk = dialogue(seed, tokens=length, facts=load_.facts)
        with TemplateRenderer() as renderer:
            prompts = [
                tuple(render(tokenizer, talk.ask(question), renderer=renderer))
                for question in talk.questions
            ]
        tokens = max(map(len, prompts))
        window = _window_tokens(model, attend, tokens) if side == RIVAL else 0
        core = _engine(load_, model, tokenizer, side, attend, window)
        try:
            with _scoring(side):
                known = _known(core, tokenizer, prompts, talk.questions)
            read = window or attend or tokens
            nbytes = int(read * core.view.token_bytes)
            nbytes += tokens * _index_token_bytes(core, side)
        finally:
            core.close()
        yield RecallOutcome(side, attend, window, length, known, nbytes)


def _engine(
    load_: RememberLoad, model: Any, tokenizer: Any, side: str, attend: int, window: int
) -> Core:
    settings: dict[str, Any] = {}
    if side == RIVAL:
        settings = {"max_kv_size": window, "keep": FIRST_TOKENS}
    elif side != "all":
        settings = {"attend_tokens": attend}
    return Core(model, tokenizer, memory_limit=MEMORY, max_batch_size=load_.batch, **settings)


def _index_token_bytes(core: Core, side: str) -> int:
    """Return the bytes per token of the index, or of Quest's extremes in float16."""
    if side == "quest":
        numbers = int(core.view.token_bytes) // (2 * mx.float32.size)  # half of them are values'
        return 2 * mx.float16.size * numbers // BLOCK_TOKENS
    return core.view.index_token_bytes if side == "index" else 0


def _window_tokens(model: Any, attend: int, tokens: int) -> int:
    """Return the window size, in tokens, that takes the bytes of the selection and its index."""
    core = Core(model, memory_limit=MEMORY, max_batch_size=1, attend_tokens=attend)
    try:
        index, token_bytes = core.view.index_token_bytes, int(core.view.token_bytes)
    finally:
        core.close()
    return attend + tokens * index // token_bytes


def _known(
    core: Core, tokenizer: Any, prompts: Items[tuple[int, ...]], questions: Items[Question]
) -> list[bool]:
    """Ask all questions; the first one alone, so that the others find the dialogue cached."""
    said: list[str] = []
    for batch in (prompts[:1], prompts[1:]):
        requests = [Request(prompt=prompt, max_tokens=ANSWER_TOKENS) for prompt in batch]
        handles = [core.submit(request) for request in requests]
        while core.step():
            pass
        said += [_text(tokenizer, handle.result(0.0)[0].tokens) for handle in handles]
    return [text == question.answer for text, question in zip(said, questions, strict=True)]


def _text(tokenizer: Any, tokens: Items[int]) -> str:
    written = [token for token in tokens if token not in tokenizer.eos_token_ids]
    return str(tokenizer.decode(written)).strip()


def shares(outcomes: Items[RecallOutcome]) -> dict[tuple[int, int, str], Share]:
    """Count known facts by number of selected tokens, length, and side."""
    counts: dict[tuple[int, int, str], Share] = {}
    for outcome in outcomes:
        key = outcome.attend, outcome.length, outcome.side
        before = counts.get(key, Share(0, 0))
        count = before.asked + len(outcome.known)
        counts[key] = Share(count, before.known + sum(outcome.known))
    return counts


def report(load_: RememberLoad, outcomes: Items[RecallOutcome]) -> Report:
    """Format the shares, and judge those of the index."""
    counts = shares(outcomes)
    lines: list[Line] = []
    met = True
    for attend in load_.attend:
        for length in load_.lengths:
            whole, ours = counts[0, length, "all"], counts[attend, length, "index"]
            window, quest = counts[attend, length, RIVAL], counts[attend, length, "quest"]
            name = f"{counted(length, 'token')}, {attend} read"
            goal, reached = "", None
            if attend >= JUDGED_TOKENS:
                goal = f">= 99 % of {whole.known} known"
                reached = ours.known >= LEAST_OF_ALL * whole.known
                met = met and reached
            lines.append(Line(name, str(ours), str(window), goal, reached))
            lines.append(Line(f"{name}: all / Quest's bound", str(whole), str(quest)))
    named = {
        side: {
            f"{n:,} of {length:,}": share.as_object()
            for (n, length, s), share in counts.items()
            if s == side
        }
        for side in SIDES
    }
    return Report(
        name="remember",
        claim=CLAIM,
        rival=RIVAL,
        penstock=named["index"],
        rival_figures=named[RIVAL],
        ratio={},
        goal={"known_of_all": LEAST_OF_ALL, "from_tokens_read": JUDGED_TOKENS},
        met=met,
        lines=lines,
        raw={
            "load": asdict(load_),
            "all": named["all"],
            "quest": named["quest"],
            "outcomes": [asdict(outcome) for outcome in outcomes],
        },
        dtype="float32",
    )


def draw(report_: Report, file: Path) -> None:
    """Plot recall over length, one pane for each number of selected tokens."""
    from penstock_bench.remember_picture import draw as drawn

    drawn(report_, file)
