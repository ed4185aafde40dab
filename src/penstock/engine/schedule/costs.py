"""What sequences and steps take, told before they take it: the sums behind every reservation."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner
from penstock.engine.model.sampling import TokenSampler, sample_all
from penstock.engine.request import Sampling
from penstock.engine.schedule.step_peaks import StepPeaks, measured_once
from penstock.kv import backend
from penstock.kv.attention_plan import DecodeRow, KVSpan
from penstock.kv.block_format import BlockFormat
from penstock.kv.block_spans import span_tokens
from penstock.kv.codecs.names import RAW
from penstock.kv.quantization import piece_bytes
from penstock.kv.states import RecurrentState
from penstock.kv.tails import Tails

JOINED_SCORE_BYTES = 16
"""Working memory of one score in MLX's own attention, which joined models use."""
WIDENED_BUFFERS = 4
"""Arrays of float32 that are alive together while a codec's keys or values are dequantized at
once."""
FAR_TOKENS = 4_096
"""How far into a prompt a step is measured where layers compress: behind as many rows as are
picked for a token at all."""
MASK_BYTES = 5
"""What a grammar's mask and the logits that it leaves take for each token of the vocabulary."""
ROUNDS = 3
"""How often a step is measured at most; the largest counts."""
ROUNDS_SECONDS = 0.1
"""After so long, a step is not measured again."""
SLACK = 1.10
"""How much more a step may take than the one that was measured at the start."""
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


class MemoryEstimator:
    """Bytes that a model takes under an engine's limits.

    A sequence of n tokens is one whose prompt and answer have n tokens whose KV is ever read:
    all but the last.
    """

    def __init__(self, runner: Runner, limits: EngineSettings) -> None:
        self._runner = runner
        self._limits = limits
        self.prefill_token_seconds = 0.0
        """What a token of a prompt took when the step was measured."""
        codec = limits.kv_cache_quantization
        self._coded = codec not in (None, RAW)
        self._alone = runner.fitness.way == "joined"
        """Whether the model attends by itself."""
        self._device = backend.current()
        self._all_scores = self._alone or any(
            self._device.holds_all_scores(shape.key_dim, shape.value_dim) for shape in runner.shapes
        )
        """Whether all scores of a chunk are there at once."""
        self._measured_scores = 0
        """Those of the chunk that was measured, if they were there at once."""
        self._far_bytes = 0.0
        """Of a model whose layers compress: what each token behind `FAR_TOKENS` adds to a chunk."""
        self._score_bytes = (
            JOINED_SCORE_BYTES
            if self._alone
            else max((self._device.score_bytes(shape.dtype) for shape in runner.shapes), default=0)
        )

    def sequence_bytes(self, tokens: int, num_cached_tokens: int = 0) -> int:
        """Return the most that a sequence can come to hold beside the cached tokens of a path: keys
        and values of the others, and its states."""
        if not self._runner.drops:
            # Rows that are loose, until they are in the columns of an unfinished block.
            loose = self._limits.block_size if self._compresses else 0
            own = max(0, tokens - num_cached_tokens) + loose
            return own * self._runner.token_bytes + self._runner.state_bytes
        window = self._limits.max_kv_size
        own = max(0, min(tokens, window) - num_cached_tokens)
        if tokens > window:
            # What is seen behind the kept tokens, in runs that are let go whole, and a new chunk.
            attention_windows = self._runner.distinct_windows
            ring = max(
                (attention_window.window or 0 for attention_window in attention_windows), default=0
            )
            own += min(tokens - window, ring + 2 * self._limits.step_tokens)
        return own * self._runner.token_bytes + self._runner.state_bytes

    def shared_tokens(self, tokens: int) -> int:
        """Return how many first tokens of a sequence may come to lie in the tree."""
        return 0 if self._runner.fitness.whole else min(tokens, self._limits.max_kv_size)

    def decode_bytes(self, tokens: int) -> int:
        """Return what a sequence adds to every step in which it decodes: its scores; where layers
        compress, its new states, since sequences are computed one after the other, each in less
        than a chunk of it takes."""
        if self._compresses:
            return self._runner.state_bytes
        return self._seen(tokens) * self._runner.heads * self._score_bytes

    def prefill_bytes(self, tokens: int) -> int:
        """Return what a sequence adds to a step that prefills it: a layer joined, and the scores
        beyond those that are computed at a time in any case: of one token, or, if all of a chunk
        are there at once, of the chunk that was measured. One sequence at a time does.
        Floats that codes become while it decodes are no more than that.

        Where layers compress it was measured. As many rows are picked for each token, at most, and
        all are weighed for it: what a chunk takes grows no faster far into a prompt than before.
        """
        seen = self._seen(tokens)
        if self._compresses:
            return int(self._far_bytes * max(0, seen - FAR_TOKENS))
        chunk = min(self._limits.step_tokens, tokens)
        scores = seen * self._runner.heads * (chunk if self._all_scores else 1)
        counted = self._measured_scores if self._all_scores else self._device.scores_at_once
        beyond = max(0, scores - counted)
        layer = 2 * self._runner.layer_bytes * seen
        if self._coded and self._runner.shapes:
            numbers = max(s.kv_heads * (s.key_dim + s.value_dim) for s in self._runner.shapes)
            # Dequantized as it is joined; of a model that attends by itself, before.
            whole = WIDENED_BUFFERS * mx.float32.size * numbers * seen
            layer += whole if self._alone else piece_bytes(self._runner.shapes)
            layer = max(layer, self._device.code_bytes(numbers * seen))  # while it decodes
        return layer + beyond * self._score_bytes

    def measure_step(self, tails: Tails) -> int:
        """Return what the largest steps take beside their result: run once on nothing, unless an
        engine with such limits was made on this model before.

        The tails may have taken their memory afterwards.
        """
        limits, runner = self._limits, self._runner
        run_as = (
            *(limits.step_tokens, limits.max_batch_size, limits.max_kv_size, limits.keep_tokens),
            *(tails.columns, type(self._device), runner.divided, self._compresses),
        )
        peaks = measured_once(runner.model, run_as, lambda: self._run_steps(tails))
        self._measured_scores = runner.heads * limits.step_tokens**2
        self.prefill_token_seconds = peaks.prefill_seconds / limits.step_tokens
        masks = MASK_BYTES * limits.max_batch_size * runner.vocabulary_size
        taken = max(peaks.prefill, peaks.decode, peaks.sample + masks)
        if self._compresses:
            self._far_bytes = SLACK * max(0, peaks.far - peaks.prefill) / FAR_TOKENS
            folding = 2 * limits.block_size * runner.token_bytes
            return int(max(taken, peaks.far) * SLACK) + folding
        # A chunk far into a prompt has as many scores at once as are ever computed together.
        seen = limits.max_kv_size + limits.step_tokens
        most = min(self._device.scores_at_once, runner.heads * limits.step_tokens * seen)
        measured = min(most, self._measured_scores)
        folding = 2 * span_tokens(limits.block_size) * runner.token_bytes
        return int(taken * SLACK) + self._score_bytes * (most - measured) + folding

    def _run_steps(self, tails: Tails) -> StepPeaks:
        """Run the largest steps on nothing."""
        limits, runner = self._limits, self._runner
        tokens = [0] * limits.step_tokens
        rows = [DecodeRow((), 0, slot, 0) for slot in range(limits.max_batch_size)]

        def decode() -> None:
            recurrent_states = [None] * len(rows) if runner.is_recurrent else []
            decoded = runner.decode([0] * len(rows), rows, tails, recurrent_states)
            mx.eval(decoded.logits, decoded.arrays(), tails.buffers())

        def sample() -> None:
            logits = mx.random.normal((len(rows), runner.vocabulary_size), key=mx.random.key(0))
            samplers = [TokenSampler(EVERYTHING, (0,), choice) for choice in range(len(rows))]
            sample_all(logits, samplers, [()] * len(rows))

        prefill, seconds = _peak(lambda: runner.prefill(tokens, (), 0))
        decoding, sampling = _peak(decode)[0], _peak(sample)[0]
        far = _peak(lambda: self._prefill_far(tokens))[0] if self._compresses else 0
        return StepPeaks(prefill, decoding, sampling, far, seconds)

    def _prefill_far(self, tokens: list[int]) -> None:
        """Read a chunk behind `FAR_TOKENS` tokens that are nothing."""
        states = self._runner.state_form
        nothing = {name: mx.zeros(shape, dtype) for name, shape, dtype in states.arrays}
        blank = BlockFormat.of(self._runner.shapes).blank(FAR_TOKENS)
        self._runner.prefill(
            tokens,
            [KVSpan(blank, 0, FAR_TOKENS)],
            FAR_TOKENS,
            RecurrentState(states.states(nothing)),
        )

    @property
    def _compresses(self) -> bool:
        return self._runner.layout.compression is not None

    def _seen(self, tokens: int) -> int:
        """Return the most tokens that one step of a sequence reads."""
        if not self._runner.drops:
            return tokens
        return min(tokens, self._limits.max_kv_size + self._limits.step_tokens)


def _peak(run: Callable[[], object]) -> tuple[int, float]:
    """Return the bytes that `run` takes at most, whatever ran before, and its least seconds.

    A buffer that MLX kept is handed out again though it is larger than what is asked for, so none
    is kept meanwhile. How far MLX's threads are behind its caller differs by some percent from run
    to run, so what is quick is run again.
    """
    kept = mx.set_cache_limit(0)
    mx.clear_cache()
    peaks: list[int] = []
    seconds: list[float] = []
    try:
        while len(peaks) < ROUNDS and sum(seconds) < ROUNDS_SECONDS:
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
