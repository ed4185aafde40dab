"""Self-test of the kernels on a device: checks results, then times the implementations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.attention import devices
from penstock.attention.attention_backend import AttentionBackend, DecodeStep
from penstock.attention.attention_plan import DecodeRow, in_order
from penstock.attention.reads import decode_reads
from penstock.attention.span_attention import AttentionWindow
from penstock.kv import columns as col
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.plugins.kernels.attend import KernelAttention
from penstock.plugins.kernels.ways import AttentionForm, AttentionWay, Situation, Ways

logger = logging.getLogger(__name__)
Numbers: TypeAlias = npt.NDArray[np.float32]
SECONDS = 0.3
"""Time limit in seconds, excluding compilation, which happens once per kernel."""
COMPARED_SHARE = 0.5
"""Maximum share of the time limit for checking results; the rest is for timing."""
TOKENS = 2_048
"""Number of tokens of the longest timed sequence."""
CHECKED_TOKENS = 192
"""Number of tokens of sequences whose results are checked."""
BLOCK = 64
PARTS = 8
"""Number of parts of the timed sequence with many parts."""
MANY_PARTS = 16
"""Number of parts of a checked sequence that needs several dispatches."""
TAIL = 6
"""Maximum number of tokens in a row's tail."""
AT_ONCE = 4
SHARE = 0.9
"""An implementation replaces plain operations if its time is at most this share of theirs."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one layer's attention, by implementation; those that failed are missing."""

    layer: AttentionForm
    situation: Situation
    milliseconds: dict[AttentionWay, float]
    chosen: AttentionWay
    coded: bool = False
    """Whether the KV is quantized, except for tails."""

    @property
    def step(self) -> str:
        return f"{self.situation.value}{', codes' if self.coded else ''}"


@dataclass(slots=True)
class WayChoice:
    """Result of the self-test: measured times, and the implementations chosen."""

    ways: Ways
    timings: list[Timing] = field(default_factory=list)
    why_off: str | None = None
    """Reason why kernels are disabled; None if they are enabled."""
    unread: list[str] = field(default_factory=list)
    """Layers and codecs that no kernel supports; empty if kernels are disabled."""
    is_cut_short: bool = False
    """Whether time ran out, so that untested steps use plain operations."""


class TimeBudget:
    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.clock, self._seconds, self._began = clock, seconds, clock()

    @property
    def spent(self) -> float:
        return self.clock() - self._began

    @property
    def is_over(self) -> bool:
        return self.spent >= self._seconds

    def leave_out(self, seconds: float) -> None:
        self._began += seconds


def choose(
    layers: Sequence[AttentionForm],
    kernels: KernelAttention | None,
    *,
    rows: int,
    scheme: Scheme | None = None,
    seconds: float = SECONDS,
    tokens: int = TOKENS,
    clock: Callable[[], float] = time.perf_counter,
) -> WayChoice:
    """Choose the fastest implementation with correct results for each kind of decode step.

    Args:
        layers: attention shapes of the model's layers.
        kernels: kernels of the device; None if there are none.
        rows: maximum number of rows of a step.
        scheme: codecs of the KV; None if it is not quantized.
        seconds: time limit.
        tokens: length of the timed sequences.
        clock: returns seconds.
    """
    choice = WayChoice(Ways(kernels))
    if kernels is None:
        choice.why_off = "this device has none"
    forms = list(product(dict.fromkeys(layers), [None] if scheme is None else [None, scheme]))
    spent = 0.0
    if kernels is not None:
        comparing = TimeBudget(COMPARED_SHARE * seconds, clock)
        _compare_all(forms, kernels, rows, choice, comparing)
        kernels.only_known = True
        spent = comparing.spent
    table = {}
    budget = TimeBudget(seconds - spent, clock)
    situations = [entry for entry in Situation if entry.is_alone or rows > 1]
    for situation, (layer, codecs) in product(situations, forms):
        timing = _time(layer, situation, choice, rows, codecs, tokens, budget)
        if timing is None:
            choice.is_cut_short = True
            break
        choice.timings.append(timing)
        if timing.chosen is not AttentionWay.PLAIN:
            table[layer, situation, timing.coded] = timing.chosen
    order = [(layer, codecs is not None) for layer, codecs in forms]
    choice.timings.sort(key=lambda entry: order.index((entry.layer, entry.coded)))
    choice.ways.table = table
    mx.clear_cache()
    return choice


def nbytes(layers: Sequence[AttentionForm], rows: int, tokens: int = TOKENS) -> int:
    """Return an upper bound of the memory that `choose` needs."""
    largest, tokens = 0, max(tokens, CHECKED_TOKENS, MANY_PARTS * BLOCK) + 2 * BLOCK
    for form in layers:
        dims = form.key_dim + form.value_dim
        kv = tokens * rows * (2 + AT_ONCE) * form.kv_heads * dims  # including joined copies
        compared = 2 * tokens * form.heads * dims
        scores = 10 * AT_ONCE * rows * form.heads * (tokens + dims)
        largest = max(largest, mx.float32.size * (kv + compared + scores))
    return largest


def _compare_all(
    forms: Sequence[tuple[AttentionForm, Scheme | None]],
    kernels: KernelAttention,
    rows: int,
    choice: WayChoice,
    budget: TimeBudget,
) -> None:
    """Check the kernels' results for every format, and disable the kernels if one is wrong."""
    read = list(forms)
    try:
        for number, step in enumerate(_compared_steps(rows)):
            for form in tuple(read):
                if budget.is_over:
                    choice.is_cut_short = True
                    return
                if not _compare(form, kernels, step, number, budget):
                    read.remove(form)
                    layer, scheme = form
                    codec = "" if scheme is None else f"{scheme.name} of "
                    choice.unread.append(f"{codec}{layer}")
        if not read:
            choice.why_off = f"none reads {'; '.join(choice.unread)}"
    except Exception as error:  # noqa: BLE001 - compilers and drivers may raise anything
        choice.why_off = " ".join(str(error).split())[:200] or type(error).__name__
    if choice.why_off is not None:
        choice.ways.kernels = None
        choice.unread.clear()


def _compared_steps(rows: int) -> list[tuple[Situation, int, int]]:
    """Return situations, each with numbers of rows and parts; those timed later come first."""
    alone = [(Situation.ONE_PART, 1, PARTS)]
    alone += [(Situation.PARTS, 1, parts) for parts in (PARTS, MANY_PARTS)]
    smaller = [2**i for i in range(1, rows.bit_length()) if 2**i != rows]
    counts = [rows, *smaller] if rows > 1 else []
    together = (Situation.SHARED, Situation.RAGGED)
    return alone + [(situation, count, PARTS) for count in counts for situation in together]


def _compare(
    form: tuple[AttentionForm, Scheme | None],
    kernels: KernelAttention,
    step: tuple[Situation, int, int],
    seed: int,
    budget: TimeBudget,
) -> bool:
    """Return whether the kernels support a step; raise ValueError if a result is wrong."""
    (layer, scheme), (situation, count, parts) = form, step
    trial = TrialStep.random(layer, situation, count, CHECKED_TOKENS, scheme, seed, parts)
    windows = (AttentionWindow(), AttentionWindow(CHECKED_TOKENS // 2, 8))
    return all(
        _is_right(trial, kernels, window, sinks=sinks, budget=budget)
        for sinks, window in zip((False, True), windows, strict=True)
    )


def _is_right(
    trial: TrialStep,
    kernels: KernelAttention,
    window: AttentionWindow,
    *,
    sinks: bool,
    budget: TimeBudget,
) -> bool:
    ways = Ways(kernels, always=AttentionWay.KERNEL)
    while True:
        known, began = len(kernels.known), budget.clock()
        results = trial.run(ways, window, sinks=sinks)
        if results is None:
            return False
        mx.eval(results)
        if len(kernels.known) == known:
            break
        budget.leave_out(budget.clock() - began)  # a kernel was compiled; run again
    off, allowed = trial.error(results, window, sinks=sinks)
    if not off <= allowed:
        raise ValueError(f"a result is off by {off:.2g}, more than {allowed:.2g}: {trial.layer}")
    return True


def _time(
    layer: AttentionForm,
    situation: Situation,
    choice: WayChoice,
    rows: int,
    scheme: Scheme | None,
    tokens: int,
    budget: TimeBudget,
) -> Timing | None:
    """Time all implementations in one kind of step; None if the time runs out."""
    if budget.is_over:
        return None
    count = 1 if situation.is_alone else rows
    trial = TrialStep.random(layer, situation, count, tokens, scheme, seed=1)
    candidates = {AttentionWay.PLAIN: Ways(), AttentionWay.FUSED: Ways(always=AttentionWay.FUSED)}
    if choice.ways.kernels is not None:
        candidates[AttentionWay.KERNEL] = Ways(choice.ways.kernels, always=AttentionWay.KERNEL)
    milliseconds: dict[AttentionWay, float] = {}
    for way in [*candidates, *candidates, *candidates]:  # interleaved; the first runs are warm-up
        if budget.is_over:
            return None
        try:
            spent = _seconds(trial, candidates[way], budget.clock)
        except Exception as error:  # an implementation that fails is not chosen
            logger.debug("attention (%s) could not be timed", way.value, exc_info=error)
            milliseconds[way] = float("inf")
            continue
        milliseconds[way] = min(milliseconds.get(way, float("inf")), 1e3 * spent / AT_ONCE)
    finite = {way: ms for way, ms in milliseconds.items() if ms < float("inf")}
    chosen = min(finite, key=finite.__getitem__, default=AttentionWay.PLAIN)
    if finite.get(chosen, 0.0) > SHARE * finite.get(AttentionWay.PLAIN, float("inf")):
        chosen = AttentionWay.PLAIN
    return Timing(layer, situation, finite, chosen, scheme is not None)


def _seconds(trial: TrialStep, ways: Ways, clock: Callable[[], float]) -> float:
    began = clock()
    results = trial.run_layers(AT_ONCE, ways, AttentionWindow(), sinks=False)
    if any(result is None for result in results):
        raise ValueError("this way does not support the step")
    mx.eval(results)
    return clock() - began


@dataclass(frozen=True, slots=True)
class TrialStep:
    """Decode step of one layer with random data."""

    device: AttentionBackend
    layer: AttentionForm
    rows: list[DecodeRow]
    tails: Tails
    queries: mx.array
    new: tuple[mx.array, mx.array]
    sinks: mx.array

    @classmethod
    def random(
        cls,
        layer: AttentionForm,
        situation: Situation,
        rows: int,
        tokens: int,
        scheme: Scheme | None,
        seed: int,
        parts: int = PARTS,
    ) -> TrialStep:
        """Create a step with sequences of up to `tokens` tokens; ragged ones differ in length."""
        device = devices.current()
        keys = iter(mx.random.split(mx.random.key(seed), 8 + 2 * 16 * (rows + 2)))

        def normal(*shape: int) -> mx.array:
            return mx.random.normal(shape, key=next(keys)).astype(layer.dtype)

        def segment(count: int) -> Segment:
            count = max(BLOCK, count // BLOCK * BLOCK)
            sides = (
                normal(1, layer.kv_heads, count, dim) for dim in (layer.key_dim, layer.value_dim)
            )
            random_segment = Segment((tuple(sides),))  # type: ignore[arg-type]
            mx.eval([col.arrays(*span_segment) for span_segment in random_segment.layers])
            return random_segment if scheme is None else random_segment.encoded(scheme, device)

        common = [segment(tokens)] if situation in (Situation.ONE_PART, Situation.SHARED) else []
        shape = LayerShape(layer.kv_heads, layer.key_dim, layer.value_dim, layer.dtype)
        tails = Tails(rows, TAIL + 2, [shape])
        tails.ready()
        decode_rows = []
        for slot in range(rows):
            segments = []
            if situation is Situation.PARTS:
                segments = [segment(tokens // parts) for _ in range(parts)]
            elif situation is Situation.SHARED:
                segments = [segment(BLOCK)]
            elif situation is Situation.RAGGED:
                segments = [segment(tokens // (1 + slot))]
            spans: list[KVSpan] = []
            for span_segment in (*common, *segments):
                spans.append(
                    KVSpan(span_segment, spans[-1].end if spans else 0, span_segment.tokens)
                )
            used = slot % TAIL
            for column in range(used):
                new = (normal(1, layer.kv_heads, 1, d) for d in (layer.key_dim, layer.value_dim))
                tails.write_block(0, slot, column, *new)
            decode_rows.append(DecodeRow(tuple(spans), spans[-1].end + used, slot, used))
        mx.eval(tails.buffers())
        decode_rows = [decode_rows[i] for i in in_order(decode_rows)]
        new_sides = [normal(rows, layer.kv_heads, 1, d) for d in (layer.key_dim, layer.value_dim)]
        queries, sinks = normal(rows, layer.heads, 1, layer.key_dim), normal(layer.heads)
        mx.eval(queries, sinks, new_sides)
        sides = new_sides[0], new_sides[1]
        return cls(device, layer, decode_rows, tails, queries, sides, sinks)

    @property
    def scale(self) -> float:
        return float(self.layer.key_dim**-0.5)

    def run(self, ways: Ways, window: AttentionWindow, *, sinks: bool) -> mx.array | None:
        return self.run_layers(1, ways, window, sinks=sinks)[0]

    def run_layers(
        self, count: int, ways: Ways, window: AttentionWindow, *, sinks: bool
    ) -> list[mx.array | None]:
        """Return the attention outputs of `count` equal layers of one step, None if unsupported."""
        step = DecodeStep.of(self.device, self.rows, self.tails, ways=ways)
        (reads,) = decode_reads(step, [window])
        layer_sinks = self.sinks if sinks else None
        results: list[mx.array | None] = []
        for _ in range(count):
            fetched = reads.update_and_fetch(*self.new)
            if ways.always is not None:
                results.append(ways.attend(step, 0, window, self.queries, self.scale, layer_sinks))
                continue
            mask = reads.make_mask(1)
            results.append(reads.attend(self.queries, *fetched, self.scale, mask, layer_sinks))
        return results

    def error(
        self, result: mx.array, window: AttentionWindow, *, sinks: bool
    ) -> tuple[float, float]:
        """Return the maximum error of a result, and the tolerance for rounding."""
        largest = off = 0.0
        answers = _host(result)
        for i, row in enumerate(self.rows):
            expected, top = self._expected(i, row, window, sinks=sinks)
            difference = float(np.abs(answers[i, :, 0] - expected).max())
            off = max(off, difference if np.isfinite(difference) else np.inf)
            largest = max(largest, top)
        return off, (2 * float(mx.finfo(self.layer.dtype).eps) + 1e-4) * largest

    def _expected(
        self, i: int, row: DecodeRow, window: AttentionWindow, *, sinks: bool
    ) -> tuple[Numbers, float]:
        """Return a row's attention computed with NumPy, (heads, dim), and the largest value."""
        sides: list[Numbers] = []
        for number in (0, 1):
            parts = [part.segment.layers[0][number] for part in row.parts]
            dequantized_parts = [
                part_side.dequantize(self.device) if isinstance(part_side, Coded) else part_side
                for part_side in parts
            ]
            dequantized_parts.append(self.tails.read_block(0, row.slot, 1, row.tail + 1)[number])
            sides.append(_host(mx.concatenate(dequantized_parts, axis=2))[0])  # type: ignore[arg-type]
        keys, values = sides
        queries = _host(self.queries[i, :, 0]).reshape(keys.shape[0], -1, keys.shape[2])
        scores = self.scale * (queries @ keys.swapaxes(1, 2))
        seen = np.array(window.mask(mx.array([row.position]), mx.arange(keys.shape[1])))
        scores = np.where(seen, scores, -np.inf)
        if sinks:
            row_sinks = _host(self.sinks).reshape(*scores.shape[:2], 1)
            scores = np.concatenate([scores, row_sinks], axis=2)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        mixed = weights[:, :, : values.shape[1]] @ values
        return mixed.reshape(self.layer.heads, -1), float(np.abs(values).max())


def _host(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32), np.float32)
