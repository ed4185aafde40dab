"""Decode attention kernels, compiled as C++ with sanitizers, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from kernel_steps import Shape, Step, error
from lockstep import COMPILER, Program, Recorder

from penstock.attention.span_attention import AttentionWindow
from penstock.kv.segment import KVSpan
from penstock.plugins.kernels.dispatches import partial_bytes
from penstock.plugins.kernels.span_forms import HEAD_SIZES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is neither g++ nor clang++")
HALF, BRAIN = mx.float16, mx.bfloat16
SHAPES = {
    "one row, one part": Shape(shared=(), own=(5_000,), rows=1, repeats=1),
    "one row, many parts": Shape(HALF, 128, shared=(64, 300, 1, 33), rows=1, repeats=8, width=3),
    "16 rows": Shape(
        BRAIN, 128, kv_heads=1, repeats=4, rows=16, shared=(300,), own=(1, 40), sinks=True
    ),
    "ragged ends": Shape(HALF, 80, rows=5, shared=(200, 150), own=(), sinks=True),
    "window": Shape(dim=96, rows=3, width=2, window=AttentionWindow(90)),
    "window and kept": Shape(dim=96, rows=3, width=2, window=AttentionWindow(90, 8)),
    "14 parts": Shape(shared=(33,) * 14, own=(), rows=3, repeats=1, sinks=True),
    "tails alone": Shape(HALF, 112, shared=(), own=(), rows=4, repeats=3, sinks=True),
    "unequal sides": Shape(BRAIN, 192, 128, rows=2),
    "256": Shape(HALF, 256, rows=2, repeats=4),
    "512": Shape(dim=512, rows=1, repeats=2),
    "long tasks": Shape(HALF, 128, rows=6, repeats=4, shared=(1_500,), threadgroups=1),
    "one column of weight": Shape(dim=128, rows=3, repeats=2, sharp=60.0, threadgroups=1),
    "affine8": Shape(BRAIN, 128, scheme="affine8", repeats=8, sinks=True, shared=(300,)),
    "affine4": Shape(dim=64, scheme="affine4g32/affine4", window=AttentionWindow(90, 8)),
    "rotated": Shape(HALF, 128, scheme="rot4", rows=1, repeats=1),
    "turbo": Shape(dim=80, scheme="turbo4/turbo2", rows=1, sinks=True),
    "turbo of 3 bits": Shape(dim=64, scheme="turbo3/turbo8", rows=9, repeats=4, shared=(200,)),
    "5 and 6 bits": Shape(HALF, 96, scheme="affine5g32/turbo6", rows=3, repeats=4),
    "half bits": Shape(BRAIN, 128, scheme="turbo2.5/turbo3.5", rows=1, sinks=True),
    "half bits, 9 rows": Shape(dim=64, scheme="turbo5.5/affine6", rows=9, shared=(200,)),
    "by channel": Shape(dim=80, scheme="kivi4/turbo4", rows=1, shared=(64, 700), threadgroups=1),
    "by channel, 9 rows": Shape(HALF, 128, scheme="kivi5/turbo3", rows=9, repeats=4),
    "by channel, window": Shape(
        dim=64, scheme="kivi3/turbo2.5", rows=3, window=AttentionWindow(90, 8), sinks=True
    ),
    "by channel, ragged ends": Shape(
        BRAIN, 64, scheme="kivi8/raw", rows=5, shared=(200, 150), own=(), threadgroups=1
    ),
}
"""Together all head sizes, types, widths of codes and ways to divide rows."""


PLAN = Shape(kv_heads=1, repeats=1, sinks=True)
PLANS = tuple(
    replace(PLAN, rows=rows, shared=(1,) * shared, own=own)
    for rows in (1, 2, 3, 5, 9)
    for shared, own in ((2, ()), (8, ()), (14, ()), (1, (1,)))
)
"""Plans of which every kernel is known that 1 to 16 rows with up to 14 shared parts take."""


MUTANTS = {
    "the scores of a masked column count": ("SELECT(seen,", "SELECT(column < stop,"),
    "the window is one longer": ("column >= limit[2]", "column + 1 >= limit[2]"),
    "kept columns are hidden": ("(column < limit[3]) ||", "(column < limit[3] - 1) ||"),
    "a row reads what lies behind its end": ("(column < limit[0]) &&", ""),
    "a token sees the next": ("plan[limit + 1] + token", "plan[limit + 1] + token + 1"),
    "the running sum does not fade": ("total[i] *= fade;", ""),
    "results do not fade": ("mixed[i * value_chunks * CHUNK + e] *= fade;", ";"),
    "lanes are not merged": ("m >= LANES; m /= 2", "m > 16; m /= 2"),
    "lanes of a column are not summed": ("m > 0; m /= 2", "m > 1; m /= 2"),
    "tokens share a limit": ("plan[limit + 2] + token", "plan[limit + 2]"),
    "a tile is read before it is whole": ("    BARRIER;\n    FOR_", "    FOR_"),
    "a tile is overwritten while it is read": ("    }\n    BARRIER;\n  }", "    }\n  }"),
    "sinks do not count": ("SINKS ? EXP2(", "!SINKS ? EXP2("),
    "the merge takes the last maximum": ("best = MAX(best, tops", "best = (tops"),
    "the merge leaves the first part out": (
        "int i = lists[row]; i <",
        "int i = lists[row] + 1; i <",
    ),
    "a span's other arrays": ("case 1: k_at = k1;", "case 1: k_at = k0;"),
    "the next column's scale": ("scales[group])", "scales[group + 1])"),
}
MUTANTS_OF_LOADS = {
    "a code ends with its word": ("codes[at + bit / 32 + 1]", "0"),
    "both halves have one step": ("scales, finer_step}", "scales, coarser_step}"),
    "the second half begins late": ("if (chunk < chunks)", "if (chunk <= chunks)"),
    "a code by channel ends with its word": ("codes[at + DIM + e]", "0"),
    "the scale of the first channels": ("channel = chunk * CHUNK + e", "channel = e"),
    "a tile lies as memory does": ("return i % words * DIM + i / words;", "return i;"),
    "the first word of each span": ("+ start % 64 / 32 * BITS", ""),
    "tiles begin between two words": ("first / TILE * TILE", "first"),
    "columns in front of a task count": ("larger(start, first)", "start"),
}


def build(path: Path, shapes: list[Shape], **settings: object) -> Program:
    recorder = Recorder()
    for shape in shapes:
        Step.random(shape).attend(recorder)
    return Program.build(path, list(recorder.variants), **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    shapes = [*SHAPES.values(), *PLANS]
    made = build(tmp_path_factory.mktemp("kernels") / "kernels", shapes)
    yield made
    made.close()


BOTH = Shape(rows=3, shared=(200, 150), own=(), width=2, window=AttentionWindow(90, 8), sinks=True)
MUTATED = [
    BOTH,
    replace(BOTH, sharp=60.0),
    Shape(rows=5, shared=(150,), own=(), repeats=4, threadgroups=1, sinks=True),
    Shape(rows=1, scheme="affine8", shared=(200,), own=()),
]


CODED = [
    Shape(rows=1, scheme="affine5/turbo2.5", shared=(64,), own=()),
    Shape(HALF, rows=3, scheme="kivi3/raw", shared=(100,), own=(), window=AttentionWindow(60, 8)),
    Shape(HALF, 128, rows=5, scheme="kivi4/raw", shared=(200,), own=(), threadgroups=1),
]
"""The second form is staged by 64 columns, the third by 32."""


def changed(path: Path, shapes: list[Shape], mutants: dict[str, tuple[str, str]]) -> Program:
    changes = [(), *([change] for change in mutants.values())]
    return build(path, shapes, changes=changes, flags=("-O0",))


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = changed(tmp_path_factory.mktemp("mutants") / "kernels", MUTATED, MUTANTS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def mutants_of_loads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = changed(tmp_path_factory.mktemp("mutants") / "kernels", CODED, MUTANTS_OF_LOADS)
    yield made
    made.close()


@pytest.mark.parametrize("backwards", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernel_matches_float64_attention(program: Program, shape: Shape, backwards: bool) -> None:
    program.backwards, program.races = backwards, 0
    assert error(Step.random(shape, seed=1 + backwards), program) < 1
    assert program.races == 0


LENGTHS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 900)), min_size=16, max_size=16)
WINDOWS = st.sampled_from((None, AttentionWindow(1), AttentionWindow(70, 20)))


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(list(SHAPES)), LENGTHS, st.integers(0, 40), WINDOWS, st.integers(0, 999))
def test_random_plans_match_reference(
    program: Program,
    name: str,
    lengths: list[int],
    tail: int,
    window: AttentionWindow | None,
    seed: int,
) -> None:
    shape = SHAPES[name]
    own = len(shape.shared) + len(shape.own)
    shape = replace(
        shape,
        shared=tuple(lengths[: len(shape.shared)]),
        own=tuple(lengths[len(shape.shared) : own]),
        tail=tail,
        window=window or shape.window,
    )
    step, recorder = Step.random(shape, seed), Recorder()
    step.attend(recorder)
    assume(set(recorder.variants) <= set(program.variants))  # a window may hide whole parts
    program.races = 0
    assert error(step, program) < 1
    assert program.races == 0


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 16),
    st.lists(st.one_of(st.integers(1, 9), st.integers(1, 5_000)), min_size=1, max_size=14),
    st.one_of(st.none(), st.integers(1, 5_000)),
    st.sampled_from((None, AttentionWindow(700, 20))),
    st.integers(0, 999),
)
@example(16, [5_000], 1, None, 0)
@example(2, [9], 5_000, None, 3)
@example(15, [1, 800, 3], None, None, 1)
@example(1, [1], None, AttentionWindow(1), 2)
def test_random_rows_match_reference(
    program: Program,
    rows: int,
    shared: list[int],
    own: int | None,
    window: AttentionWindow | None,
    seed: int,
) -> None:
    """1 to 16 rows; spans of 1 to 5,000 tokens, shared and own."""
    assume(sum(shared) <= 6_000)
    owned = () if own is None else (own,)
    seen = window or PLAN.window
    shape = replace(PLAN, rows=rows, shared=tuple(shared), own=owned, window=seen)
    step, recorder = Step.random(shape, seed), Recorder()
    step.attend(recorder)
    assume(set(recorder.variants) <= set(program.variants))  # a window may hide whole parts
    program.races = 0
    assert error(step, program) < 1
    assert program.races == 0


COUNTED = tuple(
    change
    for side, word in (("k", "KEY"), ("v", "VALUE"))
    for change in (
        (f"DEVICE const T* {side}_at = {side}0;", f"Once<T> {side}_at = {side}0;"),
        (
            f"Numbers<DEVICE const T*, {word}_DIM>{{{side}_at}}",
            f"Numbers<Once<T>, {word}_DIM>{{{side}_at}}",
        ),
    )
)
"""Changes with which every number of a span that is loaded twice is counted as a race."""
ONCE = {
    "one row, heads that share a key head": Shape(HALF, rows=1, repeats=4, shared=(300, 5)),
    "32 stacked rows": Shape(HALF, rows=8, repeats=4, shared=(300,)),
    "rows that end at other columns": Shape(rows=5, repeats=4, shared=(200, 150), own=()),
    "several new tokens": Shape(HALF, 128, rows=2, repeats=4, width=3, shared=(130,)),
    "as long tasks as can be": Shape(HALF, 80, rows=3, repeats=8, threadgroups=1),
}
TWICE = Shape(HALF, rows=16, repeats=4, shared=(300,))
"""Of 64 stacked rows 32 are read together, so that shared numbers are loaded twice."""


def test_kv_is_loaded_once_per_head_group(tmp_path: Path) -> None:
    shapes = [*ONCE.values(), TWICE]
    program = build(tmp_path / "kernels", shapes, changes=[COUNTED], flags=("-O0",))
    for name, shape in ONCE.items():
        program.races = 0
        assert error(Step.random(shape), program) < 1, name
        assert program.races == 0, name
    assert error(Step.random(TWICE), program) < 1
    assert program.races == 2 * TWICE.kv_heads * 300 * TWICE.dim
    program.close()


def test_sinks_take_all_weight_when_scores_are_inf(program: Program) -> None:
    step = Step.random(SHAPES["tails alone"])
    keys = mx.where(mx.isnan(step.tails[0]), step.tails[0], mx.array(-6e4, HALF))
    step.tails, step.queries = (keys, step.tails[1]), mx.full(step.queries.shape, 6e4, HALF)
    step.scale = 1e30
    assert not step.attend(program).any()
    step.sinks = -1e9 * mx.ones_like(step.sinks)  # type: ignore[arg-type]
    assert not step.attend(program).any()


def test_minus_infinity_score_has_zero_weight(program: Program) -> None:
    step = Step.random(SHAPES["tails alone"])
    tail = step.rows[0].slot, slice(None), slice(0, 1)
    ones = mx.full(step.queries.shape, 1.0, HALF)
    step.queries, step.sinks = ones, mx.zeros_like(step.sinks)  # type: ignore[arg-type]
    keys = np.array(step.tails[0])
    keys[tail] = -np.inf
    step.tails = mx.array(keys), step.tails[1]
    found = np.array(step.attend(program))
    keys[tail] = -100.0
    step.tails = mx.array(keys), step.tails[1]
    assert np.isfinite(found).all()
    assert np.array_equal(found, np.array(step.attend(program)))


def noticed(program: Program, shapes: list[Shape], change: int) -> bool:
    program.change, program.races = change, 0
    return any(error(Step.random(shape), program) > 1 for shape in shapes) or program.races > 0


@pytest.mark.parametrize("name", MUTANTS)
def test_check_detects_kernel_mutants(mutants: Program, name: str) -> None:
    assert noticed(mutants, MUTATED, 1 + list(MUTANTS).index(name))


@pytest.mark.parametrize("name", MUTANTS_OF_LOADS)
def test_check_detects_loader_mutants(mutants_of_loads: Program, name: str) -> None:
    assert noticed(mutants_of_loads, CODED, 1 + list(MUTANTS_OF_LOADS).index(name))


def test_check_accepts_unchanged_kernels(mutants: Program, mutants_of_loads: Program) -> None:
    assert not noticed(mutants, MUTATED, 0)
    assert not noticed(mutants_of_loads, CODED, 0)


def test_mutations_match_existing_source() -> None:
    recorder = Recorder()
    for shape in (*MUTATED, *CODED):
        Step.random(shape).attend(recorder)
    texts = "".join(kernel.header + kernel.source for kernel, *_ in recorder.variants)
    assert all(old in texts for old, _ in (*MUTANTS.values(), *MUTANTS_OF_LOADS.values()))


def test_out_of_bounds_reads_are_detected(program: Program) -> None:
    """A span one column longer than its arrays is reported by the sanitizer."""
    step = Step.random(Shape(shared=(), own=(64,), rows=1, repeats=1))
    (row,) = step.rows
    one = row.parts[0]
    assert one.segment.tokens == 64
    step.rows = [replace(row, parts=(KVSpan(one.segment, 0, 65),), position=row.position + 1)]
    broken = replace(program, _process=None)
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        step.attend(broken)


def test_every_head_size_and_dispatch_is_covered() -> None:
    assert {shape.dim for shape in SHAPES.values()} == set(HEAD_SIZES)
    recorder = Recorder()
    for shape in SHAPES.values():
        Step.random(shape).attend(recorder)
    partial = [one for one in recorder.variants if one[0].name.startswith("penstock_partial")]
    given = [dict(template) for _, template, _, _ in partial]
    assert {one["T"] for one in given} == {mx.float16, mx.bfloat16, mx.float32}
    assert {one["SIMDGROUPS"] for one in given} >= {1, 2, 8}
    assert {one["ROWS"] for one in given} == {1, 2, 4}


def test_dispatch_has_at_most_31_buffers() -> None:
    """Metal's maximum; reached by twelve raw spans and by four of three arrays."""
    recorder = Recorder()
    for scheme in ("raw", "affine4", "turbo4"):
        Step.random(Shape(scheme=scheme, shared=(64,) * 40, own=(), rows=1)).attend(recorder)
    texts = [kernel for kernel, *_ in recorder.variants]
    assert max(len(one.inputs) + len(one.outputs) for one in texts) == 30
    assert any("raw_raw_12" in one.name for one in texts)


def test_reserved_bytes_match_results() -> None:
    """A step's estimate equals the bytes its calls return."""
    recorder = Recorder()
    for shape in SHAPES.values():
        recorder.nbytes = 0
        step = Step.random(shape)
        step.attend(recorder)
        most = max(row.position for row in step.rows) + shape.width
        heads = shape.kv_heads * shape.repeats
        parts, dim = 1 + len(step.rows[0].parts), shape.value_dim or shape.dim
        per_row = partial_bytes(heads, dim, shape.width, most, parts)
        assert 0 < recorder.nbytes <= len(step.rows) * per_row
