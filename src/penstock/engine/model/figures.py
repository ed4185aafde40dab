"""Sizes of a model's KV and states, as plain numbers without the model."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.attention.span_attention import ALL_TOKENS, AttentionWindow
from penstock.kv.tails import LayerShape, token_bytes
from penstock.models.adapter_names import NO_ADAPTERS, AdapterNames


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFigures:
    """Sizes of selective attention, which attends to some tokens of a long sequence."""

    tokens: int = ALL_TOKENS
    """Number of tokens that each KV head attends to; unlimited by default."""
    layers: frozenset[int] = frozenset()
    """Layers with selective attention, whose keys are indexed."""
    index_token_bytes: int = 0
    """Index bytes of one token's keys in all layers."""
    step_bytes: int = 0
    """Maximum bytes of a step for indexing new keys, and for reading unselected
    tokens."""
    score_token_bytes: int = 0
    """Maximum bytes per token of a sequence while a layer's index is scored."""
    prompt_tokens: int = ALL_TOKENS
    """Number of tokens before a prompt's chunk to which its queries attend."""
    prompt_score_token_bytes: int = 0
    """Maximum bytes per token of a sequence while a chunk's queries score a layer's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """Sizes of a model's KV and states, and properties that limit their reuse."""

    shapes: tuple[LayerShape, ...]
    """KV shape of one token, by layer."""
    heads: int = 1
    choice: ChoiceFigures = ChoiceFigures()
    """Sizes of selective attention; by default, all tokens are attended to."""
    most_joined: int = ALL_TOKENS
    """Maximum number of tokens joined at once during prefill; longer contexts are read in
    pieces."""
    state_bytes: int = 0
    """Maximum bytes of one sequence's recurrent states, excluding pending compressed rows."""
    windows: tuple[AttentionWindow, ...] = ()
    """Distinct attention windows of the layers."""
    whole: bool = False
    """Whether results depend on how a prompt is chunked, so that its KV cannot be shared."""
    joined: bool = False
    """Whether the model computes attention itself, on keys and values copied together."""
    compresses: bool = False
    """Whether layers store one row per few tokens, and a short window."""
    is_recurrent: bool = False
    """Whether some layers have recurrent states, each valid at a single position."""
    vocabulary_size: int = 0
    context_tokens: int | None = None
    """Context length of the model in tokens; None if unknown."""
    adapters: AdapterNames = NO_ADAPTERS

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.shapes)

    @property
    def layer_bytes(self) -> int:
        return max((shape.nbytes for shape in self.shapes), default=0)

    @property
    def index_token_bytes(self) -> int:
        """Index bytes of one token's keys in all layers; 0 without selective attention."""
        return self.choice.index_token_bytes

    @property
    def held_token_bytes(self) -> int:
        return self.token_bytes + self.index_token_bytes

    @property
    def drops(self) -> bool:
        """Whether sequences longer than the window drop tokens."""
        return not (self.compresses or self.whole)

    def window_start(self, position: int) -> int:
        """Return the earliest start of a layer's window at `position`, regardless of `keep`."""
        return min((window.starts_at(position) for window in self.windows), default=0)
