"""Operations that a decode step puts into MLX's graph, beside mlx-lm's own step.

Counted without a GPU: nothing is evaluated. On a CPU MLX writes the functions of `mx.fast` as many
operations; here they count as one each, as on a GPU.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.reads import decode_reads
from penstock.attention.selection.key_centers import KeyCenters
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.rotations import rotations
from penstock.attention.selection.selection import READ_ALL, Selection
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.models.layer_seams import attach
from penstock.models.loading import load
from penstock.models.mlx_lm import plain_caches
from penstock.plugins.kernels.ways import AttentionWay, Ways
from penstock.recall import MODEL_PATH

VIEWS = frozenset(
    {
        "Broadcast",
        "ExpandDims",
        "Flatten",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unflatten",
    }
)
"""Operations that start nothing on a GPU, where their input is contiguous."""
TAIL = 5
"""Tokens in the tail of a step that is counted."""
OUTSIDE = 4
"""Operations of a step outside the layers: the token, its embedding, a norm, and the head."""
SHORT, LONG, CHOSEN, SEGMENTS = 100, 2_000, 256, 4
"""Tokens of a short and of a long sequence, tokens read of it, and segments that it may have."""


@dataclass(frozen=True, slots=True)
class StepOperations:
    """Number of operations in the graph of one step."""

    computing: int
    """Operations that are not views."""
    views: int

    @classmethod
    def of(cls, outputs: mx.array) -> StepOperations:
        """Count the operations that outputs still need."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "graph.dot")
            mx.export_to_dot(str(file), outputs)
            names = re.findall(r'\[label ="(\w+)"', file.read_text())
        views = sum(name in VIEWS for name in names)
        return cls(len(names) - views, views)


@dataclass(frozen=True, slots=True)
class LayerOperations:
    """Operations of one layer of the embedded model in a step, views not counted."""

    own: int
    """Operations of mlx-lm's own layer."""
    whole: int
    """Operations if all tokens are read."""
    choice: int
    """Operations if some tokens of one segment are read."""
    further: int
    """Additional operations for each further segment."""
    rest: int
    """Operations if the rest is read in two bits as well."""

    MOST_MORE: ClassVar[int] = 4
    """Goal: operations beyond mlx-lm's where all tokens are read."""
    MOST_CHOICE: ClassVar[int] = 40
    COMPILED_OWN: ClassVar[int] = 17
    """Operations of mlx-lm's own layer where MLX compiles its activation to one. Without a C++
    compiler a CPU's MLX compiles nothing, and each layer has more."""

    @property
    def met(self) -> bool:
        return self.whole - self.own <= self.MOST_MORE and self.choice <= self.most_choice

    @property
    def most_choice(self) -> int:
        """Goal: operations of a choice, `MOST_CHOICE` where MLX compiles."""
        return self.MOST_CHOICE + max(0, self.own - self.COMPILED_OWN)


def layer_operations() -> LayerOperations:
    """Count the operations of a layer, from a step of the embedded model; see the module."""
    model, _ = load(MODEL_PATH)
    own, layers = own_step(model, SHORT), len(model.layers)

    def of_layer(step: StepOperations) -> int:
        return (step.computing - OUTSIDE) // layers

    ends = [LONG * number // SEGMENTS for number in range(1, SEGMENTS + 1)]
    choice, parts = (engine_step(model, of, CHOSEN) for of in ([LONG], ends))
    return LayerOperations(
        of_layer(own),
        of_layer(engine_step(model, [SHORT])),
        of_layer(choice),
        -(-(parts.computing - choice.computing) // (layers * (SEGMENTS - 1))),
        of_layer(engine_step(model, [LONG], CHOSEN, rest=True)),
    )


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """Bytes that a step moves for each further token of a sequence: of a layer and key head."""

    own: float
    """Bytes of mlx-lm's own step."""
    whole: float
    """Bytes if all tokens are read, from parts that are joined."""
    choice: float
    """Bytes if some tokens are read; of the index and the scores."""
    rest: float
    """Bytes if the rest is read in two bits as well."""


def read_bytes() -> ReadBytes:
    """Count the bytes from steps of the embedded model in float32 behind two lengths.

    They are the inputs and outputs of all operations but views.
    """
    model, _ = load(MODEL_PATH)
    heads = sum(shape.kv_heads for shape in _shapes(model))

    def of(step: Callable[[int], Callable[[mx.array], mx.array]]) -> float:
        with fused_functions():
            short, long = (moved_bytes(step(tokens)) for tokens in (LONG, 2 * LONG))
        return (long - short) / (LONG * heads)

    def engine(attend: int | None, *, rest: bool = False) -> float:
        return of(lambda tokens: _step(model, [tokens], attend, rest=rest))

    own = of(lambda tokens: _own_step(model, tokens))
    return ReadBytes(own, engine(None), engine(CHOSEN), engine(CHOSEN, rest=True))


def moved_bytes(step: Callable[[mx.array], mx.array]) -> int:
    """Return the bytes that a step of one token reads and writes; nothing is evaluated."""
    graph: list[dict[str, Any]] = []
    mx.export_function(graph.append, step, mx.zeros((1, 1), mx.int32))
    operations = [part for part in graph if part["type"] == "primitive"]
    broadcast = {
        operation["outputs"][0][0]: operation["inputs"][0]
        for operation in operations
        if operation["name"] == "Broadcast"
    }
    return sum(_moved(part, broadcast) for part in operations if part["name"] not in VIEWS)


def _moved(operation: dict[str, Any], broadcast: dict[str, Any]) -> int:
    """Return the bytes that an operation reads and writes.

    Args:
        broadcast: arrays that were broadcast, by the name of the result.
    """
    inputs = [_nbytes(broadcast.get(array[0], array)) for array in operation["inputs"]]
    outputs = sum(map(_nbytes, operation["outputs"]))
    if operation["name"] in ("Gather", "GatherAxis"):  # reads what it writes
        return 2 * outputs + sum(inputs[1:])
    if operation["name"] == "SliceUpdate":  # in place
        return 2 * inputs[1]
    return sum(inputs) + outputs


def _nbytes(array: tuple[str, tuple[int, ...], mx.Dtype]) -> int:
    _, shape, dtype = array
    return math.prod(shape) * dtype.size


@contextmanager
def fused_functions() -> Iterator[None]:
    """Let each function of `mx.fast` be one operation in a `with` block; results are not right."""
    names = "rms_norm", "rope", "scaled_dot_product_attention"
    before = {name: getattr(mx.fast, name) for name in names}

    def one(x: mx.array, *more: Any, **others: Any) -> mx.array:
        inputs = [part for part in (*more, *others.values()) if isinstance(part, mx.array)]
        depends: mx.array = mx.depends([x], inputs)[0]
        return depends

    for name in names:
        setattr(mx.fast, name, one)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(mx.fast, name, function)


def own_step(model: Any, tokens: int) -> StepOperations:
    """Count a step of mlx-lm's own model and caches behind some tokens."""
    with fused_functions():
        return StepOperations.of(_own_step(model, tokens)(mx.zeros((1, 1), mx.int32)))


def engine_step(
    model: Any, ends: Sequence[int], attend: int | None = None, *, rest: bool = False
) -> StepOperations:
    """Count a step of one sequence by a GPU's back end, with the way that joins parts.

    Args:
        model: model of which each layer has full attention.
        ends: ends of the sequence's segments.
        attend: number of tokens that the step reads; all by default.
        rest: whether to read the other tokens in two bits.
    """
    with fused_functions():
        step = _step(model, ends, attend, rest=rest)
        return StepOperations.of(step(mx.zeros((1, 1), mx.int32)))


def _own_step(model: Any, tokens: int) -> Callable[[mx.array], mx.array]:
    caches = plain_caches(model)
    mx.eval(model(mx.zeros((1, tokens), mx.int32), cache=caches), [c.state for c in caches])
    return lambda token: model(token, cache=caches)


def _step(
    model: Any, ends: Sequence[int], attend: int | None = None, *, rest: bool = False
) -> Callable[[mx.array], mx.array]:
    attach(model)
    step = decode_step(model, ends, attend, rest=rest)
    reads = decode_reads(step, [AttentionWindow()] * len(step.tails.shapes))
    return lambda token: model(token, cache=reads)


def decode_step(
    model: Any, ends: Sequence[int], attend: int | None = None, *, rest: bool = False
) -> DecodeStep:
    """Return a step of one sequence of random keys and values; see `engine_step`."""
    shapes, device = _shapes(model), GPUBackend()
    selection = READ_ALL if attend is None else _selection(model, shapes, attend, rest=rest)
    spans = []
    for start, stop in zip((0, *ends), ends, strict=False):
        layers = tuple(
            tuple(
                mx.random.normal((1, shape.kv_heads, stop - start, dim), shape.dtype)
                for dim in (shape.key_dim, shape.value_dim)
            )
            for shape in shapes
        )
        mx.eval(layers)
        segment = selection.index.indexed(Segment(layers), start, device)  # type: ignore[arg-type]
        spans.append(KVSpan(segment, start, stop - start))
    tails = Tails(1, TAIL + 1, shapes)
    tails.ready()
    row = DecodeRow(tuple(spans), ends[-1] + TAIL, 0, TAIL)
    ways = Ways(always=AttentionWay.FUSED)
    return DecodeStep.of(device, [row], tails, ways=ways, selection=selection)


def _shapes(model: Any) -> list[LayerShape]:
    caches = plain_caches(model)
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=caches))
    return [LayerShape.of(cache.keys, cache.values) for cache in caches]


def _selection(model: Any, shapes: Sequence[LayerShape], attend: int, *, rest: bool) -> Selection:
    turning = rotations(model, [shape.key_dim for shape in shapes])
    centers = {
        layer: KeyCenters(np.zeros((shape.kv_heads, shape.key_dim), np.float32), rotation)
        for layer, (shape, rotation) in enumerate(zip(shapes, turning, strict=True))
    }
    return Selection(attend, KeyIndex(frozenset(centers), rest, centers))
