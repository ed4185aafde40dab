"""Memory estimates for sequences, decode steps and prefill chunks. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from penstock.attention.attention_memory import STREAMED_TOKENS, AttentionMemory
from penstock.attention.span_attention import ALL_TOKENS
from penstock.config.defaults import ATTEND_GROUP_TOKENS
from penstock.config.engine_settings import EngineSettings
from penstock.engine.model.figures import ModelFigures
from penstock.engine.model.prompt_logprobs import PIECE_BYTES, PIECE_LOGITS, PromptLogprobs
from penstock.engine.model.proposals import LEAST_PREDICTION
from penstock.engine.model.step_peaks import SLACK, StepPeaks
from penstock.kv.block_spans import SPILLED_MERGE_TOKENS, record_blocks, span_tokens
from penstock.kv.codecs.names import RAW
from penstock.kv.codecs.spilled import BLOCK_TOKENS, ENTRY_BYTES, Spilled
from penstock.kv.tails import piece_bytes
from penstock.prefix.node import index_bytes

JOINED_SCORE_BYTES = 16
"""Working memory per score in MLX's own attention, used by models with joined KV."""
DEQUANTIZED_BUFFERS = 4
"""Number of float32 arrays alive at once while a codec dequantizes keys or values."""
MASK_BYTES = 5
"""Bytes per vocabulary token of a grammar's bitmask and the masked logits."""
PROPOSER_BYTES = 8
"""Bytes per token that the n-gram proposer stores: the token and its filter entry."""
LOGITS_BYTES = 32_000_000
"""Maximum bytes of prompt logits computed at once, unless a single block needs more."""
LOGIT_BYTES = 12
"""Bytes per prompt logit: in the model's dtype and as float32."""
CHOICE_COPIES = 3
"""Number of copies of the selected tokens alive at once: gathered, sorted and read."""
SPILLED_COPIES = 1
"""Number of additional copies of blocks read from a tier, alive until the layer is computed."""
CODE_SPANS = 4
"""Maximum number of tokens that a codec encodes together in selected blocks."""
STREAMED_COPIES = 2
"""Number of streamed KV pieces alive at once: the current one and the next."""
MIXED_COPIES = 8
"""Number of extra copies of a layer's queries in a pass of chunks and decodes: 6 were measured."""
STEPS_OF_TWO = 16
"""Number of rounding steps between two powers of two for measured bytes."""


class WaysMemory(Protocol):
    def nbytes(self, tokens: int, width: int) -> int: ...


class MemoryEstimator:
    """Estimates the bytes of sequences and steps from the model and the engine's settings."""

    def __init__(
        self,
        figures: ModelFigures,
        limits: EngineSettings,
        memory: AttentionMemory,
        peaks: StepPeaks,
        ways: WaysMemory,
    ) -> None:
        self._figures = figures
        self._limits = limits
        self._memory = memory
        self._peaks = peaks
        self._ways = ways
        codec = limits.kv_cache_quantization
        self._coded = codec not in (None, RAW)
        self._all_scores = holds_all_scores(figures, memory)
        """Whether all attention scores of a chunk are in memory at once."""
        self._measured_scores = figures.heads * peaks.measured_tokens**2
        """Number of scores of the measured chunk, if all are in memory at once."""
        self._far_bytes = SLACK * max(0, peaks.far - peaks.prefill) / peaks.far_tokens
        """Bytes per context token of a chunk beyond the measured ones, with compressed layers."""
        self._score_bytes = _most_bytes(figures, memory.score_bytes)
        self._chunk_score_bytes = _most_bytes(figures, memory.chunk_score_bytes)

    @property
    def prefill_token_seconds(self) -> float:
        return self._peaks.token_seconds

    def sequence_bytes(self, tokens: int, num_cached_tokens: int = 0) -> int:
        """Return the maximum bytes of a sequence's KV and states, excluding cached tokens."""
        if not self._figures.drops:
            # Compressed rows that stay in the states until their block is complete.
            loose = self._limits.block_size if self._figures.compresses else 0
            private = max(0, tokens - num_cached_tokens) + loose
            return private * self._figures.held_token_bytes + self._figures.state_bytes
        window = self._limits.max_kv_size
        private = max(0, min(tokens, window) - num_cached_tokens)
        resident = min(private, self._most_resident)
        spilled = private - resident
        if tokens > window:
            # Tokens in the window after the kept ones, in spans that are freed as a whole, and a
            # chunk.
            attention_windows = self._figures.windows
            ring = max(
                (attention_window.window or 0 for attention_window in attention_windows), default=0
            )
            resident += min(tokens - window, ring + 2 * self._limits.step_tokens)
        kv_bytes = resident * self._figures.held_token_bytes + spilled * self.spilled_token_bytes
        return kv_bytes + self._figures.state_bytes + self.path_bytes(tokens - num_cached_tokens)

    def path_bytes(self, tokens: int) -> int:
        """Return the bytes of the tree's nodes for `tokens` tokens if KV is spilled; else 0.

        Without spilling, evictable bytes or bytes reserved for KV cover the nodes.
        """
        limits = self._limits
        if limits.active_kv_size is None:
            return 0
        return path_bytes(max(0, tokens), limits.block_size, limits.step_tokens)

    @property
    def _most_resident(self) -> int:
        """Maximum number of tokens of a sequence with KV in memory."""
        active = self._limits.active_kv_size
        return ALL_TOKENS if active is None else active + self.in_flight_tokens

    def spilled_tokens(self, tokens: int) -> int:
        """Return the maximum number of a sequence's tokens with KV only in a cold tier."""
        return max(0, min(tokens, self._limits.max_kv_size) - self._most_resident)

    @property
    def in_flight_tokens(self) -> int:
        """Maximum number of tokens in memory in addition to `active_kv_size`.

        Tokens of a chunk, of a node not yet ready to spill, and of an incomplete record.
        """
        size = self._limits.block_size
        nodes = 2 * max(self._limits.step_tokens, SPILLED_MERGE_TOKENS)
        return nodes + span_tokens(size) + record_blocks(size) * size

    @property
    def spilled_token_bytes(self) -> int:
        """Bytes in memory per token whose KV has been spilled to a cold tier."""
        figures = self._figures
        layers = figures.choice.layers
        whole = sum(s.nbytes for n, s in enumerate(figures.shapes) if n not in layers)
        heads = sum(2 * figures.shapes[n].kv_heads for n in layers)
        places = -(-heads * Spilled.block_bytes // BLOCK_TOKENS)
        return whole + figures.index_token_bytes + places

    def next_bytes(self, tokens: int) -> int:
        """Return the bytes to reserve now for a sequence with `tokens` tokens to commit.

        Tokens beyond those in flight are counted as spilled, because earlier tokens will have left
        memory by then.
        """
        next_tokens = min(tokens, self.in_flight_tokens)
        spilled = tokens - next_tokens
        nbytes = next_tokens * self._figures.held_token_bytes + spilled * self.spilled_token_bytes
        return nbytes + self.path_bytes(tokens)

    def shared_tokens(self, tokens: int) -> int:
        """Return the number of leading tokens of a sequence that the tree can store."""
        return 0 if self._figures.whole else min(tokens, self._limits.max_kv_size)

    def decode_bytes(self, tokens: int) -> int:
        """Return the bytes that a sequence adds to each decode step: attention scores and copies.

        With compressed layers, these are its new states: such sequences are decoded one by one,
        each in less memory than a chunk takes.
        """
        if self._figures.compresses:
            return self._figures.state_bytes
        width = self._limits.speculative_tokens + 1
        # States after all proposed tokens, in addition to those after the accepted ones.
        states = self._figures.state_bytes if width > 1 else 0
        # The sequence's text, and a predicted text of the same length.
        copy = PROPOSER_BYTES * (tokens + max(tokens, LEAST_PREDICTION)) if width > 1 else 0
        seen = self._seen(tokens)
        scores = width * seen * self._figures.heads * self._score_bytes
        needed = max(scores, self._ways.nbytes(seen, width))
        return needed + copy + states + width * self._choice_bytes(tokens)

    def prefill_bytes(self, tokens: int) -> int:
        """Return the bytes that a sequence adds to a step that prefills it.

        These are one joined layer, and scores beyond those of the measured step: of one token, or
        of a chunk if all scores of a chunk are in memory at once. Only one sequence prefills at a
        time. Dequantizing codes during decode takes no more.

        With compressed layers the bytes were measured. Each token selects a bounded number of rows,
        so a chunk far into a prompt adds a constant number of bytes per context token.
        """
        seen = self._seen(tokens)
        if self._figures.compresses:
            return int(self._far_bytes * max(0, seen - self._peaks.far_tokens))
        joined = self._figures.most_joined
        if seen <= self._limits.max_kv_size:  # the window is not full yet
            seen = max(min(seen, joined), min(seen, STREAMED_COPIES * STREAMED_TOKENS))
        chunk = min(self._limits.step_tokens, tokens)
        scores = seen * self._figures.heads * (chunk if self._all_scores else 1)
        counted = self._measured_scores if self._all_scores else self._memory.chunk_scores
        beyond = max(0, scores - counted)
        layer = 2 * self._figures.layer_bytes * seen
        if self._coded and self._figures.shapes:
            numbers = max(s.kv_heads * (s.key_dim + s.value_dim) for s in self._figures.shapes)
            # Dequantized in pieces while joined, or as a whole for a model's own attention.
            whole = DEQUANTIZED_BUFFERS * mx.float32.size * numbers * seen
            pieces = piece_bytes(self._figures.shapes, self._memory.lanes)
            layer += whole if self._figures.joined else pieces
            layer = max(layer, self._memory.code_bytes(numbers * seen))  # while it decodes
        return layer + beyond * self._chunk_score_bytes + self._prompt_choice_bytes(tokens)

    def run_bytes(self, tokens: int) -> int:
        """Return the bytes of prefilling a run of `tokens` tokens in chunks."""
        figures = self._figures
        kv = tokens * figures.held_token_bytes + 2 * figures.state_bytes
        return kv + self.prefill_bytes(tokens)

    @property
    def logits_tokens(self) -> int:
        """Maximum number of prompt tokens whose logits are computed together: whole blocks."""
        size, limit = self._limits.block_size, self._limits.step_tokens
        if self._figures.whole:
            return limit
        fitting = LOGITS_BYTES // (LOGIT_BYTES * self._figures.vocabulary_size)
        return max(size, min(limit, fitting) // size * size)

    @property
    def logits_bytes(self) -> int:
        """Bytes that a sequence adds to a step that computes logits of its prompt."""
        size = self._figures.vocabulary_size
        return LOGIT_BYTES * self.logits_tokens * size + PIECE_BYTES * max(size, PIECE_LOGITS)

    def logits_bytes_of(self, scores: PromptLogprobs) -> int:
        """Return `logits_bytes` plus the bytes of one chunk's log-probabilities."""
        chunk = scores.chunk_bytes(self.logits_tokens, self._figures.vocabulary_size)
        return self.logits_bytes + chunk

    @property
    def step_bytes(self) -> int:
        """Bytes of a step's buffers, excluding the parts that depend on sequence lengths."""
        limits, figures, peaks = self._limits, self._figures, self._peaks
        taken = _rounded(self.peak_bytes)
        if figures.compresses:
            folding = 2 * limits.block_size * figures.token_bytes
            return int(max(taken, peaks.far) * SLACK) + folding
        folding = 2 * span_tokens(limits.block_size) * figures.held_token_bytes
        return int(taken * SLACK) + self._unmeasured_bytes() + folding + figures.choice.step_bytes

    @property
    def mixed_tokens(self) -> int:
        """Maximum prompt tokens in a pass shared with a decode step; 0 if there is no room."""
        limits, figures, peaks = self._limits, self._figures, self._peaks
        dim = max((max(s.key_dim, s.value_dim) for s in figures.shapes), default=0)
        copies = MIXED_COPIES * mx.float32.size * figures.heads * dim
        decoded = limits.max_batch_size * (limits.speculative_tokens + 1)
        left = self.peak_bytes - peaks.decode - copies * decoded
        return max(0, int(left / (peaks.prefill / limits.step_tokens + copies)))

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest measured step, excluding slack."""
        masks = MASK_BYTES * self._limits.max_batch_size * self._figures.vocabulary_size
        return max(self._peaks.prefill, self._peaks.decode, self._peaks.sample + masks)

    def _unmeasured_bytes(self) -> int:
        """Return the bytes of the scores of a chunk far into a prompt that were not measured."""
        limits, figures, memory = self._limits, self._figures, self._memory
        queries = figures.heads * limits.step_tokens
        at_once = memory.scores_at_once if figures.joined else memory.chunk_scores
        num_scores = min(at_once, queries * (limits.max_kv_size + limits.step_tokens))
        far = self._chunk_score_bytes * max(0, num_scores - self._measured_scores)
        if figures.most_joined == ALL_TOKENS:
            return far
        streamed = min(memory.scores_at_once, queries * STREAMED_TOKENS)
        return max(far, self._chunk_score_bytes * streamed)

    def _choice_bytes(self, tokens: int) -> int:
        """Return the maximum bytes of the copies that a token's selection takes in one layer."""
        choice = self._figures.choice
        if tokens <= choice.tokens:
            return 0
        return self._copy_bytes(choice.tokens) + choice.score_token_bytes * tokens

    def _prompt_choice_bytes(self, tokens: int) -> int:
        """Return the maximum bytes that the selection of a prompt's chunk takes in one layer."""
        choice = self._figures.choice
        if tokens <= choice.prompt_tokens:
            return 0
        read = choice.prompt_tokens + ATTEND_GROUP_TOKENS
        return self._copy_bytes(read) + choice.prompt_score_token_bytes * tokens

    def _copy_bytes(self, chosen: int) -> int:
        """Return the maximum bytes of the copies of `chosen` tokens of one layer."""
        shapes = self._figures.shapes
        copies = CHOICE_COPIES * chosen * self._figures.layer_bytes
        if self._coded:
            numbers = max(s.kv_heads * (s.key_dim + s.value_dim) for s in shapes)
            # Codes that are encoded together are dequantized together.
            copies += CHOICE_COPIES * CODE_SPANS * chosen * mx.float32.size * numbers
        if self._limits.active_kv_size is not None:
            heads = max(2 * shape.kv_heads for shape in shapes)
            copies += SPILLED_COPIES * chosen * self._figures.layer_bytes
            copies += heads * chosen // BLOCK_TOKENS * ENTRY_BYTES
        return copies

    def _seen(self, tokens: int) -> int:
        """Return the maximum number of tokens that one step of a sequence reads."""
        if not self._figures.drops:
            return tokens
        return min(tokens, self._limits.max_kv_size + self._limits.step_tokens)


def holds_all_scores(figures: ModelFigures, memory: AttentionMemory) -> bool:
    """Return whether all scores of a prefill chunk are in memory at once."""
    return figures.joined or any(
        memory.holds_all_scores(shape.key_dim, shape.value_dim) for shape in figures.shapes
    )


def first_scores_bytes(figures: ModelFigures, memory: AttentionMemory, tokens: int) -> int:
    """Estimate the bytes of the scores of a prompt's first chunk."""
    scores = tokens**2 * figures.heads
    if not holds_all_scores(figures, memory):
        scores = min(scores, memory.chunk_scores)
    return scores * _most_bytes(figures, memory.chunk_score_bytes)


def path_bytes(tokens: int, block_size: int, chunk_tokens: int) -> int:
    """Return the bytes of the tree's nodes for `tokens` tokens prefilled in chunks.

    Until the whole prompt is prefilled, a node has at most a span of blocks or a chunk.
    """
    chunk = max(block_size, chunk_tokens // block_size * block_size)
    node_tokens = min(span_tokens(block_size), chunk)
    blocks, nodes = -(-tokens // block_size), -(-tokens // node_tokens)
    return index_bytes(blocks, block_size, nodes)


def _most_bytes(figures: ModelFigures, score_bytes: Callable[[mx.Dtype], int]) -> int:
    """Return the largest working memory per score of all layers."""
    if figures.joined:
        return JOINED_SCORE_BYTES
    return max((score_bytes(shape.dtype) for shape in figures.shapes), default=0)


def _rounded(nbytes: int) -> int:
    """Round measured bytes up, so that two engines with slightly different timing agree.

    >>> _rounded(11_618_472) == _rounded(12_009_640) == 12_058_624
    True
    """
    step = max(1, (1 << nbytes.bit_length() - 1) // STEPS_OF_TWO) if nbytes else 1
    return -(-nbytes // step) * step
