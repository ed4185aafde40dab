"""`penstock bench million`: one dialogue of a million tokens in a bounded engine, with a cold tier.

The embedded model reads a dialogue whose first part tells facts, in an engine that attends to parts
and leaves most keys and values on a disk. Decode steps are timed at several lengths, and at the end
it is asked for the facts. Its memory is planned before, and looked at in every step.

It was trained on 32,768 positions. So it gets the settings with which such models are made to read
more: slow RoPE frequencies divided by a factor, and a sliding window in the layer that looks for
near words only. Its weights are the same.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.errors import EngineStopped
from penstock.memory.sizes import format_bytes, parse_bytes
from penstock.models.loading import load
from penstock.models.mlx_lm import render
from penstock.models.template_renderer import TemplateRenderer
from penstock.plurals import counted
from penstock.recall import MODEL_PATH
from penstock_bench.recall import dialogue
from penstock_bench.report import Line, Notify, Report
from penstock_bench.window_recall import ANSWER_TOKENS

CLAIM = "A million tokens fit into a bound, and a step behind them takes as long as behind few"
MOST_GROWTH = 1.5
"""Goal: a step at the last length over one at the first from `FLAT_FROM` on."""
FLAT_FROM = 128_000
WARM_STEPS = 10
DIALOGUE_SPARE = 100
"""A dialogue ends less than 48 tokens below its length."""
FACTS_UNTIL = 0.02
"""Share of the dialogue in which the facts are told."""
STRETCHED: dict[str, Any] = {
    "max_position_embeddings": 1_048_576,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        # The frequencies that match facts are scaled, with waves of 198,700 tokens and more. Those
        # that find near words are not: the longest of their waves has 83,800.
        "low_freq_factor": 0.25,
        "high_freq_factor": 0.3,
        "original_max_position_embeddings": 32_768,
    },
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 1_024,
}
"""Changes of the embedded model's config for positions beyond those that it was trained on."""


@dataclass(frozen=True, slots=True)
class MillionLoad:
    """Lengths of the dialogue, and the engine's settings."""

    lengths: tuple[int, ...] = (32_000, 128_000, 512_000, 1_000_000)
    attend_tokens: int = 1_024
    attend_prompt: int = 512
    active_kv_size: int = 2_048
    memory_limit: str = "4GB"
    prefill_chunk: int = 1_024
    facts: int = 12
    steps: int = 60
    stretched: bool = True
    """Whether the config has `STRETCHED`; else both layers choose, and facts are forgotten."""


@dataclass(slots=True)
class HeldWatch:
    """Steps an engine, tells how far it is, and keeps the most bytes of its account."""

    core: Core
    longest: int
    """Tokens of the longest prompt."""
    notify: Notify
    most_bytes: int = 0
    seconds: float = 0.0
    """Time in steps so far."""
    cpu_seconds: float = 0.0

    def step(self, handle: Handle) -> bool:
        began, cpu_began = time.perf_counter(), time.process_time()
        stepped = self.core.step()
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - cpu_began
        self.most_bytes = max(self.most_bytes, self.core.view.stats().used_bytes)
        if handle.progress is not None and not handle.progress.done:
            done, of = handle.progress.done_tokens, handle.progress.prompt_tokens
            self.notify(f"reading {counted(of, 'token')}", done, self.longest)
        return stepped

    def until(self, handle: Handle, answered: int) -> None:
        """Step until an answer has that many tokens.

        Raises:
            PenstockError: the request failed, or nothing is left to do for it.
        """
        while True:
            handle.events()
            (choice,) = handle.choices
            if choice.finish is not None and choice.finish.error is not None:
                raise choice.finish.error
            if len(choice.tokens) >= answered:
                return
            if not self.step(handle) and not handle.unread:
                length = counted(len(handle.request.prompt), "token")
                answer = f"token {len(choice.tokens)} behind {length}"
                raise EngineStopped(f"the engine has nothing left to do at {answer}")

    def end(self, handle: Handle) -> None:
        """Step until there is nothing to do."""
        while self.step(handle):
            pass


def measure(load_: MillionLoad, notify: Notify = lambda *_: None) -> Report:
    """Read the dialogue, time the steps, and ask for the facts."""
    model, tokenizer = load(MODEL_PATH)
    if load_.stretched:
        model = stretched(model)
    longest = max(load_.lengths)
    talk = dialogue(7, tokens=longest + DIALOGUE_SPARE, facts=load_.facts, place=(0.0, FACTS_UNTIL))
    with TemplateRenderer() as renderer:
        asked = [talk.ask(question) for question in talk.questions]
        first = tuple(render(tokenizer, asked[0], renderer=renderer))
        ends = [render(tokenizer, [messages[-1]], renderer=renderer)[1:] for messages in asked]
    tokens = first[: len(first) - len(ends[0])]
    with TemporaryDirectory() as folder:
        core = Core(
            model,
            tokenizer,
            max_kv_size=longest + 4 * load_.prefill_chunk,
            max_batch_size=1,
            max_stall_ms=0,
            ssd_cache_dir=Path(folder),
            attend_tokens=load_.attend_tokens,
            attend_prompt=load_.attend_prompt,
            active_kv_size=load_.active_kv_size,
            memory_limit=load_.memory_limit,
            prefill_chunk=load_.prefill_chunk,
        )
        watch = HeldWatch(core, longest, notify)
        try:
            most_tokens = max(
                longest + WARM_STEPS + load_.steps + 1,
                *(len(tokens) + len(end) + ANSWER_TOKENS for end in ends),
            )
            sums = core.view.sequence_bytes(most_tokens)
            fixed_bytes = core.view.stats().used_bytes  # nothing is cached yet
            planned = fixed_bytes + sums.per_sequence + sums.shared
            rows = [_at(watch, tokens[:length], load_) for length in load_.lengths]
            known = []
            for number, (end, question) in enumerate(zip(ends, talk.questions, strict=True)):
                notify("asking", number, len(ends))
                known.append(_answer(watch, tokenizer, (*tokens, *end)) == question.answer)
            spilling = core.view.stats().spilling
            lost = 0 if spilling is None else spilling.counts.lost_blocks
        finally:
            core.close()
    return report(load_, rows, known, planned, watch.most_bytes, lost)


def stretched(model: Any) -> Any:
    """Return the embedded model with the same weights and the config changed by `STRETCHED`."""
    changed = type(model)(replace(model.args, **STRETCHED))
    changed.update(model.parameters())
    return changed


def _at(watch: HeldWatch, tokens: Sequence[int], load_: MillionLoad) -> dict[str, Any]:
    """Read a prompt whose beginning is known, and time steps behind it."""
    began, cpu_began = time.perf_counter(), time.process_time()
    steps = WARM_STEPS + load_.steps
    request = Request(prompt=tuple(tokens), max_tokens=steps + 1, ignore_eos=True)
    handle = watch.core.submit(request)
    watch.until(handle, 1)
    first, first_cpu = time.perf_counter() - began, time.process_time() - cpu_began
    watch.until(handle, WARM_STEPS)
    step_ms, cpu_ms = [], []
    for answered in range(WARM_STEPS + 1, steps + 1):
        before = watch.seconds, watch.cpu_seconds
        watch.until(handle, answered)
        step_ms.append(1e3 * (watch.seconds - before[0]))
        cpu_ms.append(1e3 * (watch.cpu_seconds - before[1]))
    handle.cancel()
    watch.end(handle)
    return {
        "tokens": len(tokens),
        "first_token_seconds": first,
        "first_token_cpu_seconds": first_cpu,
        "step_ms": step_ms,
        "step_cpu_ms": cpu_ms,
        "used_bytes": watch.core.view.stats().used_bytes,
        "mlx_bytes": mx.get_peak_memory(),
        "resident_bytes": _most_resident(),
    }


def _answer(watch: HeldWatch, tokenizer: Any, prompt: tuple[int, ...]) -> str:
    handle = watch.core.submit(Request(prompt=prompt, max_tokens=ANSWER_TOKENS))
    watch.end(handle)
    written = handle.result(0.0)[0].tokens
    said = [token for token in written if token not in tokenizer.eos_token_ids]
    return str(tokenizer.decode(said)).strip()


def _most_resident() -> int:
    """Return the most bytes of this process that were in memory."""
    unit = 1 if sys.platform == "darwin" else 1_024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def report(
    load_: MillionLoad,
    rows: Sequence[dict[str, Any]],
    known: Sequence[bool],
    planned: int,
    most: int,
    lost: int,
) -> Report:
    """Compare the medians with those of the first long length, and the bytes with the limit."""
    limit = parse_bytes(load_.memory_limit)
    step_ms = {row["tokens"]: statistics.median(row["step_ms"]) for row in rows}
    least = {row["tokens"]: min(row["step_ms"]) for row in rows}
    cpu_ms = {row["tokens"]: statistics.median(row["step_cpu_ms"]) for row in rows}
    lines = [
        Line(f"{counted(tokens, 'token')}: a step", f"{ms:.1f} ms", "")
        for tokens, ms in step_ms.items()
    ]
    long = [ms for tokens, ms in step_ms.items() if tokens >= FLAT_FROM]
    growth = long[-1] / long[0] if long else None
    flat = growth is None or growth <= MOST_GROWTH
    if growth is not None:
        goal = f"<= {MOST_GROWTH:g}x"
        lines.append(Line("the last over the first long one", f"{growth:.2f}x", "", goal, flat))
    inside = max(most, planned) <= limit
    within = f"<= {format_bytes(limit)}"
    lines.append(
        Line("memory, planned before", format_bytes(planned), "", within, planned <= limit)
    )
    lines.append(Line("memory, at most", format_bytes(most), "", within, most <= limit))
    arrays, resident = rows[-1]["mlx_bytes"], rows[-1]["resident_bytes"]
    inside = inside and arrays <= limit
    lines.append(Line("MLX's arrays, at most", format_bytes(arrays), "", within, arrays <= limit))
    lines.append(Line("the whole process, at most", format_bytes(resident), ""))
    share = f"{sum(known)} of {len(known)}"
    lines.append(Line("facts of the beginning known", share, "", "all", all(known)))
    return Report(
        name="million",
        claim=CLAIM,
        rival="",
        penstock={
            "step_ms": step_ms,
            "least_step_ms": least,
            "step_cpu_ms": cpu_ms,
            "first_token_seconds": {row["tokens"]: row["first_token_seconds"] for row in rows},
            "planned_bytes": planned,
            "most_bytes": most,
            "mlx_bytes": arrays,
            "resident_bytes": resident,
            "known": sum(known),
            "asked": len(known),
            "lost_blocks": lost,
        },
        rival_figures={},
        ratio={"growth": growth},
        goal={"growth": MOST_GROWTH, "limit_bytes": limit, "known": len(known)},
        met=flat and inside and all(known),
        lines=lines,
        raw={"load": asdict(load_), "rows": list(rows), "known": list(known)},
        dtype="float32",
    )
