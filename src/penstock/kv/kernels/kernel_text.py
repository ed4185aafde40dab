"""The text of each kernel: bodies, macros and the lines that follow from the form of a span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.kv.kernels.span_forms import SideForm, SpanForm

FOLDER = Path(__file__).parent
MOST_BUFFERS = 24
"""Buffers of all spans of a dispatch; with queries, plan, numbers and three results 30 of the 31
that Metal takes."""
SPANS = (4, 12)
"""Numbers of spans that there is a kernel for; a dispatch of fewer repeats its first. The last is
the most, fewer where a span has more than two arrays."""
TILE_BYTES = 16_384
"""Threadgroup memory of a tile; a threadgroup of Metal has 32 KiB."""
COLUMNS = 4
"""Columns that a lane reads between two looks at the running maximum, as in constants.h."""
METAL_PROLOGUE = """  const uint3 group_ = threadgroup_position_in_grid;
  const uint simdgroup_ = simdgroup_index_in_threadgroup;
  const int lane_ = int(thread_index_in_simdgroup);
  (void)simdgroup_;
"""
HALF = {"metal": "float16_t", "cuda": "__half", "lockstep": "half_t"}


@dataclass(frozen=True, slots=True)
class KernelText:
    """Arguments of `mx.fast.metal_kernel` and `mx.fast.cuda_kernel`."""

    name: str
    header: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def most_spans(form: SpanForm) -> int:
    """Return how many spans of this form a dispatch reads."""
    return min(SPANS[-1], MOST_BUFFERS // form.arrays)


def padded_spans(form: SpanForm, spans: int) -> int:
    """Return how many spans the kernel for so many takes: few kernels are compiled."""
    return next(count for count in (*SPANS[:-1], most_spans(form)) if count >= spans)


@cache
def partial_text(target: str, form: SpanForm, spans: int, *, staged: bool) -> KernelText:
    """Return the kernel that lets rows read up to `spans` spans of a form."""
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
    """Return the kernel that merges a row's partial results: finished, or as a partial result."""
    source = _body("merge.h", target).replace(
        "    WRITE_MERGED\n", _file("finished.h" if finished else "unfinished.h")
    )
    outputs = ("result",) if finished else ("top", "sum", "mix")
    name = f"penstock_merge{'' if finished else '_partial'}"
    inputs = ("tops", "totals", "mixeds", "plan", "lists", "sinks")
    return KernelText(name, header(target), source, inputs, outputs)


@cache
def header(target: str) -> str:
    """Return the text in front of a kernel; tests have macros, loads and stores of their own."""
    own = () if target == "lockstep" else (f"{target}.h", "lane.h")
    names = ("constants.h", *own, "body.h")
    return "".join(map(_file, names))


def tile_step(lanes: int) -> int:
    """Return how many columns a simdgroup reads together."""
    return COLUMNS * 32 // lanes


def tile_columns(form: SpanForm, number_bytes: int, step: int) -> int:
    """Return how many columns are staged at a time: a power of two, at least `step`."""
    per_column = sum(
        side.dim * side.bits // 8 if side.bits else side.dim * number_bytes
        for side in (form.keys, form.values)
    )
    columns = step
    while columns < 64 and 2 * columns * per_column <= TILE_BYTES:
        columns *= 2
    return columns


def _file(name: str) -> str:
    return (FOLDER / name).read_text()


def _body(name: str, target: str) -> str:
    return (METAL_PROLOGUE if target == "metal" else "") + _file(name)


def _names(letter: str, side: SideForm) -> list[str]:
    return [letter, f"{letter}s", f"{letter}o"][: side.arrays]


def _types(side: SideForm, target: str) -> list[str]:
    half = HALF[target]
    return ["T"] if not side.bits else ["uint32_t", half, half][: side.arrays]


def _columns(side: SideForm) -> list[int]:
    """Return the elements of a column in each array of a side."""
    if not side.bits:
        return [side.dim]
    groups = side.dim // side.group if side.group else 1
    return [side.dim * side.bits // 32, groups, groups][: side.arrays]


def _pick(letter: str, side: SideForm, spans: int, target: str) -> str:
    """Choose the arrays of the task's span, from its head's column 0 on."""
    lines = []
    arrays = list(zip(_names(letter, side), _types(side, target), _columns(side), strict=True))
    for name, kind, _ in arrays:
        lines.append(f"  DEVICE const {kind}* {name}_at = {name}0;\n")
    if spans > 1:
        lines.append("  switch (span) {\n")
        for i in range(1, spans):
            chosen = " ".join(f"{name}_at = {name}{i};" for name, _, _ in arrays)
            lines.append(f"    case {i}: {chosen} break;\n")
        lines.append("    default: break;\n  }\n")
    lines += [f"  {name}_at += column_0 * {per_column};\n" for name, _, per_column in arrays]
    return "".join(lines)


def _source(letter: str, word: str, side: SideForm, target: str, *, tile: bool) -> str:
    """Return the expression of what a side is loaded from."""
    names, types = _names(letter, side), _types(side, target)
    places = [f"{name}_tile" if tile else f"{name}_at" for name in names]
    kinds = [f"SHARED_POINTER({kind})" if tile else f"DEVICE const {kind}*" for kind in types]
    if not side.bits:
        return f"Numbers<{kinds[0]}, {word}_DIM>{{{places[0]}}}"
    places = [places[0], places[1], places[-1]]
    step = "numbers[1]" if letter == "k" else "numbers[2]"
    form = f"{kinds[0]}, {kinds[1]}, {word}_DIM, {side.bits}, {side.group}"
    return f"Codes<{form}>{{{', '.join(places)}, {step}}}"


def _read(path: Path, sides: Sequence[tuple[str, str, SideForm]], target: str) -> str:
    text = path.read_text()
    keys, values = sides
    tiles, stage = [], []
    for letter, _, side in sides:
        parts = zip(_names(letter, side), _types(side, target), _columns(side), strict=True)
        for name, kind, per_column in parts:
            tiles.append(f"  SHARED({kind}, {name}_tile, TILE * {per_column});\n")
            stage.append(
                f"        for (int i = own; i < (stop - start) * {per_column}; i += threads) "
                f"{name}_tile[i] = {name}_at[start * {per_column} + i];\n"
            )
    return (
        text.replace("  TILES\n", "".join(tiles))
        .replace("        STAGE\n", "".join(stage))
        .replace("KEY_TILE", _source(*keys, target, tile=True))
        .replace("VALUE_TILE", _source(*values, target, tile=True))
        .replace("KEYS_HERE", _source(*keys, target, tile=False))
        .replace("VALUES_HERE", _source(*values, target, tile=False))
    )
