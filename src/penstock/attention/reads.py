"""Cache objects passed to the model for one step, which write to tails and attend to spans.

There is one object per layer and forward pass. It implements the part of mlx-lm's cache protocol
that attention needs (`offset`, `update_and_fetch`, `make_mask`). `update_and_fetch` returns only
the keys and values of the new tokens; `attend` reads the cached ones in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.span_attention import AttentionWindow


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Mask placeholder that the model passes on to attention, which computes visibility itself.

    A model that uses it in any other way fails its self-test, and reads contiguous KV instead.
    """

    window: int | None


class Reads:
    """Cache of one layer for one step, read in place; patched attention recognizes this class."""

    offset: mx.array | int
    keys: mx.array | None = None
    """Keys of the new tokens. A pipeline-parallel model replaces them with an equal array that
    depends on the array that it sends, so that both are evaluated."""

    def __init__(self, layer: int, attention_window: AttentionWindow) -> None:
        self.layer = layer
        self.attention_window = attention_window
        self._given: tuple[Any, Any] | None = None

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> MaskRequest:
        """Return the mask placeholder for `attend`; TypeError if the model needs an array."""
        if return_array:
            raise TypeError("this model computes with masks; it needs joined keys and values")
        return MaskRequest(window_size)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend as the model's own attention does: (b, heads, n, d) -> (b, heads, n, dim).

        Raises:
            TypeError: keys, values or mask did not come from this object.
        """
        raise NotImplementedError

    def check_given(self, keys: object, values: object, mask: object) -> AttentionWindow:
        """Return the window to use; raise TypeError unless all arguments came from this object."""
        if self._given is None or keys is not self._given[0] or values is not self._given[1]:
            raise TypeError("this model changes keys or values after they were cached")
        if not isinstance(mask, MaskRequest):
            raise TypeError("this model makes its own masks")
        return self.attention_window.within(mask.window)


class DecodeReads(Reads):
    """Cache of one layer in a decode step, which appends new tokens to each row's tail."""

    def __init__(self, step: DecodeStep, layer: int, attention_window: AttentionWindow) -> None:
        super().__init__(layer, attention_window)
        self.step = step
        self.plans = step.kernel_plans
        self.offset = step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the new tokens' KV, (b, kv_heads, width, dim), to the tails, and return it.

        It is rounded to the tails' dtype.
        """
        keys, values = self.step.write(self.layer, keys, values)
        self._given = keys, values
        self.keys = keys
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend as the model's own attention does: (b, heads, n, d) -> (b, heads, n, dim)."""
        window = self.check_given(keys, values, mask)
        return self.step.device.decode(self.step, self.layer, window, queries, scale, sinks)


class DraftedBlockReads(DecodeReads):
    """Cache of one layer for a block of new tokens per row; those of a block see each other."""

    def __init__(
        self, step: DecodeStep, read: DecodeStep, layer: int, attention_window: AttentionWindow
    ) -> None:
        """Take the step that appends the blocks, and one that reads, with a row for each token.

        All rows of a block in `read` have the position of its last token, so that they see the
        whole block. The queries are rotated to positions of their own.
        """
        super().__init__(step, layer, attention_window)
        self._read = read

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend to cached tokens and whole blocks: (b, heads, n, d) -> (b, heads, n, dim)."""
        window = self.check_given(keys, values, mask)
        by_token = queries.swapaxes(1, 2).flatten(0, 1)[:, :, None]
        read = self._read
        mixed = read.device.decode(read, self.layer, window, by_token, scale, sinks)
        return mx.unflatten(mixed.squeeze(2), 0, (len(queries), -1)).swapaxes(1, 2)


def decode_reads(
    step: DecodeStep, attention_windows: Sequence[AttentionWindow]
) -> list[DecodeReads]:
    """Return the caches for a decode step, one per layer."""
    return [
        DecodeReads(step, layer, attention_window)
        for layer, attention_window in enumerate(attention_windows)
    ]
