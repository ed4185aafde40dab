"""`penstock bench kernels`: attention of one layer in a decode step, computed in each way."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from penstock.attention import devices
from penstock.kv.codecs.names import RAW, parse_scheme
from penstock.plugins.kernels.attend import device_kernels
from penstock.plugins.kernels.selftest import Timing, WayChoice, choose
from penstock.plugins.kernels.ways import AttentionForm, AttentionWay
from penstock.plurals import counted
from penstock_bench.report import Line, Report
from penstock_bench.step_operations import (
    LayerOperations,
    ReadBytes,
    layer_operations,
    read_bytes,
)

CLAIM = "The way that an engine takes for a decode step's attention is the quickest of three"
RIVAL = "plain operations"
HOURS = 3_600.0
"""Time limit for the measurements of one size, high enough for all."""


@dataclass(frozen=True, slots=True)
class KernelsLoad:
    """Layer shapes, and sizes of their steps."""

    layers: tuple[AttentionForm, ...]
    rows: tuple[int, ...] = (2, 8)
    tokens: tuple[int, ...] = (512, 2_048, 8_192)
    codec: str = RAW


def measure(load: KernelsLoad) -> Report:
    """Measure every layer, number of rows and length."""
    scheme = None if load.codec == RAW else parse_scheme(load.codec)
    choices = {
        (rows, tokens): choose(
            load.layers,
            device_kernels(devices.current()),
            rows=rows,
            scheme=scheme,
            seconds=HOURS,
            tokens=tokens,
        )
        for rows in load.rows
        for tokens in load.tokens
    }
    return report(load, choices, layer_operations(), read_bytes())


def report(
    load: KernelsLoad,
    choices: dict[tuple[int, int], WayChoice],
    counts: LayerOperations,
    moved: ReadBytes,
) -> Report:
    """Compare the chosen way with plain operations, and the operations of a layer with mlx-lm's."""
    timings = [
        (f"{timing.layer}, {counted(tokens, 'token')}, {timing.step} ({rows})", timing)
        for (rows, tokens), choice in choices.items()
        for timing in choice.timings
    ]
    off = next((choice.why_off for choice in choices.values() if choice.why_off), None)
    unread = sorted({name for choice in choices.values() for name in choice.unread})
    gains = [_plain(timing) / timing.milliseconds[timing.chosen] for _, timing in timings]
    return Report(
        name="kernels",
        claim=CLAIM,
        rival=RIVAL,
        penstock={name: timing.milliseconds[timing.chosen] for name, timing in timings},
        rival_figures={name: _plain(timing) for name, timing in timings},
        ratio={"least": round(min(gains), 2), "median": round(statistics.median(gains), 2)},
        goal={"least": 1.0},
        met=min(gains) >= 1.0 and counts.met,
        lines=[
            *_lines(timings, off),
            *(Line("kernels", f"do not read {n}", "") for n in unread),
            *_count_lines(counts),
            *_byte_lines(moved),
        ],
        raw={
            "kernels_off": off,
            "kernels_do_not_read": unread,
            "codec": load.codec,
            "operations": asdict(counts),
            "bytes": asdict(moved),
            "ways": {name: _raw(timing) for name, timing in timings},
        },
        dtype=", ".join(sorted({str(layer.dtype) for layer in load.layers})),
    )


def _plain(timing: Timing) -> float:
    return timing.milliseconds[AttentionWay.PLAIN]


def _raw(timing: Timing) -> dict[str, Any]:
    times = {way.value: round(ms, 4) for way, ms in timing.milliseconds.items()}
    return {"milliseconds": times, "chosen": timing.chosen.value}


def _lines(timings: Sequence[tuple[str, Timing]], off: str | None) -> list[Line]:
    lines = [
        Line(
            name,
            f"{timing.milliseconds[timing.chosen]:.3f} ms, {timing.chosen.value}",
            f"{_plain(timing):.3f} ms",
        )
        for name, timing in timings
    ]
    if off is not None:
        lines.append(Line("kernels", f"off: {off}", ""))
    return lines


def _count_lines(counts: LayerOperations) -> list[Line]:
    """Return the operations of one layer in MLX's graph, views not counted."""
    own, most = str(counts.own), counts.own + counts.MOST_MORE
    return [
        Line(
            "operations of a layer, all tokens (mlx-lm)",
            str(counts.whole),
            own,
            f"{most}",
            counts.whole <= most,
        ),
        Line(
            "operations of a layer, a choice (mlx-lm)",
            f"{counts.choice}, {counts.further} for each further segment",
            own,
            f"{counts.most_choice}",
            counts.choice <= counts.most_choice,
        ),
        Line("operations of a layer, a choice and the rest (mlx-lm)", str(counts.rest), own),
    ]


def _byte_lines(moved: ReadBytes) -> list[Line]:
    """Return the bytes that a further token of a sequence adds to a layer and key head."""
    figures = ("all tokens", moved.whole), ("a choice", moved.choice), ("the rest", moved.rest)
    own = f"{moved.own:.0f}"
    return [
        Line(f"bytes of a further token, {name} (mlx-lm)", f"{nbytes:.0f}", own)
        for name, nbytes in figures
    ]


def layer_form(heads: int, kv_heads: int, dim: int, dtype: str) -> AttentionForm:
    """Return a layer's shape from the command-line options."""
    return AttentionForm(heads, kv_heads, dim, dim, getattr(mx, dtype))
