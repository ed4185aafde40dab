"""Vectorized scores of blocks: products with the key index, and with key centers.

A vector holds a word of codes of each token of a block, or a cosine or sine of each of 16 blocks.
Integer sums of products of bytes are exact, as in `tile_products`, so that scores do not depend on
which queries are multiplied together.

The functions are generated as LLVM IR, for loops that Numba compiles.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS
from penstock.attention.selection.rotations import TILE_BLOCKS
from penstock.plugins.cpu.attention_tiles import LANES, Vectors, vector_function
from penstock.plugins.cpu.tile_products import dot_product, dot_product_name
from penstock.plugins.cpu.token_products import BY_TOKEN, totals_by_token

SHIFTS = 4
"""Number of 2-bit codes in a byte. A group is the four codes at one shift in a word."""
QUERIES = (4, 2, 1)
"""Numbers of queries that can be multiplied together, in descending order."""
HALF_BIAS = 2.0**112
"""Factor that corrects a float16 whose bits were shifted to their places in float32."""


@cache
def block_product(words: int, queries: int, instructions: str = "") -> Any:
    """Return a Numba intrinsic for the maximum product of queries with the tokens of a block.

    It takes the addresses of the block's codes, (tokens, words) uint32; its scales, float16; the
    queries' bytes, (queries, shifts, words) int32; numbers to subtract from the queries' sums,
    int32; and the results, float32; and the number of bytes between results of queries.

    Args:
        words: number of words of codes of a token.
        queries: number of queries.
        instructions: instructions to use, by default those of `dot_product_name`.
    """
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    instructions = instructions or dot_product_name()
    dot, by_token = dot_product(instructions), instructions == "avx2" and words in BY_TOKEN
    word32, word64, real = ir.IntType(32), ir.IntType(64), ir.FloatType()
    lanes, reals = ir.VectorType(word32, BLOCK_TOKENS), ir.VectorType(real, BLOCK_TOKENS)
    chains = max(1, 4 // queries)  # independent sums, the latency of an addition in cycles

    def every(value: float, kind: Any) -> Any:
        return ir.Constant(kind, [value] * BLOCK_TOKENS)

    def load(builder: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
        place = builder.add(address, ir.Constant(word64, offset))
        return builder.load(builder.inttoptr(place, ir.PointerType(kind)), align=align)

    def in_all_lanes(builder: Any, value: Any) -> Any:
        empty = ir.Constant(lanes, ir.Undefined)
        first = builder.insert_element(empty, value, ir.Constant(word32, 0))
        return builder.shuffle_vector(first, empty, every(0, lanes))

    def shuffled(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
        return builder.shuffle_vector(one, other, ir.Constant(lanes, places))

    def of_tokens(builder: Any, vectors: list[Any], word: int) -> Any:
        """Return one word of each token, from vectors of all words in order."""
        left = []
        for number, vector in enumerate(vectors):
            first = BLOCK_TOKENS * number
            place = [words * token + word - first for token in range(BLOCK_TOKENS)]
            left.append((vector, [at if 0 <= at < BLOCK_TOKENS else -1 for at in place]))
        while len(left) > 1 or left[0][1] != list(range(BLOCK_TOKENS)):
            joined = []
            for pair in range(0, len(left), 2):
                (one, at), (other, behind) = left[pair], left[min(pair + 1, len(left) - 1)]
                places = [
                    a if a >= 0 else (BLOCK_TOKENS + b if b >= 0 else token)
                    for token, (a, b) in enumerate(zip(at, behind, strict=True))
                ]
                held = [
                    token if a >= 0 or b >= 0 else -1
                    for token, (a, b) in enumerate(zip(at, behind, strict=True))
                ]
                joined.append((shuffled(builder, one, other, places), held))
            left = joined
        return left[0][0]

    def largest(builder: Any, numbers: Any) -> Any:
        for apart in (8, 4, 2, 1):
            other = [(lane + apart) % BLOCK_TOKENS for lane in range(BLOCK_TOKENS)]
            moved = shuffled(builder, numbers, numbers, other)
            above = builder.fcmp_ordered(">", numbers, moved)
            numbers = builder.select(above, numbers, moved)
        return builder.extract_element(numbers, ir.Constant(word32, 0))

    def totals_by_word(builder: Any, codes: Any, x: Any) -> list[Any]:
        """Generate the sums of each query with the tokens of a block, (16,) int32."""
        vectors = [load(builder, codes, 64 * n, lanes, 4) for n in range(words)]
        sums = [[every(0, lanes)] * chains for _ in range(queries)]
        for word in range(words):
            of_block = of_tokens(builder, vectors, word)
            for shift in range(SHIFTS):
                moved = builder.lshr(of_block, every(2 * shift, lanes)) if shift else of_block
                group = builder.and_(moved, every(0x03030303, lanes))
                for query in range(queries):
                    place = words * (SHIFTS * query + shift) + word
                    one = in_all_lanes(builder, load(builder, x, 4 * place, word32, 4))
                    chain = shift % chains
                    sums[query][chain] = dot(builder, sums[query][chain], group, one)
        return [reduce(builder.add, parts) for parts in sums]

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        context: Any, codes: Any, sizes: Any, x: Any, less: Any, into: Any, stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            codes, sizes, x, less, into, stride = values
            halves = load(builder, sizes, 0, ir.VectorType(ir.IntType(16), BLOCK_TOKENS), 2)
            bits = builder.shl(builder.zext(halves, lanes), every(13, lanes))
            size = builder.fmul(builder.bitcast(bits, reals), every(HALF_BIAS, reals))
            if by_token:  # in another order, and the largest is the same
                size = shuffled(builder, size, size, BY_TOKEN[words])
                totals = totals_by_token(builder, codes, x, words, queries, SHIFTS)
            else:
                totals = totals_by_word(builder, codes, x)
            for query, total in enumerate(totals):
                off = in_all_lanes(builder, load(builder, less, 4 * query, word32, 4))
                total = builder.sub(builder.shl(total, every(1, lanes)), off)
                products = builder.fmul(builder.sitofp(total, reals), size)
                place = builder.add(into, builder.mul(stride, ir.Constant(word64, query)))
                address = builder.inttoptr(place, ir.PointerType(real))
                builder.store(largest(builder, products), address, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return multiply


@cache
def center_product(queries: int) -> Any:
    """Return a Numba intrinsic for the products of queries with the centers of 16 blocks.

    It takes the addresses of the blocks' cosines and sines, (rows, 16) float32; the queries'
    factors, (queries, rows); terms added to the queries' products, (queries,); and the results,
    (16,) each; the number of bytes between results of queries; and the number of rows, which must
    be even. The order of sums is the same for any number of queries.
    """
    chains = 2

    def body(
        of: Vectors, table: Any, factors: Any, added: Any, into: Any, stride: Any, rows: Any
    ) -> None:
        from numba.core import cgutils

        builder, sums = of.builder, []
        for query in range(queries):
            firsts = of.spread(of.load_float(of.offset(added, query))), of.every(0.0)
            sums.append([cgutils.alloca_once_value(builder, first) for first in firsts])
        with cgutils.for_range(builder, builder.sdiv(rows, of.number(chains))) as loop:
            for chain in range(chains):
                row = builder.add(builder.mul(loop.index, of.number(chains)), of.number(chain))
                turn = of.load(of.offset(table, builder.mul(row, of.number(TILE_BLOCKS))))
                for query in range(queries):
                    place = builder.add(builder.mul(rows, of.number(query)), row)
                    factor = of.spread(of.load_float(of.offset(factors, place)))
                    total = sums[query][chain]
                    builder.store(of.fused(factor, turn, builder.load(total)), total)
        for query, parts in enumerate(sums):
            total = builder.fadd(*(builder.load(part) for part in parts))
            of.store(total, builder.add(into, builder.mul(stride, of.number(query))))

    assert TILE_BLOCKS == LANES
    return vector_function(6, body)
