"""Cache objects of layers whose tokens an index of the model's own chooses, in a decode step."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.chosen_tokens import ChosenTokens, OwnIndex, choose_tokens
from penstock.attention.layer_decode import LayerDecode
from penstock.attention.reads import DecodeReads, MaskRequest, Reads
from penstock.attention.span_attention import AttentionWindow


class ChoosingReads(DecodeReads):
    """Cache of one layer, or of its index keys, in a decode step."""

    values: mx.array | None = None
    index: ChoosingReads | None = None
    """Cache of the layer's index keys, for models whose own cache contains both."""

    def __init__(
        self,
        step: DecodeStep,
        layer: int,
        attention_window: AttentionWindow,
        chosen: dict[int, ChosenTokens],
    ) -> None:
        """Initialize the cache; all caches of a step share `chosen`, the last choice."""
        super().__init__(step, layer, attention_window)
        self.chosen = chosen
        self.is_read = False
        """Whether attention, or a known index, has read this cache."""

    def make_mask(  # type: ignore[override]
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """Return None, because attention hides what is not visible; TypeError for other windows."""
        if window_size not in (None, self.attention_window.window):
            raise TypeError("this model asks for window masks; it needs joined keys and values")

    def append(self, keys: mx.array, values: mx.array | None = None) -> None:
        """Append the new tokens' index keys, (b, 1, n, dim), to the tails."""
        if values is None:
            value_dim = self.step.tails.shapes[self.layer].value_dim
            values = mx.zeros((*keys.shape[:3], value_dim), keys.dtype)
        self.is_read = True
        self.keys, self.values = self.step.write(self.layer, keys, values)

    def choose(self, index: OwnIndex, keys: mx.array, values: mx.array | None = None) -> None:
        """Append index keys, and choose what the layer's new tokens read; nothing is evaluated."""
        self.append(keys, values)
        self.chosen.clear()
        self.chosen.update(choose_tokens(self.step, self.layer, self.attention_window, index))

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend to the last choice, which later layers do not share; to all tokens without one."""
        self.is_read = True
        mask = MaskRequest(None) if mask is None else mask
        chosen = dict(self.chosen)
        self.chosen.clear()
        if not chosen:
            return super().attend(queries, keys, values, scale, mask, sinks)
        window = self.check_given(keys, values, mask)
        decode = LayerDecode(self.step.device, self.step, self.layer, window)
        return decode.attend_chosen(queries, scale, chosen, sinks)


def check_read(reads: Sequence[Reads]) -> None:
    """Raise TypeError if neither attention nor a known index has read a cache.

    An unknown index takes stand-ins for all tokens. With few tokens it chooses nothing, so that a
    short test would not show it.
    """
    caches = (cache for cache in reads if isinstance(cache, ChoosingReads))
    unread = [str(cache.layer) for cache in caches if not cache.is_read]
    if unread:
        raise TypeError(f"this model has an index of its own, in cache {', '.join(unread)}")


def choosing_reads(
    step: DecodeStep, attention_windows: Sequence[AttentionWindow]
) -> list[ChoosingReads]:
    """Return the caches for a decode step, one per layer."""
    chosen: dict[int, ChosenTokens] = {}
    return [
        ChoosingReads(step, layer, attention_window, chosen)
        for layer, attention_window in enumerate(attention_windows)
    ]
