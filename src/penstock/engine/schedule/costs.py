"""Bytes that sequences and steps will take: the sums behind every reservation."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from penstock.config import EngineSettings
from penstock.engine.model.prompt_logprobs import PIECE_BYTES, PIECE_LOGITS, PromptLogprobs
from penstock.engine.model.proposals import LEAST_PREDICTION
from penstock.engine.model.runner import Runner
from penstock.engine.model.sampling import TokenSampler, sample_all
from penstock.engine.request import Sampling
from penstock.engine.retention.spilling import SPILLED_MERGE_TOKENS, path_bytes
from penstock.engine.schedule.step_peaks import StepPeaks, measured_once
from penstock.kv import backend
from penstock.kv.attention_plan import DecodeRow, KVSpan
from penstock.kv.block_format import BlockFormat
from penstock.kv.block_spans import record_blocks, span_tokens
from penstock.kv.codecs.names import RAW
from penstock.kv.codecs.spilled import BLOCK_TOKENS, ENTRY_BYTES, Spilled
from penstock.kv.quantization import piece_bytes
from penstock.kv.states import RecurrentState
from penstock.kv.streamed_reads import STREAMED_TOKENS
from penstock.kv.tails import Tails

JOINED_SCORE_BYTES = 16
"""Bytes of working memory for one score in MLX's own attention, which joined models use."""
DEQUANTIZED_BUFFERS = 4
"""Number of float32 arrays alive at once while a codec dequantizes keys or values."""
FAR_TOKENS = 4_096
"""Tokens in front of the chunk that is measured where layers compress: as many as give all the rows
that are ever picked for a token."""
MASK_BYTES = 5
"""Bytes of a grammar's mask and of its masked logits, for each token of the vocabulary."""
PROPOSER_BYTES = 8
"""Bytes that a proposer of tokens keeps of each token of its text: itself, and in the filter."""
LOGITS_BYTES = 32_000_000
"""Bytes that the logits of a prompt take together, unless those of one block take more."""
LOGIT_BYTES = 12
"""Bytes of one logit of a prompt: as the model makes it, and as float32."""
CHOICE_COPIES = 3
"""Copies of the chosen tokens that are alive together: gathered, in order, and read."""
SPILLED_COPIES = 1
"""Copies more of blocks from a tier: as read, which are held until the layer is computed."""
CODE_SPANS = 4
"""Tokens that a codec encodes together, at most, in blocks that are chosen."""
STREAMED_COPIES = 2
"""Pieces of keys and values that are alive together: the one that is read, and the next."""
ROUNDS = 12
"""Most measurements of a step; the largest counts."""
RANK_ROUNDS = 3
"""Measurements of a step of several ranks, which all run it equally often."""
ROUNDS_SECONDS = 0.1
"""Seconds of measuring after which a step is not measured again."""
STEPS_OF_TWO = 16
"""Steps from a power of two to the next, to which measured bytes are rounded up."""
SLACK = 1.10
"""Factor from the bytes of a measured step to the bytes that are reserved for it."""
EVERYTHING = Sampling(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=True,
    top_logprobs=20,
)
"""Settings with which sampling takes most memory."""


def holds_all_scores(runner: Runner) -> bool:
    """Tell whether all scores of a prefill chunk are in memory at once."""
    device = backend.current()
    return runner.fitness.way == "joined" or any(
        device.holds_all_scores(shape.key_dim, shape.value_dim) for shape in runner.shapes
    )


class MemoryEstimator:
    """Bytes that a model takes under an engine's limits.

    A sequence of n tokens is one whose prompt and answer have n tokens whose KV is ever read:
    all but the last.
    """

    def __init__(self, runner: Runner, limits: EngineSettings) -> None:
        self._runner = runner
        self._limits = limits
        self.prefill_token_seconds = 0.0
        """Seconds per token of a prompt, as measured with the step."""
        codec = limits.kv_cache_quantization
        self._coded = codec not in (None, RAW)
        self._alone = runner.fitness.way == "joined"
        """Whether the model uses its own attention."""
        self._device = backend.current()
        self._all_scores = holds_all_scores(runner)
        """Whether all scores of a chunk are in memory at once."""
        self._measured_scores = 0
        """Number of scores of the measured chunk, if they were in memory at once."""
        self._far_bytes = 0.0
        """Bytes that each token behind `FAR_TOKENS` adds to a chunk where layers compress."""
        self._score_bytes = self._most_bytes(self._device.score_bytes)
        self._chunk_score_bytes = self._most_bytes(self._device.chunk_score_bytes)

    def sequence_bytes(self, tokens: int, num_cached_tokens: int = 0) -> int:
        """Return the most bytes that a sequence can hold beside the cached tokens of its path.

        They are the keys and values of its other tokens, and its states.
        """
        if not self._runner.drops:
            # Rows that are loose, until they are in the columns of an unfinished block.
            loose = self._limits.block_size if self._compresses else 0
            own = max(0, tokens - num_cached_tokens) + loose
            return own * self._runner.held_token_bytes + self._runner.state_bytes
        window = self._limits.max_kv_size
        own = max(0, min(tokens, window) - num_cached_tokens)
        spilled, own = own, min(own, self._most_resident)
        spilled -= own
        if tokens > window:
            # Tokens seen behind the kept ones, in runs that are freed as a whole, and a new chunk.
            attention_windows = self._runner.distinct_windows
            ring = max(
                (attention_window.window or 0 for attention_window in attention_windows), default=0
            )
            own += min(tokens - window, ring + 2 * self._limits.step_tokens)
        own_bytes = own * self._runner.held_token_bytes + spilled * self.spilled_token_bytes
        return own_bytes + self._runner.state_bytes + self.path_bytes(tokens - num_cached_tokens)

    def path_bytes(self, tokens: int) -> int:
        """Return the bytes of the tree's index of so many tokens to commit, where KV is spilled.

        Elsewhere it takes the room of what can be evicted, or of the KV that is reserved whole.
        """
        spills = self._limits.active_kv_size is not None
        return path_bytes(max(0, tokens), self._limits.block_size) if spills else 0

    @property
    def _most_resident(self) -> int:
        """Most tokens of a sequence whose keys and values are in memory, besides its window."""
        active = self._limits.active_kv_size
        return 2**62 if active is None else active + self.in_flight_tokens

    def spilled_tokens(self, tokens: int) -> int:
        """Return how many tokens of a sequence may be in a cold tier alone."""
        return max(0, min(tokens, self._limits.max_kv_size) - self._most_resident)

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that can be in memory in front of the active ones.

        They are those of a chunk, of a node that is not yet behind the active tokens, and of a
        record that is not yet whole.
        """
        size = self._limits.block_size
        nodes = 2 * max(self._limits.step_tokens, SPILLED_MERGE_TOKENS)
        return nodes + span_tokens(size) + record_blocks(size) * size

    @property
    def spilled_token_bytes(self) -> int:
        """Bytes in memory of a token whose keys and values are in a cold tier."""
        runner = self._runner
        if runner.selection is None:
            return 0
        layers = runner.selection.index.layers
        whole = sum(s.nbytes for n, s in enumerate(runner.shapes) if n not in layers)
        heads = sum(2 * runner.shapes[n].kv_heads for n in layers)
        return whole + runner.index_token_bytes + -(-heads * Spilled.block_bytes // BLOCK_TOKENS)

    def next_bytes(self, tokens: int) -> int:
        """Return the bytes that must be reserved of a sequence with so many tokens to commit.

        Those behind find room where others have left memory by then.
        """
        next_tokens = min(tokens, self.in_flight_tokens)
        spilled = tokens - next_tokens
        own = next_tokens * self._runner.held_token_bytes + spilled * self.spilled_token_bytes
        return own + self.path_bytes(tokens)

    def shared_tokens(self, tokens: int) -> int:
        """Return how many first tokens of a sequence may come to lie in the tree."""
        return 0 if self._runner.fitness.whole else min(tokens, self._limits.max_kv_size)

    def decode_bytes(self, tokens: int) -> int:
        """Return the bytes that a sequence adds to every step in which it decodes: its scores.

        Where it reads a choice of its tokens, it adds their copies.

        Where layers compress, it adds its new states. Sequences are then computed one after the
        other, each in fewer bytes than a chunk of it takes.
        """
        if self._compresses:
            return self._runner.state_bytes
        width = self._limits.speculative_tokens + 1
        # States behind all proposed tokens beside those behind the accepted ones.
        states = self._runner.state_bytes if width > 1 else 0
        # Its own text, and one as long that is expected.
        copy = PROPOSER_BYTES * (tokens + max(tokens, LEAST_PREDICTION)) if width > 1 else 0
        seen, ways = self._seen(tokens), self._runner.ways
        scores = width * seen * self._runner.heads * self._score_bytes
        needed = max(scores, 0 if ways is None else ways.nbytes(seen, width))
        return needed + copy + states + self._choice_bytes(tokens)

    def prefill_bytes(self, tokens: int) -> int:
        """Return the bytes that a sequence adds to a step that prefills it.

        They are a joined layer, and the scores beyond the ones that every step computes at a time.
        Every step computes the scores of one token or, if all scores of a chunk are in memory at
        once, of the measured chunk. One sequence at a time prefills. The floats to which codes are
        dequantized while it decodes take no more.

        Where layers compress, the bytes were measured. The number of rows picked for a token is
        bounded, and all rows are weighed for it. So the bytes of a chunk grow no faster far into a
        prompt than near its start.
        """
        seen = self._seen(tokens)
        if self._compresses:
            return int(self._far_bytes * max(0, seen - FAR_TOKENS))
        most = self._runner.most_joined
        if most is not None and seen <= self._limits.max_kv_size:  # in front of a window's end
            seen = max(min(seen, most), min(seen, STREAMED_COPIES * STREAMED_TOKENS))
        chunk = min(self._limits.step_tokens, tokens)
        scores = seen * self._runner.heads * (chunk if self._all_scores else 1)
        counted = self._measured_scores if self._all_scores else self._device.chunk_scores
        beyond = max(0, scores - counted)
        layer = 2 * self._runner.layer_bytes * seen
        if self._coded and self._runner.shapes:
            numbers = max(s.kv_heads * (s.key_dim + s.value_dim) for s in self._runner.shapes)
            # Dequantized as it is joined; before that where a model uses its own attention.
            whole = DEQUANTIZED_BUFFERS * mx.float32.size * numbers * seen
            layer += whole if self._alone else piece_bytes(self._runner.shapes)
            layer = max(layer, self._device.code_bytes(numbers * seen))  # while it decodes
        return layer + beyond * self._chunk_score_bytes

    @property
    def logits_tokens(self) -> int:
        """Most tokens of a prompt whose logits are computed together: whole blocks."""
        size, most = self._limits.block_size, self._limits.step_tokens
        if self._runner.fitness.whole:
            return most
        fitting = LOGITS_BYTES // (LOGIT_BYTES * self._runner.vocabulary_size)
        return max(size, min(most, fitting) // size * size)

    @property
    def logits_bytes(self) -> int:
        """Bytes that a sequence adds to a step that reads logits of its prompt."""
        size = self._runner.vocabulary_size
        return LOGIT_BYTES * self.logits_tokens * size + PIECE_BYTES * max(size, PIECE_LOGITS)

    def logits_bytes_of(self, scores: PromptLogprobs) -> int:
        """Return the same, with the scores of a chunk of a prompt."""
        chunk = scores.chunk_bytes(self.logits_tokens, self._runner.vocabulary_size)
        return self.logits_bytes + chunk

    def measure_step(self, tails: Tails) -> int:
        """Measure the largest steps and return the bytes that they take beside their result.

        They run once, without content, unless an engine with the same limits was made on this
        model before. The tails may have allocated their memory afterwards.
        """
        limits, runner = self._limits, self._runner
        run_as = (
            *(limits.step_tokens, limits.max_batch_size, limits.max_kv_size, limits.keep_tokens),
            *(tails.columns, limits.speculative_tokens, type(self._device), runner.divided),
            *(self._compresses, limits.attend_tokens, limits.attend_full_layers),
            limits.attend_rest,
            runner.ways is not None and bool(runner.ways.table),
        )
        peaks = measured_once(runner.model, run_as, lambda: self._run_steps(tails))
        self._measured_scores = runner.heads * limits.step_tokens**2
        self.prefill_token_seconds = peaks.prefill_seconds / limits.step_tokens
        masks = MASK_BYTES * limits.max_batch_size * runner.vocabulary_size
        taken = _rounded(max(peaks.prefill, peaks.decode, peaks.sample + masks))
        if self._compresses:
            self._far_bytes = SLACK * max(0, peaks.far - peaks.prefill) / FAR_TOKENS
            folding = 2 * limits.block_size * runner.token_bytes
            return int(max(taken, peaks.far) * SLACK) + folding
        folding = 2 * span_tokens(limits.block_size) * runner.held_token_bytes
        if runner.selection is not None:
            index = runner.selection.index
            folding += index.piece_bytes(runner.shapes)
            folding += index.read_bytes(runner.shapes, runner.heads)
            folding += index.table_bytes(limits.max_kv_size + limits.step_tokens)
            folding += self._device.sign_bytes
        return int(taken * SLACK) + self._unmeasured_bytes() + folding

    def _unmeasured_bytes(self) -> int:
        """Return the bytes of scores that a chunk far into a prompt has beside the measured ones.

        It has as many as are ever computed together; streamed reads have the scores of a piece.
        """
        limits, runner, device = self._limits, self._runner, self._device
        queries = runner.heads * limits.step_tokens
        at_once = device.scores_at_once if self._alone else device.chunk_scores
        most = min(at_once, queries * (limits.max_kv_size + limits.step_tokens))
        far = self._chunk_score_bytes * max(0, most - self._measured_scores)
        if runner.most_joined is None:
            return far
        streamed = min(device.scores_at_once, queries * STREAMED_TOKENS)
        return max(far, self._chunk_score_bytes * streamed)

    def _run_steps(self, tails: Tails) -> StepPeaks:
        """Run the largest steps without content."""
        limits, runner = self._limits, self._runner
        tokens = [0] * limits.step_tokens
        rows = [DecodeRow((), 0, slot, 0) for slot in range(limits.max_batch_size)]
        new = [0] * (limits.speculative_tokens + 1)

        def decode() -> None:
            recurrent_states = [None] * len(rows) if runner.is_recurrent else []
            decoded = runner.decode([new] * len(rows), rows, tails, recurrent_states)
            mx.eval(decoded.logits, decoded.arrays(), tails.buffers())

        def sample() -> None:
            logits = mx.random.normal((len(rows), runner.vocabulary_size), key=mx.random.key(0))
            samplers = [TokenSampler(EVERYTHING, (0,), choice) for choice in range(len(rows))]
            sample_all(logits, samplers, [()] * len(rows))

        # Ranks wait for each other within a step: none may run one more than the others.
        often = (ROUNDS_SECONDS, ROUNDS) if runner.ranks == 1 else (float("inf"), RANK_ROUNDS)
        prefill, seconds = _peak(lambda: runner.prefill(tokens, (), 0), *often)
        decoding, sampling = _peak(decode, *often)[0], _peak(sample)[0]
        far = 0
        if self._compresses:
            far = _peak(lambda: self._prefill_far(tokens), *often)[0]
        return StepPeaks(prefill, decoding, sampling, far, seconds)

    def _prefill_far(self, tokens: list[int]) -> None:
        """Read a chunk behind `FAR_TOKENS` blank tokens."""
        states = self._runner.state_form
        nothing = {name: mx.zeros(shape, dtype) for name, shape, dtype in states.arrays}
        blank = BlockFormat.of(self._runner.shapes).blank(FAR_TOKENS)
        self._runner.prefill(
            tokens,
            [KVSpan(blank, 0, FAR_TOKENS)],
            FAR_TOKENS,
            RecurrentState(states.states(nothing)),
        )

    def _choice_bytes(self, tokens: int) -> int:
        """Return the most bytes of the copies of tokens that a sequence chooses in a layer."""
        selection, shapes = self._runner.selection, self._runner.shapes
        if selection is None or tokens <= selection.tokens:
            return 0
        copies = CHOICE_COPIES * selection.tokens * self._runner.layer_bytes
        if self._coded:
            numbers = max(s.kv_heads * (s.key_dim + s.value_dim) for s in shapes)
            # Codes that are encoded together are dequantized together.
            copies += CHOICE_COPIES * CODE_SPANS * selection.tokens * mx.float32.size * numbers
        if self._limits.active_kv_size is not None:
            heads = max(2 * shape.kv_heads for shape in shapes)
            copies += SPILLED_COPIES * selection.tokens * self._runner.layer_bytes
            copies += heads * selection.tokens // BLOCK_TOKENS * ENTRY_BYTES
        return copies

    @property
    def _compresses(self) -> bool:
        return self._runner.layout.compression is not None

    def _most_bytes(self, score_bytes: Callable[[mx.Dtype], int]) -> int:
        """Return the working memory of one score in the layer where it takes most."""
        if self._alone:
            return JOINED_SCORE_BYTES
        return max((score_bytes(shape.dtype) for shape in self._runner.shapes), default=0)

    def _seen(self, tokens: int) -> int:
        """Return the most tokens that one step of a sequence reads."""
        if not self._runner.drops:
            return tokens
        return min(tokens, self._limits.max_kv_size + self._limits.step_tokens)


def _rounded(nbytes: int) -> int:
    """Return measured bytes without the lag of MLX's threads: two engines are to have one number.

    >>> _rounded(11_618_472) == _rounded(12_009_640) == 12_058_624
    True
    """
    step = max(1, (1 << nbytes.bit_length() - 1) // STEPS_OF_TWO) if nbytes else 1
    return -(-nbytes // step) * step


def _peak(
    run: Callable[[], object], limit_seconds: float = ROUNDS_SECONDS, rounds: int = ROUNDS
) -> tuple[int, float]:
    """Return the most bytes and the least seconds that `run` takes after any other work.

    MLX hands a cached buffer out again even if it is larger than the request, so its cache is off
    meanwhile. The lag of MLX's threads behind their caller differs by some percent from run to run,
    so a quick step is run again.
    """
    kept = mx.set_cache_limit(0)
    mx.clear_cache()
    peaks: list[int] = []
    seconds: list[float] = []
    try:
        while len(peaks) < rounds and sum(seconds) < limit_seconds:
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
            peaks.append(mx.get_peak_memory() - before)
    finally:
        mx.set_cache_limit(kept)
    return max(peaks), min(seconds)
