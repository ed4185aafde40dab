"""Source code of the kernels: bodies, macros, and code generated for the format of a span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import indent

from penstock.kv.codecs.turbo import STEPS
from penstock.plugins.kernels.span_forms import TILE_COLUMNS, ArrayKind, SideForm, SpanForm

FOLDER = Path(__file__).parent
MOST_BUFFERS = 24
"""Maximum number of buffers for the spans of a dispatch. With queries, plan, numbers and three
results that makes 30 of the 31 that Metal allows."""
SPANS = (4, 12)
"""Numbers of spans for which kernels are compiled; a dispatch with fewer repeats its first span.
The last is the maximum, which is lower if a span has more than two arrays."""
TILE_BYTES = 16_384
"""Threadgroup memory of a tile in bytes; Metal allows 32 KiB per threadgroup."""
COLUMNS = 4
"""Columns that a lane reads between two updates of the running maximum, as in constants.h."""
METAL_PROLOGUE = """  const uint3 group_ = threadgroup_position_in_grid;
  const uint simdgroup_ = simdgroup_index_in_threadgroup;
  const int lane_ = int(thread_index_in_simdgroup);
  (void)simdgroup_;
"""
HALF = {"metal": "float16_t", "cuda": "__half", "lockstep": "half_t"}
ROW_STAGE = """for (int i = own; i < (stop - start) * COUNT; i += threads) {
  NAME_tile[i] = NAME_at[start * COUNT + i];
}
"""
CODES_STAGE = """for (int i = own; i < TILE / 32 * DIM * BITS; i += threads) {
  const int from = word_of_span<DIM, BITS, TILE>(start, i);
  NAME_tile[word_of_tile<DIM, BITS, TILE>(i)] = NAME_at[from];
}
"""
CHANNELS_STAGE = """for (int i = own; i < DIM; i += threads) {
  NAME_tile[i] = NAME_at[start / SPAN * DIM + i];
}
"""
STAGE_INDENT = " " * 8


@dataclass(frozen=True, slots=True)
class KernelText:
    name: str
    header: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def most_spans(form: SpanForm) -> int:
    return min(SPANS[-1], MOST_BUFFERS // form.arrays)


def padded_spans(form: SpanForm, spans: int) -> int:
    return next(count for count in (*SPANS[:-1], most_spans(form)) if count >= spans)


@cache
def partial_text(target: str, form: SpanForm, spans: int, *, staged: bool) -> KernelText:
    """Return the kernel that computes partial results of up to `spans` spans of a format."""
    sides = (("k", "KEY", form.keys), ("v", "VALUE", form.values))
    pick = "".join(_pick(letter, side, spans, target) for letter, _, side in sides)
    read = _read(FOLDER / "staged.h" if staged else FOLDER / "direct.h", sides, target)
    source = (
        _body("partial.h", target).replace("  PICK_SPAN\n", pick).replace("  READ_SPAN\n", read)
    )
    names = [
        f"{name}{i}"
        for i in range(spans)
        for letter, _, side in sides
        for name in _names(letter, side)
    ]
    return KernelText(
        f"penstock_partial_{form.name}_{spans}{'_staged' if staged else ''}",
        header(target),
        source,
        ("queries", "plan", "numbers", *names),
        ("tops", "totals", "mixeds"),
    )


@cache
def merge_text(target: str, *, finished: bool) -> KernelText:
    """Return the kernel that merges partial results, into the output or into one partial result."""
    source = _body("merge.h", target).replace(
        "    WRITE_MERGED\n", _file("finished.h" if finished else "unfinished.h")
    )
    outputs = ("result",) if finished else ("top", "sum", "mix")
    name = f"penstock_merge{'' if finished else '_partial'}"
    inputs = ("tops", "totals", "mixeds", "plan", "lists", "sinks")
    return KernelText(name, header(target), source, inputs, outputs)


@cache
def header(target: str) -> str:
    """Return the source code before a kernel: constants, macros and functions of a target."""
    target_files = () if target == "lockstep" else (f"{target}.h", "lane.h")
    names = ("constants.h", *target_files, "body.h")
    return "".join(map(_file, names))


def tile_step(lanes: int) -> int:
    """Return the number of columns that a simdgroup reads in one iteration."""
    return COLUMNS * 32 // lanes


def tile_columns(form: SpanForm, step: int) -> int:
    """Return the number of columns staged at a time: a power of two, at least `step`."""
    columns = step if form.span == 1 else TILE_COLUMNS
    while columns < 64 and 2 * columns * form.column_bytes <= TILE_BYTES:
        columns *= 2
    return columns


def _file(name: str) -> str:
    return (FOLDER / name).read_text()


def _body(name: str, target: str) -> str:
    return (METAL_PROLOGUE if target == "metal" else "") + _file(name)


def _names(letter: str, side: SideForm) -> list[str]:
    return [letter + array.suffix for array in side.arrays]


def _types(side: SideForm, target: str) -> list[str]:
    words = {ArrayKind.OWN: "T", ArrayKind.CODES: "uint32_t", ArrayKind.HALF: HALF[target]}
    return [words[array.kind] for array in side.arrays]


def _pick(letter: str, side: SideForm, spans: int, target: str) -> str:
    """Generate code that selects the arrays of the task's span, from column 0 of its head on."""
    lines = []
    names = _names(letter, side)
    for name, kind in zip(names, _types(side, target), strict=True):
        lines.append(f"  DEVICE const {kind}* {name}_at = {name}0;\n")
    if spans > 1:
        lines.append("  switch (span) {\n")
        for i in range(1, spans):
            chosen = " ".join(f"{name}_at = {name}{i};" for name in names)
            lines.append(f"    case {i}: {chosen} break;\n")
        lines.append("    default: break;\n  }\n")
    units = "column_0" if side.span == 1 else f"column_0 / {side.span}"
    counts = (array.count for array in side.arrays)
    lines += [
        f"  {name}_at += {units} * {count};\n" for name, count in zip(names, counts, strict=True)
    ]
    return "".join(lines)


def _source(letter: str, word: str, side: SideForm, target: str, *, tile: bool) -> str:
    names, types = _names(letter, side), _types(side, target)
    places = [f"{name}_tile" if tile else f"{name}_at" for name in names]
    kinds = [f"SHARED_POINTER({kind})" if tile else f"DEVICE const {kind}*" for kind in types]
    if not side.bits:
        return f"Numbers<{kinds[0]}, {word}_DIM>{{{places[0]}}}"
    form = f"{kinds[0]}, {kinds[-1]}, {word}_DIM, {side.bits}"
    if side.span > 1:
        return f"Channels<{form}>{{{', '.join(places)}}}"
    if side.half:
        steps = f"{STEPS[side.bits + 1]}f, {STEPS[side.bits]}f"
        return f"Halves<{form}>{{{', '.join(places)}, {steps}}}"
    step = 1.0 if side.group else STEPS[side.bits]
    return f"Codes<{form}, {side.group}>{{{places[0]}, {places[1]}, {places[-1]}, {step}f}}"


def _read(path: Path, sides: Sequence[tuple[str, str, SideForm]], target: str) -> str:
    text = path.read_text()
    keys, values = sides
    tiles = "".join(_tiles(letter, side, target) for letter, _, side in sides)
    stage = "".join(_stage(*side) for side in sides)
    aligned = any(side.span > 1 for _, _, side in sides)
    text = text.replace("FIRST_TILE", "first / TILE * TILE" if aligned else "first")
    text = text.replace("  TILES\n", tiles).replace("        STAGE\n", stage)
    if not aligned:
        text = text.replace("KEYS_HERE", _source(*keys, target, tile=False))
        text = text.replace("VALUES_HERE", _source(*values, target, tile=False))
    return text.replace("KEY_TILE", _source(*keys, target, tile=True)).replace(
        "VALUE_TILE", _source(*values, target, tile=True)
    )


def _tiles(letter: str, side: SideForm, target: str) -> str:
    lines = []
    parts = zip(_names(letter, side), _types(side, target), side.arrays, strict=True)
    for name, kind, array in parts:
        if side.span == 1:
            count = f"TILE * {array.count}"
        elif array.kind is ArrayKind.CODES:
            count = f"TILE / 32 * {side.dim * side.bits}"
        else:
            count = str(side.dim)
        lines.append(f"  SHARED({kind}, {name}_tile, {count});\n")
    return "".join(lines)


def _stage(letter: str, word: str, side: SideForm) -> str:
    """Generate code that copies columns of keys or values to threadgroup memory.

    Columns `start..stop - 1`, or the whole tile for per-channel codes.
    """
    lines = []
    for name, array in zip(_names(letter, side), side.arrays, strict=True):
        line = ROW_STAGE
        if side.span > 1:
            line = CODES_STAGE if array.kind is ArrayKind.CODES else CHANNELS_STAGE
        words = {"NAME": name, "COUNT": array.count, "BITS": side.bits, "SPAN": side.span}
        for old, new in {**words, "DIM": f"{word}_DIM"}.items():
            line = line.replace(old, str(new))
        lines.append(indent(line, STAGE_INDENT))
    return "".join(lines)
