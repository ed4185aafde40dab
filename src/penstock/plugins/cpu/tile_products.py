"""Compiled products of 8-bit activations with weights in codes of 4, 5, 6 or 8 bits.

A tile is 16 rows of a weight matrix. The codes of a block of 32 columns are stored so that a vector
register holds four columns of every row, as the processor's dot-product instructions need them: no
sum over lanes is needed, and a step reads the weights once, in order. Integer sums are exact and
the order of float operations is fixed, so that results are equal in every bit for any number of
rows and on every processor.

The functions are generated as LLVM IR, in loops that Numba compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

from penstock.plugins.cpu.compiled_cache import function_address

DotProduct: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""Function of an IR builder, sums, codes and activations, each in 16 lanes of four bytes; returns
the sums plus the products of the four bytes."""
Lookup: TypeAlias = Callable[[Any, Any], Any]
"""Function of an IR builder and 64 bytes, each a 4-bit float; returns their `FLOAT4_CODES`."""

TILE_ROWS = 16
"""Number of rows of a weight matrix that are multiplied together."""
BLOCK = 32
"""Number of columns whose activations share a scale."""
ROW_GROUP = 4
"""Number of rows of activations multiplied together; fewer are multiplied one by one."""
CHAINS = 4
"""Number of independent integer sums, the latency of an addition in cycles."""
FLOAT4_ZERO = 12
FLOAT4_CODES = tuple(
    FLOAT4_ZERO + sign * twice for sign in (1, -1) for twice in (0, 1, 2, 3, 4, 6, 8, 12)
)
"""Twice the value of each 4-bit float (e2m1, as in mxfp4), plus `FLOAT4_ZERO`."""
SCALE_FLOATS = 2
"""Number of floats stored per block of activations: its scale and its sum."""
PREFETCHED_BYTES = 4096
"""Number of bytes ahead of the current codes at which memory is prefetched."""


def block_bytes(bits: int, per_scale: int, scale_bytes: int, *, zero: int = 0) -> int:
    """Return the bytes of a tile's group of columns that share a scale.

    Args:
        bits: bits of a code: 4, 5, 6 or 8.
        per_scale: number of blocks of 32 columns that share a scale.
        scale_bytes: bytes of a scale or an offset.
        zero: code that represents 0, if offsets are computed from it; 0 if they are stored.
    """
    sides = 1 if zero else 2
    return TILE_ROWS * (sides * scale_bytes + per_scale * BLOCK * bits // 8)


@cache
def dot_product_name() -> str:
    """Return the best supported dot-product instructions: `vnni`, `avx2`, `neon` or `plain`."""
    import llvmlite.binding as llvm

    has = llvm.get_host_cpu_features()
    if all(map(has.get, ("avx512f", "avx512bw", "avx512vnni"))) and _takes_bytes():
        return "vnni"
    if has.get("avx2"):
        return "avx2"
    return "neon" if has.get("dotprod") and has.get("neon") else "plain"


def _takes_bytes() -> bool:
    """Return whether LLVM's VNNI intrinsic takes vectors of bytes, as since LLVM 22."""
    import llvmlite.binding as llvm

    try:
        llvm.parse_assembly(
            "declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)"
        ).verify()
    except RuntimeError:
        return False
    return True


@cache
def multiply_loop(
    bits: int,
    per_scale: int,
    scale_bytes: int,
    digits: int,
    instructions: str = "",
    *,
    floats: bool = False,
    zero: int = 0,
) -> int:
    """Compile the product of rows with tiles and return the address of the function.

    The function takes nine 64-bit integers: the address of the weights; the first tile and the end
    of the tiles; the number of blocks of a row; the address of the activations, (rows, digits,
    columns) int8; the address of the scale and sum of each block, (rows, blocks, 2) float32; the
    number of rows; the address of the result, float32, and the number of floats between its rows.

    Args:
        bits: bits of a code: 4, 5, 6 or 8.
        per_scale: number of blocks of 32 columns that share a scale and an offset.
        scale_bytes: 2 or 4, for scales and offsets in float16 or float32.
        digits: bytes of an activation, the most significant first.
        instructions: instructions to use, by default those of `dot_product_name`.
        floats: whether codes are 4-bit floats, converted by `FLOAT4_CODES`.
        zero: code that represents 0, if offsets are -zero x scale; 0 if offsets are stored.
    """
    instructions = instructions or dot_product_name()
    form = (bits, per_scale, scale_bytes, digits, zero)
    name = f"multiply {form} {floats} {instructions}"
    return function_address(name, lambda: _compile_multiply(form, instructions, floats=floats))


def _compile_multiply(
    form: tuple[int, int, int, int, int], instructions: str, *, floats: bool
) -> Any:
    """Compile `multiply_loop`; `form` is its numeric arguments."""
    from numba import cfunc, types

    bits, per_scale, scale_bytes, digits, zero = form
    dot = _DOT_PRODUCTS[instructions]
    needs_halves = dot is not _dot_vnni  # two products of 8 bits overflow a 16-bit sum
    halved, lookup = needs_halves and bits == 8, _LOOKUPS[instructions] if floats else None
    single = _tile_product(*form, 1, dot, lookup, halved=halved)
    group = _tile_product(*form, ROW_GROUP, dot, lookup, halved=halved)
    record = block_bytes(bits, per_scale, scale_bytes, zero=zero)
    together, tile_bytes, columns = ROW_GROUP, 4 * TILE_ROWS, BLOCK
    scale_row_bytes = 4 * SCALE_FLOATS

    def multiply(weights, first, last, blocks, x, scales, rows, result, stride):  # type: ignore[no-untyped-def]
        row_bytes, row_scales = digits * blocks * columns, scale_row_bytes * blocks
        whole = rows - rows % together
        for tile in range(first, last):
            codes = weights + tile * (blocks // per_scale) * record
            into = result + tile * tile_bytes
            for row in range(0, whole, together):
                group(codes, blocks, x + row * row_bytes, scales + row * row_scales,
                      into + 4 * row * stride, stride)  # fmt: skip
            for row in range(whole, rows):
                single(codes, blocks, x + row * row_bytes, scales + row * row_scales,
                       into + 4 * row * stride, stride)  # fmt: skip

    return cfunc(types.void(*[types.int64] * 9))(multiply)


def _tile_product(
    bits: int,
    per_scale: int,
    scale_bytes: int,
    digits: int,
    zero: int,
    rows: int,
    dot: DotProduct,
    lookup: Lookup | None,
    *,
    halved: bool,
) -> Any:
    """Return a Numba intrinsic that multiplies `rows` rows with one tile."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    byte, word32, word = ir.IntType(8), ir.IntType(32), ir.IntType(64)
    real = ir.FloatType()
    stored = ir.HalfType() if scale_bytes == 2 else real
    integers, reals = ir.VectorType(word32, TILE_ROWS), ir.VectorType(real, TILE_ROWS)
    sides = 1 if zero else 2
    header = sides * scale_bytes * TILE_ROWS

    def number(value: int) -> Any:
        return ir.Constant(word, value)

    def in_all_lanes(value: float, kind: Any) -> Any:
        return ir.Constant(kind, [value] * TILE_ROWS)

    def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
        return builder.load(builder.inttoptr(address, ir.PointerType(kind)), align=align)

    def broadcast(builder: Any, value: Any) -> Any:
        """Return a vector with the same value in all lanes."""
        empty = ir.Constant(ir.VectorType(value.type, TILE_ROWS), ir.Undefined)
        first = builder.insert_element(empty, value, ir.Constant(word32, 0))
        return builder.shuffle_vector(first, empty, in_all_lanes(0, integers))

    def bytes_of(builder: Any, vector: Any, first_bit: int, count: int) -> Any:
        """Return `count` bits of each byte of a vector, shifted to the lowest bits."""
        shifted = builder.lshr(vector, in_all_lanes(first_bit, integers)) if first_bit else vector
        return builder.and_(shifted, in_all_lanes(0x01010101 * (2**count - 1), integers))

    def pieces(builder: Any, codes: Any) -> Iterator[tuple[int, int, Any]]:
        """Yield the first of four columns, the shift of their codes, and the codes.

        Codes of 5 and 6 bits are stored as the low 4 bits of a block's codes, like codes of 4 bits,
        followed by the high bits.
        """

        def vector_at(index: int) -> Any:
            return load(builder, builder.add(codes, number(64 * index)), integers, 4)

        if bits == 8:
            for index in range(8):
                vector = vector_at(index)
                if halved:
                    yield 4 * index, 0, bytes_of(builder, vector, 0, 4)
                    yield 4 * index, 4, bytes_of(builder, vector, 4, 4)
                else:
                    yield 4 * index, 0, vector
            return
        more = bits - 4
        rest = [vector_at(4 + index) for index in range(more)]
        for index in range(8):  # four columns each
            low = bytes_of(builder, vector_at(index // 2), 4 * (index % 2), 4)
            if lookup is not None:
                low = lookup(builder, low)
            if more:
                of_vector = 8 // more
                shared = rest[index // of_vector]
                high = bytes_of(builder, shared, more * (index % of_vector), more)
                low = builder.or_(low, builder.shl(high, in_all_lanes(4, integers)))
            yield 4 * index, 0, low

    def block_sums(builder: Any, codes: Any, x: Any, row_bytes: Any) -> list[Any]:
        """Return a block's integer sums for each row and digit, as float32 vectors."""
        chains = max(1, CHAINS // (rows * digits))
        sums: dict[tuple[int, int, int], Any] = {}
        for parts_added, (column, power, part) in enumerate(pieces(builder, codes)):
            for place in range(rows * digits):
                start = builder.add(x, builder.mul(number(place), row_bytes))
                four = load(builder, builder.add(start, number(column)), word32, 1)
                key = (place, power, parts_added % chains)
                current = sums.get(key, in_all_lanes(0, integers))
                sums[key] = dot(builder, current, part, broadcast(builder, four))
        as_floats = []
        for place in range(rows * digits):
            total = None
            for (row_digit, power, _), part in sums.items():
                if row_digit == place:
                    counted = builder.shl(part, in_all_lanes(power, integers)) if power else part
                    total = counted if total is None else builder.add(total, counted)
            as_floats.append(builder.sitofp(total, reals))
        return as_floats

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        context: Any, codes: Any, blocks: Any, x: Any, scales: Any, result: Any, stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            codes, blocks, x, scales, result, stride = values

            fused = _declared(builder, "llvm.fma.v16f32", reals, [reals] * 3)
            text = ir.PointerType(byte)
            arguments = [text, *[word32] * 3]
            prefetch = _declared(builder, "llvm.prefetch.p0", ir.VoidType(), arguments)
            row_bytes = builder.mul(blocks, number(BLOCK))
            totals = [
                cgutils.alloca_once_value(builder, in_all_lanes(0.0, reals)) for _ in range(rows)
            ]
            groups = builder.sdiv(blocks, number(per_scale))
            record = block_bytes(bits, per_scale, scale_bytes, zero=zero)
            with cgutils.for_range(builder, groups) as loop:
                start = builder.add(codes, builder.mul(loop.index, number(record)))
                for ahead in range(0, record, 64):
                    address = builder.add(start, number(PREFETCHED_BYTES + ahead))
                    flags = [ir.Constant(word32, flag) for flag in (0, 3, 1)]
                    builder.call(prefetch, [builder.inttoptr(address, text), *flags])
                scale_and_offset = []
                for side in range(sides):
                    address = builder.add(start, number(side * scale_bytes * TILE_ROWS))
                    vector = load(builder, address, ir.VectorType(stored, TILE_ROWS), scale_bytes)
                    scale_and_offset.append(
                        vector if stored == real else builder.fpext(vector, reals)
                    )
                if zero:  # exact if `zero` or the scale is a power of two
                    zeros = in_all_lanes(-float(zero), reals)
                    scale_and_offset.append(builder.fmul(scale_and_offset[0], zeros))
                for inner in range(per_scale):
                    block = builder.add(builder.mul(loop.index, number(per_scale)), number(inner))
                    address = builder.add(start, number(header + inner * BLOCK * bits // 8 * 16))
                    activations = builder.add(x, builder.mul(block, number(BLOCK)))
                    sums = block_sums(builder, address, activations, row_bytes)
                    for row, total in enumerate(totals):
                        value = sums[row * digits]
                        for digit in range(1, digits):
                            lower = sums[row * digits + digit]
                            value = builder.call(fused, [value, in_all_lanes(256.0, reals), lower])
                        place = builder.add(builder.mul(number(row), blocks), block)
                        distance = builder.mul(place, number(4 * SCALE_FLOATS))
                        address = builder.add(scales, distance)
                        scale = broadcast(builder, load(builder, address, real, 4))
                        address = builder.add(address, number(4))
                        block_sum = broadcast(builder, load(builder, address, real, 4))
                        scale = builder.fmul(scale_and_offset[0], scale)
                        value = builder.call(fused, [scale, value, builder.load(total)])
                        value = builder.call(fused, [scale_and_offset[1], block_sum, value])
                        builder.store(value, total)
            for row, total in enumerate(totals):
                address = builder.add(result, builder.mul(number(4 * row), stride))
                into = builder.inttoptr(address, ir.PointerType(reals))
                builder.store(builder.load(total), into, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return multiply


# ---- dot products of four bytes per lane


def _declared(builder: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    from llvmlite import ir
    from numba.core import cgutils

    kind = ir.FunctionType(result, arguments)
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _vector(bits: int, lanes: int) -> Any:
    from llvmlite import ir

    return ir.VectorType(ir.IntType(bits), lanes)


def _dot_vnni(builder: Any, sums: Any, codes: Any, x: Any) -> Any:
    """Use AVX-512's `vpdpbusd`."""
    whole, bytes_ = _vector(32, 16), _vector(8, 64)
    arguments = (whole, bytes_, bytes_)
    dot = _declared(builder, "llvm.x86.avx512.vpdpbusd.512", whole, arguments)
    return builder.call(dot, [sums, builder.bitcast(codes, bytes_), builder.bitcast(x, bytes_)])


def _in_parts(builder: Any, lanes: int, operation: Callable[..., Any], *vectors: Any) -> Any:
    """Apply an operation to `lanes` lanes of vectors at a time, and concatenate the results."""
    from llvmlite import ir

    parts = []
    for first in range(0, TILE_ROWS, lanes):
        mask = ir.Constant(_vector(32, lanes), list(range(first, first + lanes)))
        parts.append(operation(builder, *(builder.shuffle_vector(x, x, mask) for x in vectors)))
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        mask = ir.Constant(_vector(32, size), list(range(size)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(one, two, mask) for one, two in pairs]
    return parts[0]


def multiply_bytes(builder: Any, codes: Any, x: Any) -> Any:
    """Multiply bytes of eight lanes, and add two products in 16 bits, by AVX2's `vpmaddubsw`."""
    halves, bytes_ = _vector(16, 16), _vector(8, 32)
    pairs = _declared(builder, "llvm.x86.avx2.pmadd.ub.sw", halves, (bytes_, bytes_))
    twos = builder.call(pairs, [builder.bitcast(part, bytes_) for part in (codes, x)])
    return builder.bitcast(twos, _vector(32, 8))


def add_halves(builder: Any, sums: Any) -> Any:
    """Add both 16-bit numbers of each of eight lanes, by AVX2's `vpmaddwd`."""
    from llvmlite import ir

    words, halves = _vector(32, 8), _vector(16, 16)
    added = _declared(builder, "llvm.x86.avx2.pmadd.wd", words, (halves, halves))
    return builder.call(added, [builder.bitcast(sums, halves), ir.Constant(halves, [1] * 16)])


def _dot_avx2(builder: Any, sums: Any, codes: Any, x: Any) -> Any:
    """Use AVX2."""

    def dot(builder: Any, sums: Any, codes: Any, x: Any) -> Any:
        return builder.add(sums, add_halves(builder, multiply_bytes(builder, codes, x)))

    return _in_parts(builder, 8, dot, sums, codes, x)


def _dot_neon(builder: Any, sums: Any, codes: Any, x: Any) -> Any:
    """Use Arm's `sdot`; codes of at most 6 bits are positive as signed bytes."""
    words, bytes_ = _vector(32, 4), _vector(8, 16)

    def dot(builder: Any, sums: Any, codes: Any, x: Any) -> Any:
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        function = _declared(builder, name, words, (words, bytes_, bytes_))
        return builder.call(function, [sums, *(builder.bitcast(y, bytes_) for y in (codes, x))])

    return _in_parts(builder, 4, dot, sums, codes, x)


def _dot_plain(builder: Any, sums: Any, codes: Any, x: Any) -> Any:
    """Use 32-bit multiplications, which every processor has."""
    from llvmlite import ir

    whole = _vector(32, TILE_ROWS)
    for byte in range(4):
        left = ir.Constant(whole, [24 - 8 * byte] * TILE_ROWS)
        right = ir.Constant(whole, [24] * TILE_ROWS)
        code = builder.lshr(builder.shl(codes, left), right)
        number = builder.ashr(builder.shl(x, left), right)
        sums = builder.add(sums, builder.mul(code, number))
    return sums


_DOT_PRODUCTS: dict[str, DotProduct] = {
    "vnni": _dot_vnni,
    "avx2": _dot_avx2,
    "neon": _dot_neon,
    "plain": _dot_plain,
}


def dot_product(instructions: str) -> DotProduct:
    """Return the dot product of bytes by the name of its instructions; see `dot_product_name`."""
    return _DOT_PRODUCTS[instructions]


# ---- conversion of 4-bit floats to codes


def _look_up(name: str, nbytes: int) -> Lookup:
    """Return a lookup by an LLVM intrinsic on vectors of `nbytes` bytes."""

    def look_up(builder: Any, floats: Any) -> Any:
        from llvmlite import ir

        lanes, kind = _vector(32, nbytes // 4), _vector(8, nbytes)
        table = ir.Constant(kind, list(FLOAT4_CODES) * (nbytes // 16))
        function = _declared(builder, name, kind, (kind, kind))
        return builder.bitcast(
            builder.call(function, [table, builder.bitcast(floats, kind)]), lanes
        )

    return lambda builder, floats: _in_parts(builder, nbytes // 4, look_up, floats)


def _look_up_plain(builder: Any, floats: Any) -> Any:
    """Select the code of each float by 16 comparisons."""
    from llvmlite import ir

    kind = _vector(8, 64)
    indices = builder.bitcast(floats, kind)
    codes = ir.Constant(kind, [0] * 64)
    for index, code in enumerate(FLOAT4_CODES):
        is_index = builder.icmp_unsigned("==", indices, ir.Constant(kind, [index] * 64))
        codes = builder.select(is_index, ir.Constant(kind, [code] * 64), codes)
    return builder.bitcast(codes, _vector(32, TILE_ROWS))


_LOOKUPS: dict[str, Lookup] = {
    "vnni": _look_up("llvm.x86.avx512.pshuf.b.512", 64),
    "avx2": _look_up("llvm.x86.avx2.pshuf.b", 32),
    "neon": _look_up("llvm.aarch64.neon.tbl1.v16i8", 16),
    "plain": _look_up_plain,
}
