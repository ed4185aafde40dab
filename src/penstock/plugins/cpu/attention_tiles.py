"""Vectorized attention: scores, weights and weighted values of four queries at a time.

Sums have a fixed order: those of scores and of weights are over 16 lanes, which are then added by
halves; those of values are token by token. A token that a query does not see has the weight 0,
which changes no bit of a sum. So results do not depend on which queries are computed together.

The functions are generated as LLVM IR, for loops that Numba compiles.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from functools import cache
from typing import Any

LANES = 16
"""Number of floats in a vector."""
QUERIES = 4
"""Number of queries that are computed together."""
KEYS = 4
"""Number of keys that are multiplied together."""
BLOCK_TOKENS = 128
"""Number of tokens under one softmax; blocks start at multiples of it and are merged in order."""
PREFETCHED_BYTES = 4096
"""Number of bytes ahead of the current keys and values at which memory is prefetched."""
UNSEEN = -1e30
"""Score of a token that a query does not see, and the maximum of no scores."""
LOWEST = -87.0
"""Lower bound of arguments of `exp`, which is not subnormal there."""
ROUNDER = 1.5 * 2**23
"""Number that, added to a float32, leaves the nearest integer in the low bits."""
FLOAT_BYTES, HALF_BYTES = 4, 2
"""Bytes of an element of keys and values."""
MOST_HALF = 65_504.0
"""Largest float16."""
HAS_FLOAT16 = platform.machine() in ("arm64", "aarch64")
"""Whether this processor computes with float16; others at most convert it."""
MAXIMUM, TOTAL = 0, 1
"""Offsets in a query's state, after the weighted values, of the maximum and the sum of weights."""


def padded(dim: int) -> int:
    """Return a number of dimensions, rounded up to whole vectors."""
    return -(-dim // LANES) * LANES


def state_floats(value_dim: int) -> int:
    """Return the number of floats of a query's state: weighted values, maximum, sum of weights."""
    return padded(value_dim) + LANES


def _halves(unit: int) -> tuple[list[int], list[int]]:
    """Return the lanes of two vectors that are the low and the high halves of units of lanes."""
    lanes = list(range(2 * LANES))
    if unit <= 4:  # 128 bits of each in turn
        lanes = [v * LANES + 4 * i + k for i in range(4) for v in (0, 1) for k in range(4)]
    low = [lane for place, lane in enumerate(lanes) if place % unit < unit // 2]
    high = [lane for place, lane in enumerate(lanes) if place % unit >= unit // 2]
    return low, high


_HALVES = [_halves(unit) for unit in (16, 8, 4, 2)]


@cache
def converts_halves() -> bool:
    """Return whether this processor has instructions to convert float16."""
    import llvmlite.binding as llvm

    return HAS_FLOAT16 or bool(llvm.get_host_cpu_features().get("f16c"))


@cache
def lane_order(count: int) -> tuple[int, ...]:
    """Return the index of the vector whose sum `sums_of_lanes` puts into each lane."""
    left = [[place] * LANES for place in range(count)]
    for low, _ in _HALVES:
        pairs = zip(left[::2], left[1::2] or left, strict=True)
        left = [[(one + other)[lane] for lane in low] for one, other in pairs]
    return tuple(left[0])


class Vectors:
    """Builder of LLVM IR for vectors of 16 float32."""

    def __init__(self, builder: Any) -> None:
        from llvmlite import ir

        self.builder = builder
        self.word, self.int32 = ir.IntType(64), ir.IntType(32)
        self.float, self.bit = ir.FloatType(), ir.IntType(1)
        self.floats, self.ints = (ir.VectorType(x, LANES) for x in (self.float, self.int32))
        self.halves = ir.VectorType(ir.HalfType(), LANES)
        self._constant, self._vector, self._pointer = ir.Constant, ir.VectorType, ir.PointerType
        self._function = ir.FunctionType

    def number(self, value: int) -> Any:
        return self._constant(self.word, value)

    def every(self, value: float) -> Any:
        return self._constant(self.floats, [value] * LANES)

    def every_int(self, value: int) -> Any:
        return self._constant(self.ints, [value] * LANES)

    def offset(self, address: Any, numbers: Any, nbytes: int = 4) -> Any:
        """Return the address after `numbers` elements, an int or IR value, of `nbytes` bytes."""
        if isinstance(numbers, int):
            return self.builder.add(address, self.number(nbytes * numbers))
        return self.builder.add(address, self.builder.mul(numbers, self.number(nbytes)))

    def load(self, address: Any, lanes: int = LANES) -> Any:
        """Load a vector of which only the first `lanes` lanes are read; others are 0."""
        place = self.builder.inttoptr(address, self._pointer(self.floats))
        if lanes == LANES:
            return self.builder.load(place, align=4)
        kind = self._vector(self.bit, LANES)
        mask = self._constant(kind, [int(lane < lanes) for lane in range(LANES)])
        pointer = self._pointer(self.floats)
        arguments = [pointer, self.int32, kind, self.floats]
        function = self._declared("llvm.masked.load.v16f32.p0", self.floats, arguments)
        align = self._constant(self.int32, 4)
        return self.builder.call(function, [place, align, mask, self.every(0.0)])

    def load_side(self, address: Any, nbytes: int, lanes: int) -> Any:
        """Load a vector of keys or values as float32; float16 is supported for whole vectors."""
        if nbytes == FLOAT_BYTES:
            return self.load(address, lanes)
        place = self.builder.inttoptr(address, self._pointer(self.halves))
        return self.builder.fpext(self.builder.load(place, align=2), self.floats)

    def load_float(self, address: Any) -> Any:
        place = self.builder.inttoptr(address, self._pointer(self.float))
        return self.builder.load(place, align=4)

    def store(self, value: Any, address: Any) -> None:
        place = self.builder.inttoptr(address, self._pointer(value.type))
        self.builder.store(value, place, align=4)

    def lanes_of(self, value: Any, other: Any, lanes: Sequence[int]) -> Any:
        kind = self._vector(self.int32, len(lanes))
        return self.builder.shuffle_vector(value, other, self._constant(kind, list(lanes)))

    def prefetch(self, address: Any, nbytes: int) -> None:
        """Prefetch `nbytes` bytes."""
        from llvmlite import ir

        text = self._pointer(ir.IntType(8))
        arguments = [text, self.int32, self.int32, self.int32]
        function = self._declared("llvm.prefetch.p0", ir.VoidType(), arguments)
        flags = [self._constant(self.int32, flag) for flag in (0, 3, 1)]
        for ahead in range(0, nbytes, 64):
            place = self.builder.add(address, self.number(ahead))
            self.builder.call(function, [self.builder.inttoptr(place, text), *flags])

    def spread(self, value: Any) -> Any:
        """Return a vector with the same number in all lanes."""
        empty = self._constant(self.floats, self._undefined)
        first = self.builder.insert_element(empty, value, self._constant(self.int32, 0))
        return self.lanes_of(first, empty, [0] * LANES)

    @property
    def _undefined(self) -> Any:
        from llvmlite import ir

        return ir.Undefined

    def fused(self, x: Any, y: Any, z: Any) -> Any:
        """Return x * y + z, rounded once."""
        function = self._declared("llvm.fma.v16f32", self.floats, [self.floats] * 3)
        return self.builder.call(function, [x, y, z])

    def halved(self, x: Any) -> Any:
        """Convert to float16, clipping to its range."""
        for sign, most in (("<", MOST_HALF), (">", -MOST_HALF)):
            bound = self.every(most)
            x = self.builder.select(self.builder.fcmp_ordered(sign, bound, x), bound, x)
        return self.builder.fptrunc(x, self.halves)

    def greater(self, x: Any, y: Any) -> Any:
        """Return the maximum per lane; NaN where `x` is NaN."""
        less = self.builder.fcmp_ordered("<", x, y)
        return self.builder.select(less, y, x)

    def sums_of_lanes(self, vectors: Sequence[Any]) -> Any:
        """Return a vector with the sums of the vectors' lanes, in `lane_order`.

        Shuffles stay within 128 bits where possible; others are slower and need registers.
        """
        left = list(vectors)
        for low, high in _HALVES:
            pairs = zip(left[::2], left[1::2] or left, strict=True)
            left = [
                self.builder.fadd(self.lanes_of(*pair, low), self.lanes_of(*pair, high))
                for pair in pairs
            ]
        return left[0]

    def maximum_of_lanes(self, vector: Any) -> Any:
        """Return a vector with the maximum of all lanes in every lane."""
        half = LANES // 2
        while half:
            turned = self.lanes_of(vector, vector, [lane ^ half for lane in range(LANES)])
            vector = self.greater(vector, turned)
            half //= 2
        return vector

    def exp(self, x: Any) -> Any:
        """Return e^x for x <= 0, exact for 0: a power of two times a Taylor polynomial."""
        builder, log_2 = self.builder, math.log(2)
        low = self.every(LOWEST)
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        rounder = self.every(ROUNDER)
        biased = self.fused(x, self.every(1 / log_2), rounder)
        rest = self.fused(builder.fsub(biased, rounder), self.every(-log_2), x)
        result = self.every(1 / 720)
        for factor in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            result = self.fused(result, rest, self.every(factor))
        power = builder.shl(builder.bitcast(biased, self.ints), self.every_int(23))
        power = builder.add(power, self.every_int(127 << 23))
        return builder.fmul(result, builder.bitcast(power, self.floats))

    def tanh(self, x: Any) -> Any:
        """Return the hyperbolic tangent: (1 - e^-2|x|) / (1 + e^-2|x|), with the sign of x."""
        builder = self.builder
        bits = builder.bitcast(x, self.ints)
        sign = builder.and_(bits, self.every_int(-(2**31)))
        size = builder.bitcast(builder.and_(bits, self.every_int(2**31 - 1)), self.floats)
        power = self.exp(builder.fmul(size, self.every(-2.0)))
        one = self.every(1.0)
        ratio = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
        signed = builder.or_(builder.bitcast(ratio, self.ints), sign)
        return builder.bitcast(signed, self.floats)

    def _declared(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        from numba.core import cgutils

        kind = self._function(result, arguments)
        return cgutils.get_or_insert_function(self.builder.module, kind, name)


def vector_function(arguments: int, body: Any) -> Any:
    """Return a Numba intrinsic of a tuple of `arguments` 64-bit integers, generated by `body`."""
    from numba import types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        from numba.core import cgutils

        body(Vectors(builder), *cgutils.unpack_tuple(builder, values[0], arguments))
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def function(context: Any, values: Any) -> Any:
        return types.void(types.UniTuple(types.int64, arguments)), generate

    return function


@cache
def halve_function() -> Any:
    """Return a function that rounds float32 to float16.

    Its arguments: addresses of the numbers and of the result, and their number, a multiple of
    `LANES`.
    """

    def body(of: Vectors, numbers: Any, result: Any, count: Any) -> None:
        from numba.core import cgutils

        bounds = of.number(0), count, of.number(LANES), of.word
        with cgutils.for_range_slice(of.builder, *bounds) as (place, _):
            rounded = of.halved(of.load(of.offset(numbers, place)))
            into = of.builder.inttoptr(
                of.offset(result, place, HALF_BYTES), rounded.type.as_pointer()
            )
            of.builder.store(rounded, into, align=HALF_BYTES)

    return vector_function(3, body)


@cache
def widen_function() -> Any:
    """Return a function that converts float16 to float32; see `halve_function`."""

    def body(of: Vectors, numbers: Any, result: Any, count: Any) -> None:
        from numba.core import cgutils

        bounds = of.number(0), count, of.number(LANES), of.word
        with cgutils.for_range_slice(of.builder, *bounds) as (place, _):
            wide = of.load_side(of.offset(numbers, place, HALF_BYTES), HALF_BYTES, LANES)
            of.store(wide, of.offset(result, place))

    return vector_function(3, body)


@cache
def score_function(key_dim: int, nbytes: int = FLOAT_BYTES) -> Any:
    """Return a function that multiplies four queries by keys of `nbytes` bytes per element.

    Its arguments: addresses of the queries, (4, padded key_dim) float32, and of the keys, (n,
    key_dim); n; the address of the scores, (4, BLOCK_TOKENS); and the bytes between keys and those
    that are prefetched while they are multiplied.
    """
    width = padded(key_dim)
    vectors = width // LANES

    def body(of: Vectors, queries: Any, keys: Any, tokens: Any, scores: Any, ahead: Any) -> None:
        def products(count: int, token: Any) -> Any:
            start = of.offset(keys, of.builder.mul(token, of.number(key_dim)), nbytes)
            sums: list[Any] = [None] * (QUERIES * count)
            of.prefetch(of.builder.add(start, ahead), nbytes * count * key_dim)
            for vector in range(vectors):
                lanes = min(LANES, key_dim - vector * LANES)
                places = [key * key_dim + vector * LANES for key in range(count)]
                sides = [
                    of.load_side(of.offset(start, place, nbytes), nbytes, lanes) for place in places
                ]
                for query in range(QUERIES):
                    x = of.load(of.offset(queries, query * width + vector * LANES))
                    for key, side in enumerate(sides):
                        place = query * count + key
                        so_far = sums[place]
                        sums[place] = (
                            of.builder.fmul(x, side) if vector == 0 else of.fused(x, side, so_far)
                        )
            order = lane_order(len(sums))
            by_lane: list[Any] = [None] * len(sums)
            for lane, vector in enumerate(order[:: LANES // len(sums)]):
                by_lane[vector] = sums[lane]
            return of.sums_of_lanes(by_lane)

        from numba.core import cgutils

        whole = of.builder.and_(tokens, of.number(-KEYS))
        with cgutils.for_range_slice(of.builder, of.number(0), whole, of.number(KEYS), of.word) as (
            token,
            _,
        ):
            result = products(KEYS, token)
            into = of.offset(scores, token)
            for query in range(QUERIES):
                four = of.lanes_of(result, result, range(query * KEYS, (query + 1) * KEYS))
                of.store(four, of.offset(into, query * BLOCK_TOKENS))
        with cgutils.for_range_slice(of.builder, whole, tokens, of.number(1), of.word) as (
            token,
            _,
        ):
            result = products(1, token)
            into = of.offset(scores, token)
            for query in range(QUERIES):
                lane = LANES // QUERIES * query
                single = of.builder.extract_element(result, of.int32(lane))
                of.store(single, of.offset(into, query * BLOCK_TOKENS))

    return vector_function(5, body)


@cache
def weigh_function(soft_cap: float) -> Any:
    """Return a function that turns a query's scores of a block into weights.

    Its arguments: address of the scores, (BLOCK_TOKENS,); first and end of the visible columns of
    the block; end of the columns that are visible in addition, from 0 on; and the address to which
    it writes the query's maximum and sum.
    """

    def body(of: Vectors, scores: Any, start: Any, end: Any, kept: Any, totals: Any) -> None:
        builder = of.builder
        lanes = of.ints([of.int32(lane) for lane in range(LANES)])
        first, last, besides = (
            of.lanes_of(
                builder.insert_element(of.every_int(0), builder.trunc(x, of.int32), of.int32(0)),
                of.every_int(0),
                [0] * LANES,
            )
            for x in (start, end, kept)
        )
        values, masks = [], []
        for place in range(0, BLOCK_TOKENS, LANES):
            columns = builder.add(lanes, of.every_int(place))
            near = builder.icmp_signed(">=", columns, first)
            seen = builder.or_(near, builder.icmp_signed("<", columns, besides))
            seen = builder.and_(seen, builder.icmp_signed("<", columns, last))
            value = of.load(of.offset(scores, place))
            if soft_cap:
                capped = of.tanh(builder.fmul(value, of.every(1 / soft_cap)))
                value = builder.fmul(capped, of.every(soft_cap))
            values.append(builder.select(seen, value, of.every(UNSEEN)))
            masks.append(seen)
        top = values[0]
        for value in values[1:]:
            top = of.greater(value, top)
        top = of.maximum_of_lanes(top)
        total = None
        for place, (value, seen) in enumerate(zip(values, masks, strict=True)):
            weight = of.exp(builder.fsub(value, top))
            weight = builder.select(seen, weight, of.every(0.0))
            of.store(weight, of.offset(scores, place * LANES))
            total = weight if total is None else builder.fadd(total, weight)
        zero = of.int32(0)
        of.store(builder.extract_element(top, zero), of.offset(totals, MAXIMUM))
        total = of.sums_of_lanes([total])
        of.store(builder.extract_element(total, zero), of.offset(totals, TOTAL))

    return vector_function(5, body)


@cache
def mix_function(value_dim: int, nbytes: int = FLOAT_BYTES) -> Any:
    """Return a function that adds weighted values to the states of four queries.

    Its arguments: addresses of the weights, (4, BLOCK_TOKENS), and of the values, (n, value_dim) of
    `nbytes` bytes per element; n; the address of the states, (4, state_floats); and the bytes
    between values and those that are prefetched while they are added.
    """
    width = state_floats(value_dim)

    def body(of: Vectors, weights: Any, values: Any, tokens: Any, states: Any, ahead: Any) -> None:
        from numba.core import cgutils

        for first in range(0, value_dim, LANES * 4):
            starts = list(range(first, min(first + LANES * 4, value_dim), LANES))
            places = [
                of.offset(states, query * width + start)
                for query in range(QUERIES)
                for start in starts
            ]
            sums = [cgutils.alloca_once_value(of.builder, of.load(place)) for place in places]
            with cgutils.for_range(of.builder, tokens) as loop:
                token = loop.index
                row = of.offset(values, of.builder.mul(token, of.number(value_dim)), nbytes)
                later = of.builder.add(of.offset(row, first, nbytes), ahead)
                of.prefetch(later, nbytes * len(starts) * LANES)
                sides = [
                    of.load_side(
                        of.offset(row, start, nbytes), nbytes, min(LANES, value_dim - start)
                    )
                    for start in starts
                ]
                of_token = of.offset(weights, token)
                for query in range(QUERIES):
                    address = of.offset(of_token, query * BLOCK_TOKENS)
                    weight = of.spread(of.load_float(address))
                    for number, side in enumerate(sides):
                        place = sums[query * len(starts) + number]
                        total = of.fused(weight, side, of.builder.load(place))
                        of.builder.store(total, place)
            for place, total in zip(places, sums, strict=True):
                of.store(of.builder.load(total), place)

    return vector_function(5, body)


@cache
def merge_function(value_dim: int) -> Any:
    """Return a function that merges a query's state for a block into that for previous blocks.

    Its arguments: addresses of the state to update and of the block's.
    """
    width = padded(value_dim)

    def body(of: Vectors, state: Any, block: Any) -> None:
        builder = of.builder
        tops = [of.load_float(of.offset(x, width + MAXIMUM)) for x in (state, block)]
        spreads = [of.spread(top) for top in tops]
        top = of.greater(*spreads)
        factors = [of.exp(builder.fsub(x, top)) for x in spreads]
        for place in range(0, width, LANES):
            before = builder.fmul(of.load(of.offset(state, place)), factors[0])
            mixed = of.fused(of.load(of.offset(block, place)), factors[1], before)
            of.store(mixed, of.offset(state, place))
        totals = [of.spread(of.load_float(of.offset(x, width + TOTAL))) for x in (state, block)]
        total = of.fused(totals[1], factors[1], builder.fmul(totals[0], factors[0]))
        for number, value in ((MAXIMUM, top), (TOTAL, total)):
            single = builder.extract_element(value, of.int32(0))
            of.store(single, of.offset(state, width + number))

    return vector_function(2, body)
