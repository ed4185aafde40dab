"""Products of queries with the key index in AVX2's instructions; see `index_products`.

Vectors hold all words of a token, so the codes need not be moved between lanes. Sums are below 2^15
(`MOST_SUM`), so they are added in 16 bits, two of each 32-bit lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS
from penstock.plugins.cpu.tile_products import add_halves, multiply_bytes

BY_TOKEN = {
    4: [*range(0, 8, 2), *range(1, 8, 2), *range(8, 16, 2), *range(9, 16, 2)],
    8: list(range(BLOCK_TOKENS)),
}
"""Words per token that `totals_by_token` takes, and the order of the tokens in its result."""
CODE_BITS = 2
LOWEST_CODES = 0x03030303
VECTOR_WORDS = 8


def totals_by_token(
    builder: Any, codes: Any, x: Any, words: int, queries: int, shifts: int
) -> list[Any]:
    """Generate the sums of each query with a block's tokens, (16,) int32 in `BY_TOKEN`'s order.

    Args:
        codes: address of the block's codes, (tokens, words) uint32.
        x: address of the queries' bytes, (queries, shifts, words) int32.
    """
    from llvmlite import ir

    word32, word64 = ir.IntType(32), ir.IntType(64)
    vector = ir.VectorType(word32, VECTOR_WORDS)

    def load(address: Any, offset: int, count: int) -> Any:
        place = builder.add(address, ir.Constant(word64, offset))
        kind = ir.PointerType(ir.VectorType(word32, count))
        return builder.load(builder.inttoptr(place, kind), align=4)

    def every(number: int) -> Any:
        return ir.Constant(vector, [number] * VECTOR_WORDS)

    def shuffled(one: Any, other: Any, lanes: Sequence[int]) -> Any:
        kind = ir.VectorType(word32, len(lanes))
        return builder.shuffle_vector(one, other, ir.Constant(kind, list(lanes)))

    def added(one: Any, other: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), 2 * VECTOR_WORDS)
        parts = builder.bitcast(one, halves), builder.bitcast(other, halves)
        return builder.bitcast(builder.add(*parts), vector)

    def joined(vectors: list[Any], lanes: Sequence[int], others: Sequence[int]) -> list[Any]:
        """Add some lanes of each pair of vectors to other lanes of it."""
        return [
            added(shuffled(one, other, lanes), shuffled(one, other, others))
            for one, other in zip(vectors[::2], vectors[1::2], strict=True)
        ]

    numbers = []
    for query in range(queries):
        places = [4 * words * (shifts * query + shift) for shift in range(shifts)]
        rows = [load(x, place, words) for place in places]
        repeated = [lane % words for lane in range(VECTOR_WORDS)]
        numbers.append([shuffled(row, row, repeated) for row in rows])
    sums: list[list[Any]] = [[] for _ in range(queries)]
    for number in range(words * BLOCK_TOKENS // VECTOR_WORDS):
        held = load(codes, 4 * VECTOR_WORDS * number, VECTOR_WORDS)
        moved = [builder.lshr(held, every(CODE_BITS * shift)) for shift in range(shifts)]
        groups = [builder.and_(part, every(LOWEST_CODES)) for part in moved]
        for of_query, into in zip(numbers, sums, strict=True):
            products = map(multiply_bytes, [builder] * shifts, groups, of_query)
            into.append(reduce(added, products))
    totals = []
    for vectors in sums:
        for _ in range(2):  # neighboring lanes of 128 bits
            vectors = joined(vectors, (0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15))
        if words == VECTOR_WORDS:
            vectors = joined(vectors, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
        first, second = (add_halves(builder, part) for part in vectors)
        totals.append(shuffled(first, second, range(BLOCK_TOKENS)))
    return totals
