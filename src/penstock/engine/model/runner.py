"""Forward passes of the model over cached spans, tails and states.

Used by the thread that owns the arrays; knows no requests, prefix tree or limits.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.attention.attention_backend import (
    AttentionBackend,
    AttentionWays,
    DecodeStep,
    PlainOperations,
)
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.chunk_reads import ChunkReads, mixed_reads
from penstock.attention.joined_reads import JoinedReads
from penstock.attention.reads import DecodeReads, DraftedBlockReads, decode_reads
from penstock.attention.selection.selection import READ_ALL
from penstock.attention.span_attention import ALL_TOKENS, AttentionWindow
from penstock.engine.model.model_probe import (
    Way,
    step_reads,
    step_token_bytes,
    try_model,
    weight_bytes,
)
from penstock.errors import ModelError
from penstock.kv.codecs.coded import Scales
from penstock.kv.codecs.scales import Squares
from penstock.kv.compressed import RowReads
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.states import (
    NO_STATES,
    RecurrentState,
    StateForm,
    States,
    arrays,
    copied,
    nbytes,
    stacked,
    unpinned,
)
from penstock.kv.tails import LayerShape, Tails, token_bytes
from penstock.models import mlx_lm as seam
from penstock.models.arguments import expanded_numbers, positions, query_heads
from penstock.models.layer_seams import (
    adapted,
    attach,
    decoding,
    logits_behind,
    logits_of,
    without_logits,
)

SCALES_SEED = "penstock scales"
SCALES_CHUNKS = 4
"""Number of calibration chunks at distant positions, because RoPE moves constant values between
channels."""
SCALES_POSITIONS = 256
"""Range of calibration positions if the model's context length is unknown."""
SCALES_CHUNK = 64
"""Tokens per calibration chunk; few suffice, since scales are coarse powers of two."""
NO_ARGUMENTS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """Evaluated KV of a chunk, and the states of recurrent layers after it."""

    segment: Segment
    states: States


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt tokens of one sequence, computed in a pass with those of other sequences."""

    tokens: Sequence[int]
    parts: Sequence[KVSpan]
    """Earlier spans that the tokens attend to."""
    position: int
    """Position of the first token."""
    skipped: int | None = None
    """Number of first tokens whose logits are not needed; None means all."""
    adapter: int = 0
    """Number of the sequence's adapter."""

    @property
    def logit_rows(self) -> range:
        """Indices of the tokens whose logits are needed."""
        count = len(self.tokens)
        return range(count if self.skipped is None else self.skipped, count)


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Result of a decode step, not evaluated."""

    logits: mx.array
    """Logits after each new token, (rows, new tokens, vocabulary)."""
    recurrent_states: list[RecurrentState]
    """States of each row; empty in a mixed pass."""

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate, besides the tails, before the next step."""
        states_by_id: dict[int, States] = {
            id(recurrent_state.states): recurrent_state.states
            for recurrent_state in self.recurrent_states
        }
        return [array for states in states_by_id.values() for array in arrays(states)]


@dataclass(frozen=True, slots=True)
class MixedOutput:
    decoded: DecodeOutput | None
    """Output of the decode step; None without one."""
    chunks: list[PrefillOutput]
    logits: list[mx.array | None]
    """Requested logits of each chunk, (n, vocabulary); None if none were requested."""


class Runner:
    """Runs a model on cached spans, tails and states.

    Args:
        model: mlx-lm model, whose weights are evaluated here.
        max_kv_size: maximum number of tokens that a sequence attends to, including the kept ones.
        keep: number of leading tokens that are never dropped.
        ranks: number of processes that share the model.
        kv_dtype: dtype of the stored keys and values; None for the model's own.

    Raises:
        ModelError: the model has unsupported layers, or computes different results on spans than on
            its own caches.
    """

    def __init__(
        self,
        model: Any,
        device: AttentionBackend,
        *,
        max_kv_size: int,
        keep: int,
        ranks: int = 1,
        kv_dtype: mx.Dtype | None = None,
    ) -> None:
        self.model = model
        self.kv_dtype = kv_dtype
        self.device = device
        mx.eval(model.parameters())
        self.layout = seam.layout(model)
        self._spans: Any = getattr(model, "span_reader", None)
        modules = attach(model)
        self.ranks = ranks
        self.heads = query_heads(model) // (1 if seam.is_stage(model) else ranks)
        self._passes_on = seam.passes_on(model)
        self.shapes: tuple[LayerShape, ...] = ()
        self.attention_windows = list(
            self.layout.attention_windows
        )  # unbounded during the self-test
        self._state_bytes = 0
        self.states_by_token = False
        """Whether a decode step gives states after each token, see `RecurrentState.after`."""
        self.state_form = NO_STATES
        self.ways: AttentionWays = PlainOperations()
        self.selection = READ_ALL
        """Selection of the tokens that decode steps attend to."""
        self.prompt_selection = READ_ALL
        """Selection of the tokens that prompt chunks attend to."""
        self.most_joined = ALL_TOKENS
        """Maximum number of tokens joined at once during prefill; more are read in pieces."""
        self.fitness, self.vocabulary_size = try_model(self, modules)
        if self.layout.compresses:  # the probe is shorter than windows and groups
            self._state_bytes = self.layout.compression.state_bytes
            self.state_form = self.layout.compression.state_form
        bound = AttentionWindow(max_kv_size - keep, keep)
        if self.drops:
            self.attention_windows = [
                bound if attention_window.window is None else attention_window.within(max_kv_size)
                for attention_window in self.layout.attention_windows
            ]
        self.distinct_windows = list(dict.fromkeys(self.attention_windows))
        self.step_token_bytes = step_token_bytes(model)
        """Approximate activation bytes of one token in the widest layer."""

    def take_forms(self, segment: Segment, states: Sequence[States]) -> None:
        self.shapes = tuple(
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
            for keys, values in segment.layers
            if isinstance(keys, mx.array) and isinstance(values, mx.array)
        )
        self._state_bytes = max(map(nbytes, states))
        self.states_by_token = len(states[-1]) == 1 and hasattr(self.model, "states_by_token")
        self.state_form = StateForm.of(states[-1])

    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.shapes)

    @property
    def index_token_bytes(self) -> int:
        return self.selection.index.token_bytes(self.shapes)

    @property
    def held_token_bytes(self) -> int:
        return self.token_bytes + self.index_token_bytes

    @property
    def layer_bytes(self) -> int:
        return max((shape.nbytes for shape in self.shapes), default=0)

    @property
    def context_tokens(self) -> int | None:
        """Context length of the model in tokens; None if unknown."""
        return positions(self.model)

    @property
    def is_recurrent(self) -> bool:
        return bool(self.layout.state_sizes)

    @property
    def takes_several(self) -> bool:
        """Whether a decode step can process several tokens per row."""
        apart = self.layout.compresses or self.fitness.whole
        return self.fitness.way == "shared" or not apart

    @property
    def expanded_numbers(self) -> int:
        """Numbers per head and cached token that a step with several tokens per row expands."""
        return expanded_numbers(self.model) if self._joins(2) else 0

    @property
    def keeps(self) -> list[str]:
        """Descriptions of properties that must agree on all ranks."""
        return [
            f"{self.token_bytes} bytes a token, {self.state_bytes} of states",
            f"{self.shapes}",
            f"{self.attention_windows}",
            f"{self.state_form}",
            f"{self.fitness.way} {self.fitness.whole} {self.fitness.several}",
        ]

    @property
    def divided(self) -> str:
        return " by layers" if seam.is_stage(self.model) else ""

    @property
    def drops(self) -> bool:
        """Whether sequences longer than the window drop tokens.

        Models that derive positions from the number of cached tokens drop none.
        """
        return self.layout.drops and not self.layout.compresses and not self.fitness.whole

    @property
    def state_bytes(self) -> int:
        return self._state_bytes

    @property
    def selectable_layers(self) -> frozenset[int]:
        """Layers that support selective attention: those with full attention."""
        windows = enumerate(self.layout.attention_windows)
        return frozenset(number for number, window in windows if window.window is None)

    def indexed(self, segment: Segment, start: int) -> Segment:
        """Return a segment with the index of its keys, if decode steps use one."""
        return self.selection.index.indexed(segment, start, self.device)

    def window_start(self, position: int) -> int:
        return min(
            (attention_window.starts_at(position) for attention_window in self.distinct_windows),
            default=0,
        )

    def decode(
        self,
        tokens: Sequence[Sequence[int]],
        rows: Sequence[DecodeRow],
        tails: Tails,
        recurrent_states: Sequence[RecurrentState | None] = (),
        lengths: Sequence[int] | None = None,
    ) -> DecodeOutput:
        """Build a decode step over the new tokens of each row, without evaluating it.

        The caller evaluates the tails' buffers together with the output.

        Args:
            tokens: new tokens of each row, the same number in all; one unless `takes_several`.
            rows: rows in the order of `in_order`, with free columns in their tails.
            recurrent_states: states of the rows, if the model is recurrent.
            lengths: number of tokens of each row that states take in, if `skips_padding`; None for
                all of them.
        """
        tails.ready()
        if self._joins(len(tokens[0])):
            outputs = [
                self.decode_joined(new, row, tails, recurrent_state)
                for new, row, recurrent_state in zip(
                    tokens, rows, recurrent_states or [None] * len(rows), strict=True
                )
            ]
            compresses = self.layout.compresses
            return DecodeOutput(
                mx.concatenate([logits for logits, _ in outputs]),
                [RecurrentState(states, exclusive=compresses) for _, states in outputs],
            )
        step = self._decode_step(rows, tails, len(tokens[0]))
        states = (
            stacked([recurrent_state or self.fresh_state() for recurrent_state in recurrent_states])
            if recurrent_states
            else None
        )
        caches, kept = self.layout.caches(
            step_reads(self.fitness.way, step, self.attention_windows), states
        )
        if self.states_by_token and len(tokens[0]) > 1:
            for cache in kept:
                cache.by_token = True
        if lengths is not None:
            for cache in kept:
                cache.lengths = mx.array(list(lengths))  # one each, as a layer counts it down
        more = self._arguments(rows, len(tokens[0]))
        with decoding(self.device), adapted([row.adapter for row in rows]):
            logits = self.model(mx.array([list(new) for new in tokens]), cache=caches, **more)
        left = unpinned(seam.states_of(kept))
        return DecodeOutput(logits, [RecurrentState(left, row) for row in range(len(rows))])

    @property
    def repeats(self) -> bool:
        """Whether `decode_again` may give results."""
        return hasattr(self.model, "decode_again")

    def decode_again(
        self,
        tokens: Sequence[int],
        rows: Sequence[DecodeRow],
        tails: Tails,
        *,
        new_step: bool = False,
    ) -> npt.NDArray[np.float32] | None:
        """Repeat the latest decode step, of these rows, with the tokens that follow.

        Requires `repeats`. The results are those of `decode`, but less is done between two steps.

        Args:
            tokens: next token of each row.
            rows: rows of the latest step, each advanced by a token.
            tails: tails of that step.
            new_step: whether the rows may read other spans than in the latest step.

        Returns:
            Logits of each row, (rows, vocabulary); None if `decode` must compute the step.
        """
        if any(row.shift or row.adapter for row in rows):
            return None
        where = tokens, rows, tails, self.selection
        return self.model.decode_again(*where, new_step=new_step)  # type: ignore[no-any-return]

    def _joins(self, width: int) -> bool:
        """Return whether a step with `width` new tokens per row reads contiguous KV."""
        fitness = self.fitness
        return fitness.way == "joined" or (width > 1 and not fitness.several)

    @property
    def predicts(self) -> bool:
        """Whether the model has a multi-token head or EAGLE drafter; its KV is the last."""
        return hasattr(self.model, "predict")

    def predict(
        self, tokens: Sequence[int], hidden: mx.array, rows: Sequence[DecodeRow], tails: Tails
    ) -> tuple[mx.array, mx.array]:
        """Predict what follows the last token of each row, by the head or EAGLE drafter.

        Returns logits, (rows, vocabulary), and the hidden states for the next call, (rows, 1,
        width); evaluated only for models with joined keys and values. The keys and values are
        written into the rows' tails.

        Args:
            tokens: last token of each row, generated or proposed, whose KV is not written yet.
            hidden: state before each token, (rows, 1, width): that in the row's recurrent states,
                then the second result of the previous call.
            rows: rows in the order of `in_order`, with a free column in their tails.
        """
        tails.ready()
        if self.fitness.way == "joined":
            by_row = [
                self._predict_joined(token, hidden[i : i + 1], row, tails)
                for i, (token, row) in enumerate(zip(tokens, rows, strict=True))
            ]
            logits, after = (mx.concatenate(list(side)) for side in zip(*by_row, strict=True))
            return logits[:, 0], after
        step = self._decode_step(rows, tails, 1)
        if self.fitness.way != "shared":  # with an index, the head has two caches
            by_layer = step_reads(self.fitness.way, step, self.attention_windows)
            reads, _ = self.layout.caches(by_layer, None)[0][-1]
        else:
            layer = len(self.attention_windows) - 1
            reads = DecodeReads(step, layer, self.attention_windows[layer])
        with decoding(self.device), adapted([row.adapter for row in rows]):
            logits, after = self.model.predict(mx.array(list(tokens))[:, None], hidden, reads)
        return logits[:, 0], after

    def _predict_joined(
        self, token: int, hidden: mx.array, row: DecodeRow, tails: Tails
    ) -> tuple[mx.array, mx.array]:
        reads = self._joined_reads(row.parts, row.position, (tails, row.slot, row.tail))
        caches, _ = self.layout.caches(reads, None, row.position)
        kv, _ = caches[-1]
        with adapted([row.adapter]):
            logits, after = self.model.predict(mx.array([[token]]), hidden, kv)
        mx.eval(logits, after)  # one sequence at a time, to bound memory
        return logits, after

    @property
    def block_tokens(self) -> int:
        """Number of tokens of a block of the model's drafter; 0 without one.

        The KV of the drafter's layers is the last in lists of layers.
        """
        return int(getattr(self.model, "block_tokens", 0))

    def predict_block(
        self, tokens: Sequence[int], width: int, rows: Sequence[DecodeRow], tails: Tails
    ) -> mx.array:
        """Predict the `width - 1` tokens that follow the last one of each row by the block drafter.

        Returns logits, (rows, width - 1, vocabulary); nothing is evaluated. The block's keys and
        values are written into the rows' tails.

        Args:
            tokens: last token of each row, whose KV is not written yet; the first of the block.
            width: number of tokens of the block, at most `block_tokens`.
            rows: rows in the order of `in_order`, with `width` free columns in their tails.
        """
        tails.ready()
        written = self._decode_step(rows, tails, width)
        seen = [row.ahead(width - 1) for row in rows for _ in range(width)]
        read = self._decode_step(seen, tails, 1)
        caches = [
            DraftedBlockReads(written, read, layer, attention_window)
            for layer, attention_window in enumerate(self.attention_windows)
        ]
        with decoding(self.device), adapted([row.adapter for row in rows]):
            logits: mx.array = self.model.predict_block(
                mx.array(list(tokens))[:, None], width, caches
            )
        return logits

    def _decode_step(self, rows: Sequence[DecodeRow], tails: Tails, width: int) -> DecodeStep:
        ways = self.ways, self.selection, self.most_joined
        return DecodeStep.of(self.device, rows, tails, width, *ways)

    @property
    def mixes(self) -> bool:
        """Whether running sequences and prefill chunks are computed in one pass.

        Layers with states or with selective attention require separate passes.
        """
        fitness, layout = self.fitness, self.layout
        by_token = fitness.way == "shared" and not (fitness.whole or layout.compresses)
        reads_all = not (self.selection.layers or self.prompt_selection.layers)
        is_whole = self.ranks == 1 and not (self._passes_on or self.is_recurrent)
        return by_token and reads_all and is_whole and self._spans is None

    @property
    def mixes_exactly(self) -> bool:
        """Whether a shared pass gives each sequence the same bits as a separate pass.

        Packed layers do; MLX's matrix products do not.
        """
        return self.kv_dtype is not None

    def mixed(
        self,
        tokens: Sequence[Sequence[int]],
        rows: Sequence[DecodeRow],
        tails: Tails,
        chunks: Sequence[PromptChunk],
    ) -> MixedOutput:
        """Run prefill chunks, and a decode step if there are rows, in one pass. Requires `mixes`.

        Everything except the rows' logits and the tails is evaluated.

        Args:
            tokens: new tokens of each row, see `decode`.
            rows: see `decode`.
            chunks: chunks of different sequences.
        """
        width = len(tokens[0]) if rows else 0
        reads = [self._mixed_chunk(chunk) for chunk in chunks]
        parts: list[Sequence[DecodeReads] | Sequence[ChunkReads]] = [*reads]
        sizes = [(1, len(chunk.tokens)) for chunk in chunks]
        starts = [(row.position, width) for row in rows]
        starts += [(chunk.position, len(chunk.tokens)) for chunk in chunks]
        positions = [place for start, n in starts for place in range(start, start + n)]
        if rows:
            tails.ready()
            step = self._decode_step(rows, tails, width)
            parts.insert(0, decode_reads(step, self.attention_windows))
            sizes.insert(0, (len(rows), width))
        caches, _ = self.layout.caches(mixed_reads(parts, sizes, positions), None)
        decoded = width * len(rows)
        new = [token for row in tokens for token in row]
        adapters = [row.adapter for row in rows for _ in range(width)]
        needed, ends = list(range(decoded)), [decoded]
        for chunk in chunks:
            needed += [len(new) + row for row in chunk.logit_rows]
            ends.append(len(needed))
            new += chunk.tokens
            adapters += [chunk.adapter] * len(chunk.tokens)
        products = decoding(self.device) if rows else nullcontext()
        with products, logits_of(needed), adapted(adapters):
            logits: mx.array = self.model(mx.array(new)[:, None], cache=caches)[:, 0]
        if 0 < len(needed) < len(logits):  # the model has computed all logits
            logits = logits[mx.array(needed)]
        # An empty slice would keep its inputs alive.
        by_chunk = [logits[start:end] if start < end else None for start, end in pairwise(ends)]
        mx.eval([part for part in by_chunk if part is not None])
        by_row = logits[:decoded].reshape(len(rows), width, -1) if rows else None
        return MixedOutput(
            None if by_row is None else DecodeOutput(by_row, []),
            [
                self._left(of_chunk, [], len(chunk.tokens), chunk.position)
                for of_chunk, chunk in zip(reads, chunks, strict=True)
            ],
            by_chunk,
        )

    def _mixed_chunk(self, chunk: PromptChunk) -> list[ChunkReads]:
        """Return the readers of a chunk, one per layer."""
        whole = bool(chunk.logit_rows)
        reads = self._chunk_reads(chunk.parts, chunk.position, "shared", read_whole=whole)
        return [of_layer for of_layer in reads if isinstance(of_layer, ChunkReads)]

    def prefill(
        self,
        tokens: Sequence[int],
        parts: Sequence[KVSpan],
        position: int,
        recurrent_state: RecurrentState | None = None,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
        *,
        choose: bool = False,
        adapter: int = 0,
    ) -> PrefillOutput:
        """Prefill a chunk of one sequence.

        Args:
            tokens: tokens of the chunk.
            parts: earlier spans that the tokens attend to, in order.
            position: position of the first token.
            recurrent_state: states before the chunk, if the model is recurrent.
            arguments: further arguments of the model.
            choose: whether the tokens may attend to a selection of those before them.
            adapter: number of the sequence's adapter.
        """
        where = tokens, parts, position, recurrent_state, self.fitness.way
        with adapted([adapter]):
            return self.chunk(*where, arguments=arguments, choose=choose)

    def read(
        self,
        tokens: Sequence[int],
        parts: Sequence[KVSpan],
        position: int,
        recurrent_state: RecurrentState | None = None,
        reads: Sequence[ChunkReads] | None = None,
        *,
        skipped: int = 0,
        adapter: int = 0,
    ) -> tuple[mx.array, PrefillOutput]:
        """Prefill tokens, and return also the logits after each of them, (n, vocabulary).

        Args:
            tokens, parts, position, recurrent_state: see `prefill`.
            reads: reader of each layer; None creates them.
            skipped: number of first tokens whose logits are omitted.
            adapter: number of the sequence's adapter.
        """
        readers = reads or self._chunk_reads(parts, position, self.fitness.way, read_whole=True)
        caches, kept = self.layout.caches(readers, _row(recurrent_state), position)
        with logits_behind(skipped), adapted([adapter]):
            logits: mx.array = self.model(mx.array([list(tokens)]), cache=caches)[0]
        logits = logits[len(logits) - len(tokens) + skipped :]
        mx.eval(logits)
        return logits, self._left(readers, kept, len(tokens), position)

    def key_scales(self, piece_tokens: int = SCALES_CHUNK) -> tuple[Scales, ...]:
        """Return the best scales for the key channels of each layer (`codecs.scales`).

        Computed from the magnitudes of keys and queries on a fixed sequence of tokens. Empty for
        models whose own attention is used, because their queries are not accessible.
        """
        if self.fitness.way != "shared":
            return ()
        draw = random.Random(SCALES_SEED)
        squares = [Squares() for _ in self.attention_windows]
        step = max(1, (self.context_tokens or SCALES_POSITIONS) // SCALES_CHUNKS)
        for chunk in range(SCALES_CHUNKS):
            tokens = [draw.randrange(self.vocabulary_size) for _ in range(min(SCALES_CHUNK, step))]
            self.read_run(tokens, chunk * step, piece_tokens, squares)
        return tuple(layer_squares.scales() for layer_squares in squares)

    def read_run(
        self,
        tokens: Sequence[int],
        position: int,
        piece_tokens: int,
        squares: Sequence[Squares] = (),
    ) -> list[Segment]:
        """Prefill a sequence without a cached prefix; return the KV of each chunk.

        Args:
            tokens: all tokens of the sequence.
            position: position of the first token.
            piece_tokens: number of tokens per chunk.
            squares: accumulator of each layer, if its keys and queries are measured.
        """
        spans: list[KVSpan] = []
        recurrent_state = self.fresh_state()
        for offset in range(0, len(tokens), piece_tokens):
            piece, start = tokens[offset : offset + piece_tokens], position + offset
            output = self.chunk(piece, spans, start, recurrent_state, self.fitness.way, squares)
            spans.append(KVSpan(output.segment, start, len(piece)))
            recurrent_state = RecurrentState(output.states)
        return [span.segment for span in spans]

    def chunk(
        self,
        tokens: Sequence[int],
        parts: Sequence[KVSpan],
        position: int,
        recurrent_state: RecurrentState | None,
        way: Way,
        squares: Sequence[Squares] = (),
        *,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
        choose: bool = False,
    ) -> PrefillOutput:
        """Prefill tokens of one sequence on a given attention path; see `prefill`."""
        reads = self._chunk_reads(parts, position, way, choose=choose)
        for cache, into in zip(reads, squares, strict=bool(squares)):
            assert isinstance(cache, ChunkReads)
            cache.squares = into
        caches, kept = self.layout.caches(reads, _row(recurrent_state), position)
        # The logits are dropped: they would keep their inputs alive.
        with without_logits():
            self.model(mx.array([list(tokens)]), cache=caches, **arguments)
        return self._left(reads, kept, len(tokens), position)

    def _chunk_reads(
        self,
        parts: Sequence[KVSpan],
        position: int,
        way: Way,
        *,
        read_whole: bool = False,
        choose: bool = False,
    ) -> Sequence[ChunkReads | JoinedReads | RowReads]:
        """Return one reader per layer; `read_whole` if all logits are needed."""
        if way != "shared":
            return self._joined_reads(parts, position, None)
        # The last layer's attention is needed only for logits, or for states of later layers.
        eager = read_whole or self.is_recurrent or self._passes_on
        last = -1 if eager else len(self.attention_windows) - 1
        plans: dict[Hashable, Any] = {}
        return [
            ChunkReads(
                layer,
                window,
                parts,
                position,
                self.device,
                last=layer == last,
                most_joined=self.most_joined,
                plans=plans,
                dtype=self.kv_dtype,
                selection=self.prompt_selection if choose else READ_ALL,
            )
            for layer, window in enumerate(self.attention_windows)
        ]

    def _left(
        self,
        reads: Sequence[ChunkReads | JoinedReads | RowReads],
        kept: Sequence[Any],
        tokens: int,
        position: int,
    ) -> PrefillOutput:
        layers, states = [], seam.states_of(kept)
        for cache in reads:
            if isinstance(cache, RowReads):
                layers.append(cache.columns(tokens))
                continue
            if cache.keys is None or cache.values is None:
                raise ModelError(f"layer {cache.layer} did not cache anything")
            layers.append((cache.keys, cache.values))
        mx.eval(layers)
        index = tuple(of.index if isinstance(of, ChunkReads) else None for of in reads)
        index = index if any(index) else ()
        segment = self.indexed(Segment(tuple(layers), length=tokens, index=index), position)
        return PrefillOutput(segment, copied(states))

    def _joined_reads(
        self, parts: Sequence[KVSpan], position: int, tail: tuple[Tails, int, int] | None
    ) -> list[JoinedReads | RowReads]:
        rows = self.layout.rows
        return [
            RowReads(rows[i], i, parts, position, chunk=tail is None)
            if i in rows
            else JoinedReads(i, attention_window, parts, position, self.device, tail)
            for i, attention_window in enumerate(self.attention_windows)
        ]

    def decode_joined(
        self,
        tokens: Sequence[int],
        row: DecodeRow,
        tails: Tails,
        recurrent_state: RecurrentState | None,
    ) -> tuple[mx.array, States]:
        """Compute new tokens of one row: logits (1, tokens, vocabulary), and states after them."""
        reads = self._joined_reads(row.parts, row.position, (tails, row.slot, row.tail))
        caches, kept = self.layout.caches(reads, _row(recurrent_state), row.position)
        if self.states_by_token and len(tokens) > 1:
            for cache in kept:
                cache.by_token = True
        more = self._arguments([row], len(tokens))
        with adapted([row.adapter]):
            logits = self.model(mx.array([list(tokens)]), cache=caches, **more)
        if not self.layout.compresses:
            if seam.is_stage(self.model):  # stages exchange rows in order
                mx.eval(logits)
            return logits, unpinned(seam.states_of(kept))
        mx.eval(logits)  # one sequence at a time, to bound memory
        return logits, copied(seam.states_of(kept))

    def fresh_state(self) -> RecurrentState:
        starts = {
            name: mx.full(shape, self.layout.start_of(name), dtype)
            for name, shape, dtype in self.state_form.arrays
        }
        return RecurrentState(self.state_form.states(starts))

    def last_logits(
        self,
        tokens: list[list[int]],
        caches: list[Any],
    ) -> mx.array:
        """Run the model, and return the logits after the last token of each row, lazy.

        Args:
            tokens: token ids, (b, n).
            caches: cache of each layer, see `layout.caches`.

        Returns:
            Array (b, vocabulary).
        """
        logits: mx.array = self.model(mx.array(tokens), cache=caches)[:, -1]
        return logits

    def _arguments(self, rows: Sequence[DecodeRow], width: int) -> Mapping[str, Any]:
        """Return the model's further arguments for a decode step with shifted positions."""
        if self._spans is None or not any(row.shift for row in rows):
            return NO_ARGUMENTS
        positions = [row.position + row.shift for row in rows]
        arguments: Mapping[str, Any] = self._spans.step_arguments(positions, width)
        return arguments


def _row(recurrent_state: RecurrentState | None) -> States | None:
    return None if recurrent_state is None else recurrent_state.row_states()
