"""Figures of a model: sizes of what it keeps of a sequence, as numbers without the model."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.attention.span_attention import ALL_TOKENS, AttentionWindow
from penstock.kv.tails import LayerShape, token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFigures:
    """Sizes of the choice by which decode steps read some tokens of a long sequence."""

    tokens: int = ALL_TOKENS
    """Tokens that each key head reads; by default all."""
    layers: frozenset[int] = frozenset()
    """Numbers of the layers that read a choice, and whose keys have an index."""
    index_token_bytes: int = 0
    """Bytes of the index of one token's keys in all layers."""
    step_bytes: int = 0
    """Most bytes that a step takes to index new keys, and to read what is not chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """Sizes of a model's keys, values and states, and what bounds their use."""

    shapes: tuple[LayerShape, ...]
    """Shapes of one token's keys and values, by layer."""
    heads: int = 1
    """Query heads."""
    choice: ChoiceFigures = ChoiceFigures()
    """Choice of the tokens that decode steps read; by default all of them."""
    most_joined: int = ALL_TOKENS
    """Most tokens that are read at once for a prompt; more are read piece by piece."""
    state_bytes: int = 0
    """Most bytes of one sequence's recurrent states, without loose rows."""
    windows: tuple[AttentionWindow, ...] = ()
    """Attention windows of the layers, each once."""
    whole: bool = False
    """Whether results depend on the cuts in a prompt, so that nothing of it is shared."""
    joined: bool = False
    """Whether the model attends by itself, to keys and values that are copied together."""
    compresses: bool = False
    """Whether layers keep rows for every few tokens, beside a short window."""
    is_recurrent: bool = False
    """Whether some layers keep a state, which is true at one position alone."""
    vocabulary_size: int = 0
    """Tokens that the model knows."""
    context_tokens: int | None = None
    """Tokens of a prompt and its answer that the model is made for; None if it does not say."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return token_bytes(self.shapes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token's KV in the largest layer."""
        return max((shape.nbytes for shape in self.shapes), default=0)

    @property
    def index_token_bytes(self) -> int:
        """Bytes of the index of one token's keys in all layers; 0 where decode steps read all."""
        return self.choice.index_token_bytes

    @property
    def held_token_bytes(self) -> int:
        """Bytes of one token's KV in all layers, and of the index of its keys."""
        return self.token_bytes + self.index_token_bytes

    @property
    def drops(self) -> bool:
        """Whether a sequence longer than the window drops tokens."""
        return not (self.compresses or self.whole)

    def nearest(self, position: int) -> int:
        """Return the first position beyond the kept ones that any layer sees from `position`."""
        return min((window.starts_at(position) for window in self.windows), default=0)
