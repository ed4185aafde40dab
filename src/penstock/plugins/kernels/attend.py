"""Attention of one layer in a decode step with kernels: partial results per span, then a merge."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import mlx.core as mx

from penstock.attention import span_attention
from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.attention_plan import AttentionPlan
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.span_attention import MASKED, Partial
from penstock.kv import columns as col
from penstock.kv.codecs.coded import Coded
from penstock.kv.segment import Layer
from penstock.plugins.kernels import kernel_text
from penstock.plugins.kernels.dispatches import (
    THREADGROUPS,
    Dispatch,
    StepReading,
    dispatches,
    signature,
)
from penstock.plugins.kernels.kernel_text import KernelText
from penstock.plugins.kernels.span_forms import LEAST_NUMBERS, form_of

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelCall:
    text: KernelText
    inputs: list[mx.array]
    template: tuple[tuple[str, Any], ...]
    threadgroups: tuple[int, int, int]
    threads: int
    shapes: tuple[Shape, ...]
    dtypes: tuple[mx.Dtype, ...]


class UnknownKernel(Exception):
    """The self-test did not compile this kernel."""


Run: TypeAlias = Callable[[KernelCall], Sequence[mx.array]]


class DeviceKernels:
    """Runs kernels on MLX's GPU, compiling each at its first call."""

    def __init__(self, language: str) -> None:
        self._language = language
        self._made: dict[KernelText, Any] = {}

    def __call__(self, call: KernelCall) -> Sequence[mx.array]:
        kernel = self._made.get(call.text)  # not by name, which kernels for several sizes share
        if kernel is None:
            make: Any = mx.fast.metal_kernel if self._language == "metal" else mx.fast.cuda_kernel
            kernel = self._made[call.text] = make(
                name=call.text.name,
                input_names=list(call.text.inputs),
                output_names=list(call.text.outputs),
                source=call.text.source,
                header=call.text.header,
            )
        x, y, z = call.threadgroups
        outputs: Sequence[mx.array] = kernel(
            inputs=call.inputs,
            template=list(call.template),
            grid=(x * call.threads, y, z),
            threadgroup=(call.threads, 1, 1),
            output_shapes=list(call.shapes),
            output_dtypes=list(call.dtypes),
        )
        return outputs


@dataclass(frozen=True, slots=True)
class LayerStep:
    queries: mx.array
    """Queries of the model, (b, heads, width, d)."""
    reading: StepReading
    layout: AttentionPlan
    layer: int
    tails: Layer
    """Tail buffers of all slots, (slots, kv_heads, columns, dim), including the new tokens."""
    scale: float
    sinks: mx.array | None
    """Attention sinks in base 2, (heads,) float32."""


def device_kernels(device: AttentionBackend) -> KernelAttention | None:
    """Return the kernels for a backend's device; None if there are none."""
    if not isinstance(device, GPUBackend):
        return None
    call, language = device.call_kernel, device.kernel_language
    if call is not None:
        return KernelAttention(call, call.target)
    return None if language is None else KernelAttention(DeviceKernels(language), language)


class KernelAttention:
    def __init__(self, run: Run, target: str) -> None:
        self._call = run
        self._target = target
        self.known: set[Hashable] = set()
        self.threadgroups = THREADGROUPS
        """Minimum number of threadgroups to keep the device busy."""
        self.only_known = False
        """Whether to call only kernels that were called before; a compile error fails the step."""

    def attend(
        self,
        of: LayerStep,
        plans: dict[Hashable, list[Dispatch]],
        most_bytes: int | None = None,
    ) -> mx.array | None:
        """Attend to the plan of a step: (b, heads, width, value_dim).

        Returns None if no kernel supports the step, or its results exceed `most_bytes`.

        Args:
            of: queries, plan and tails of one layer.
            plans: plans of the step computed so far; new ones are added.
            most_bytes: maximum bytes of partial results; None for no limit.
        """
        keys, values = of.tails
        assert isinstance(keys, mx.array) and isinstance(values, mx.array)
        tail_form = form_of(of.tails, keys.dtype)
        kinds = signature(of.layout, of.layer, keys.dtype)
        if tail_form is None or kinds is None:
            return None
        key = of.reading.window, of.reading.kv_heads, tail_form, keys.shape[2], kinds
        if key not in plans:
            tails = tail_form, keys.shape[2]
            plans[key] = dispatches(of.reading, of.layout, of.layer, tails, self.threadgroups)
        planned = plans[key]
        if most_bytes is not None and of.reading.result_bytes(planned) > most_bytes:
            return None
        try:
            if len(planned) == 1 and planned[0].form == tail_form:
                return self._finished(of, planned[0])
            return self._merged(of, planned)
        except UnknownKernel:
            return None

    def _run(self, call: KernelCall) -> Sequence[mx.array]:
        kinds = tuple(array.dtype for array in call.inputs)
        key = call.text.name, call.template, kinds, call.dtypes
        if self.only_known and key not in self.known:
            raise UnknownKernel(call.text.name)
        self.known.add(key)
        return self._call(call)

    def _finished(self, of: LayerStep, planned: Dispatch) -> mx.array:
        """Attend with one dispatch, and merge its partial results into the output."""
        b, heads, width, _ = of.queries.shape
        partials = self._partials(of, planned, of.queries)
        shape = b, heads, width, planned.form.values.dim
        (result,) = self._merge(
            of, planned, partials, of.sinks, (shape,), (of.queries.dtype,), finished=True
        )
        return result

    def _merged(self, of: LayerStep, planned: Sequence[Dispatch]) -> mx.array:
        """Attend with several dispatches, and merge their results with plain operations."""
        parts = [self._part(of, dispatch) for dispatch in planned]
        b, heads, width, _ = of.queries.shape
        sunk = None
        if of.sinks is not None:
            by_head = of.sinks.reshape(of.reading.kv_heads, 1, -1, 1)
            sinks_by_row = mx.broadcast_to(by_head, (by_head.shape[0], b, by_head.shape[2], width))
            sunk = sinks_by_row.reshape(by_head.shape[0], -1, 1)
        result = span_attention.ungrouped(span_attention.merged(parts, sunk), b, heads)
        return result.astype(of.queries.dtype)

    def _part(self, of: LayerStep, planned: Dispatch) -> Partial:
        """Return the partial results of one dispatch, (kv_heads, b * repeats * width, ...)."""
        keys, values = planned.sides(of.layer, of.tails)[0]
        b, heads = of.queries.shape[:2]
        queries, kv_heads = of.queries, of.reading.kv_heads
        if isinstance(keys, Coded):
            transformed = keys.codec.transform_query(span_attention.grouped(queries, kv_heads))
            queries = span_attention.ungrouped(transformed, b, heads)
        partials = self._partials(of, planned, queries)
        rows, dim = b * of.reading.per_row, planned.form.values.dim
        shapes = tuple((kv_heads, rows, last) for last in (1, 1, dim))
        top, total, mixed = self._merge(
            of, planned, partials, None, shapes, (mx.float32,) * 3, finished=False
        )
        if isinstance(values, Coded):
            mixed = values.codec.inverse_transform(mixed, values.dim)
        return Partial(top, total, mixed)

    def _partials(self, of: LayerStep, planned: Dispatch, queries: mx.array) -> Sequence[mx.array]:
        form, geometry = planned.form, planned.geometry
        sides = planned.sides(of.layer, of.tails)
        spans = kernel_text.padded_spans(form, len(sides))
        padded = [*sides, *[sides[0]] * (spans - len(sides))]
        arrays = [array for pair in padded for array in col.arrays(*pair)]
        staged = geometry.simdgroups > 1 or form.span > 1
        step = kernel_text.tile_step(geometry.lanes)
        tile = kernel_text.tile_columns(form, step) if staged else step
        template = (
            *(("T", form.dtype), ("Q", queries.dtype)),
            *(("KEY_DIM", form.keys.dim), ("VALUE_DIM", form.values.dim)),
            *(("ROWS", geometry.rows), ("LANES", geometry.lanes)),
            *(("SIMDGROUPS", geometry.simdgroups), ("TILE", tile)),
        )
        count = of.reading.kv_heads, planned.partials
        flat = (max(LEAST_NUMBERS, prod(count)),)  # so that one source of the merge suffices
        return self._run(
            KernelCall(
                kernel_text.partial_text(self._target, form, spans, staged=staged),
                [queries, planned.plan, mx.array([of.scale * span_attention.LOG2_E]), *arrays],
                template,
                (planned.tasks, of.reading.kv_heads, planned.tiles),
                32 * geometry.simdgroups,
                (flat, flat, (*count, form.values.dim)),
                (mx.float32,) * 3,
            )
        )

    def _merge(
        self,
        of: LayerStep,
        planned: Dispatch,
        partials: Sequence[mx.array],
        sinks: mx.array | None,
        shapes: tuple[Shape, ...],
        dtypes: tuple[mx.Dtype, ...],
        *,
        finished: bool,
    ) -> Sequence[mx.array]:
        template = (
            *(("T", dtypes[0]), ("VALUE_DIM", planned.form.values.dim)),
            *(("SINKS", sinks is not None), ("SIMDGROUPS", 1)),
        )
        none = mx.array([MASKED])
        return self._run(
            KernelCall(
                kernel_text.merge_text(self._target, finished=finished),
                [*partials, planned.plan, planned.lists, none if sinks is None else sinks],
                template,
                (len(of.reading.rows) * of.reading.per_row, of.reading.kv_heads, 1),
                32,
                shapes,
                dtypes,
            )
        )
