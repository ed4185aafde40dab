"""Streamed attention to long contexts, which reads KV piece by piece.

Results over the pieces are merged by running maximum and sum of the softmax, as in flash attention,
so only one piece of KV from a cold tier has to be in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from penstock.attention import span_attention
from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.attention_memory import STREAMED_TOKENS
from penstock.attention.piece_reads import Arrays
from penstock.attention.selection.selection import pieces as ranges_of
from penstock.attention.selection.spilled_reads import wide_sides
from penstock.attention.span_attention import Partial
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.segment import KVSpan

Sides: TypeAlias = tuple[mx.array, mx.array]
"""Keys and values of a piece, (kv_heads, tokens, dim)."""


def attend_streamed(
    queries: mx.array,
    new: Sides,
    parts: Sequence[KVSpan],
    layer: int,
    device: AttentionBackend,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend to all cached columns and to the new ones: (1, heads, n, value_dim), float32.

    Args:
        queries: queries of the last n new tokens, scaled for base 2, (1, heads, n, dim).
        new: keys and values of the new tokens, (1, kv_heads, tokens, dim) each.
        parts: cached spans before the new tokens, all visible.
        sinks: attention sinks in base 2, (heads,).
    """
    heads, n = queries.shape[1:3]
    kv_heads, tokens = new[0].shape[1:3]
    # As many queries as `scores_at_once` allows.
    step = max(1, device.scores_at_once // (heads * STREAMED_TOKENS))
    count = -(-n // step)
    step = -(-n // (count + count % 2)) if count > 1 else n  # an even number, for two lanes
    groups = [slice(begin, min(begin + step, n)) for begin in range(0, n, step)]
    stacked = [span_attention.grouped(queries[:, :, group], kv_heads) for group in groups]
    sunk = None if sinks is None else sinks.reshape(kv_heads, -1, 1, 1)
    with device.piece_reads(stacked) as reads:
        every, pieces = dict.fromkeys(range(len(groups))), _pieces(parts, layer, device)
        queue = deque([next(pieces)])
        while queue:
            piece = queue.popleft()
            reads.read(*piece, every, lambda: queue.extend(islice(pieces, 1)))
        for start in range(0, tokens, STREAMED_TOKENS):
            keys, values = (side.squeeze(0)[:, start : start + STREAMED_TOKENS] for side in new)
            seen = {}
            for number, group in enumerate(groups):
                positions = np.arange(group.start, group.stop) + tokens - n
                if start <= positions[-1]:
                    columns = np.arange(start, start + keys.shape[1])
                    seen[number] = np.tile(columns <= positions[:, None], (heads // kv_heads, 1))
            reads.read([keys], [values], seen)
        results = [
            _merged(reads.result(number), heads // kv_heads, sunk) for number in range(len(groups))
        ]
    return mx.concatenate(results, axis=2)


def _merged(read: Partial, heads_each: int, sunk: mx.array | None) -> mx.array:
    """Return the attention output of a group, (1, heads, n, value_dim), float32."""
    parts = (read.top, read.total, read.mixed)
    kv_heads, rows = read.top.shape[:2]
    shape = kv_heads, heads_each, rows // heads_each
    split = Partial(*(part.reshape(*shape, part.shape[-1]) for part in parts))
    return span_attention.merged([split], sunk).reshape(1, kv_heads * heads_each, shape[2], -1)


def _pieces(parts: Sequence[KVSpan], layer: int, ops: CodeOps) -> Iterator[tuple[Arrays, Arrays]]:
    """Yield keys and values of the parts, `STREAMED_TOKENS` tokens at a time."""
    for start in range(parts[0].start, parts[-1].end, STREAMED_TOKENS):
        ranges = ranges_of(parts, start, start + STREAMED_TOKENS)
        yield wide_sides(ranges, layer, ops)
