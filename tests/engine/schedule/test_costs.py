"""`MemoryEstimator` against figures computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from penstock.attention.attention_backend import PlainOperations
from penstock.attention.attention_memory import AttentionMemory
from penstock.attention.span_attention import AttentionWindow
from penstock.config import EngineSettings
from penstock.engine.model.figures import ChoiceFigures, ModelFigures
from penstock.engine.model.prompt_logprobs import PromptLogprobs
from penstock.engine.model.step_peaks import StepPeaks
from penstock.engine.schedule.costs import MemoryEstimator, first_scores_bytes, path_bytes
from penstock.kv.tails import LayerShape

SMALL = LayerShape(2, 8, 8, mx.float32)
"""128 bytes of a token; no kernel attends with such heads, so all scores of a chunk are held."""
FUSED = LayerShape(2, 64, 64, mx.float32)
"""1,024 bytes of a token; scores are computed 1,024 at a time."""
FIGURES = ModelFigures(shapes=(SMALL,) * 3, heads=4, vocabulary_size=100)
MEMORY = AttentionMemory(scores_at_once=1_024)
PEAKS = StepPeaks(
    prefill=1_000,
    decode=5_000,
    sample=100,
    far=0,
    far_tokens=80,
    token_seconds=0.25,
    measured_tokens=8,
)


class Kernels:
    """Attention implementations that need 1,000 bytes per column and new token."""

    def nbytes(self, tokens: int, width: int) -> int:
        return 1_000 * tokens * width


def estimator(
    figures: ModelFigures = FIGURES,
    peaks: StepPeaks = PEAKS,
    ways: Any = PlainOperations(),  # noqa: B008
    **settings: Any,
) -> MemoryEstimator:
    usual = {"block_size": 16, "prefill_chunk": 32, "max_kv_size": 256, "max_batch_size": 4}
    limits = EngineSettings(memory_limit=1_000_000, **{**usual, **settings})
    return MemoryEstimator(figures, limits, MEMORY, peaks, ways)


def spilling(figures: ModelFigures = FIGURES, **settings: Any) -> MemoryEstimator:
    """Return the estimator of a model with one selective layer whose KV is spilled."""
    choice = ChoiceFigures(tokens=128, layers=frozenset({0}), index_token_bytes=10)
    spills = {"active_kv_size": 512, "attend_tokens": 128, "ssd_cache_dir": Path("/nowhere")}
    return estimator(
        replace(figures, choice=choice, most_joined=512), max_kv_size=4_096, **spills, **settings
    )


# ---- sequences


def test_sequence_bytes_are_uncached_tokens_and_states() -> None:
    assert estimator().sequence_bytes(100) == 100 * 384
    assert estimator().sequence_bytes(100, 40) == 60 * 384
    assert estimator().sequence_bytes(40, 100) == 0
    with_states = replace(FIGURES, state_bytes=1_000)
    assert estimator(with_states).sequence_bytes(100) == 100 * 384 + 1_000


@pytest.mark.parametrize(("tokens", "held"), [(256, 256), (300, 300), (320, 320), (400, 320)])
def test_sequence_bytes_are_bounded_by_window_and_two_chunks(tokens: int, held: int) -> None:
    assert estimator().sequence_bytes(tokens) == held * 384


def test_sequence_bytes_of_ring_buffer_window() -> None:
    """A window of 256, 100 ring tokens behind the kept ones, and two chunks."""
    ring = replace(FIGURES, windows=(AttentionWindow(100, 4), AttentionWindow()))
    assert estimator(ring).sequence_bytes(1_000) == (256 + 100 + 64) * 384


def test_unwindowed_model_ignores_window() -> None:
    assert estimator(replace(FIGURES, whole=True)).sequence_bytes(400) == 400 * 384
    rows = replace(FIGURES, compresses=True, state_bytes=50)
    assert estimator(rows).sequence_bytes(400) == (400 + 16) * 384 + 50  # and a block of loose rows


def test_index_and_location_of_spilled_tokens_stay_in_memory() -> None:
    """Checksum and place take 12 bytes per head and side for 16 tokens: 3 bytes a token."""
    of_spilled = spilling()
    assert of_spilled.spilled_token_bytes == 2 * 128 + 10 + 3
    three = replace(FIGURES, shapes=(LayerShape(3, 8, 8, mx.float32), SMALL, SMALL))
    assert spilling(three).spilled_token_bytes == 2 * 128 + 10 + 5  # 4.5, rounded up
    # Two nodes of 512, a span of 256 and a record of 320 are on their way out.
    assert of_spilled.in_flight_tokens == 2 * 512 + 256 + 320
    assert of_spilled.spilled_tokens(3_000) == 3_000 - 512 - 1_600
    tree = 94 * 900 + 188 * (57 + 4 * 16)  # a node a chunk of 32 tokens, less than a span
    assert path_bytes(3_000, 16, 512) == 12 * 900 + 188 * (57 + 4 * 16)
    assert path_bytes(3_000, 16, 32) == of_spilled.path_bytes(3_000) == tree
    assert of_spilled.sequence_bytes(3_000) == 2_112 * 394 + 888 * 269 + tree
    nodes = 63 * 900 + 125 * (57 + 4 * 16)
    assert of_spilled.next_bytes(2_000) == 1_600 * 394 + 400 * 269 + nodes


def test_nodes_are_as_long_as_short_chunks() -> None:
    assert path_bytes(1_024, 16, 64) == 16 * 900 + 64 * (57 + 4 * 16)
    assert path_bytes(1_024, 16, 24) == path_bytes(1_024, 16, 8) == 64 * 900 + 64 * (57 + 4 * 16)


def test_all_tokens_are_reserved_without_spilling() -> None:
    plain = estimator()
    assert plain.path_bytes(3_000) == plain.spilled_tokens(3_000) == 0
    assert plain.next_bytes(2_000) == 2_000 * 384


def test_shared_tokens_are_bounded_by_window() -> None:
    assert [estimator().shared_tokens(n) for n in (100, 300)] == [100, 256]
    assert estimator(replace(FIGURES, whole=True)).shared_tokens(100) == 0


# ---- steps


def test_decode_bytes_are_scores_of_visible_columns() -> None:
    """Eight floats a score; ten for half-precision keys."""
    assert estimator().decode_bytes(100) == 100 * 4 * 32
    assert estimator().decode_bytes(1_000) == (256 + 32) * 4 * 32
    half = replace(FIGURES, shapes=(replace(SMALL, dtype=mx.float16),))
    assert estimator(half).decode_bytes(100) == 100 * 4 * 40


def test_decode_bytes_grow_with_proposed_tokens() -> None:
    figures = replace(FIGURES, state_bytes=70)
    for tokens in (1, 2):
        proposes = estimator(figures, speculative_tokens=tokens)
        scores = (tokens + 1) * 100 * 4 * 32
        assert proposes.decode_bytes(100) == scores + 70 + 8 * (100 + 1_024)
    assert estimator(figures).decode_bytes(100) == 100 * 4 * 32


def test_decode_bytes_are_maximum_over_attention_implementations() -> None:
    assert estimator(ways=Kernels()).decode_bytes(100) == 100_000
    assert estimator(ways=Kernels(), speculative_tokens=1).decode_bytes(10) == 20_000 + 8 * 1_034


def test_decode_bytes_with_selection_include_selected_kv() -> None:
    chooses = replace(FIGURES, choice=ChoiceFigures(tokens=64, layers=frozenset({0})))
    assert estimator(chooses).decode_bytes(64) == 64 * 4 * 32
    assert estimator(chooses).decode_bytes(65) == 65 * 4 * 32 + 3 * 64 * 128
    coded = estimator(chooses, kv_cache_quantization="affine8", prefill_chunk=64, block_size=64)
    assert coded.decode_bytes(65) == 65 * 4 * 32 + 3 * 64 * 128 + 3 * 4 * 64 * 4 * 2 * 16


def test_decode_bytes_of_compressed_layers_are_their_states() -> None:
    rows = replace(FIGURES, compresses=True, state_bytes=50)
    assert estimator(rows).decode_bytes(100) == 50


def test_prefill_bytes_are_copied_layer_and_unmeasured_scores() -> None:
    held = 100 * 4 * 32 - 4 * 8**2
    assert estimator().prefill_bytes(100) == 2 * 100 * 128 + held * 32
    assert estimator().prefill_bytes(8) == 2 * 8 * 128  # as many scores as were measured


def test_prefill_bytes_of_fused_attention_exclude_scores() -> None:
    fused = replace(FIGURES, shapes=(FUSED,))
    assert estimator(fused).prefill_bytes(100) == 2 * 100 * 1_024
    # One query's scores are computed together, however many they are.
    assert estimator(fused).prefill_bytes(300) == 2 * 288 * 1_024 + (288 * 4 - 1_024) * 32


def test_prefill_bytes_of_joined_model_use_16_byte_scores() -> None:
    joined = replace(FIGURES, shapes=(FUSED,), joined=True)
    held = 100 * 4 * 32 - 4 * 8**2
    assert estimator(joined).prefill_bytes(100) == 2 * 100 * 1_024 + held * 16


def test_prefill_bytes_of_streamed_prompt_are_bounded() -> None:
    """At least two pieces of 640 tokens."""
    streamed = replace(FIGURES, shapes=(FUSED,), most_joined=2_000)
    sizes = [estimator(streamed, max_kv_size=4_096).prefill_bytes(n) for n in (1_000, 3_000)]
    assert sizes[0] == 2 * 1_000 * 1_024 + (4_000 - 1_024) * 32
    assert sizes[1] == 2 * 2_000 * 1_024 + (8_000 - 1_024) * 32
    short = replace(streamed, most_joined=100)
    assert estimator(short, max_kv_size=4_096).prefill_bytes(3_000) == (
        2 * 1_280 * 1_024 + (5_120 - 1_024) * 32
    )


def test_prefill_bytes_of_compressed_layers_grow_as_measured() -> None:
    """8,000 bytes more after 80 tokens, plus a tenth: 110 bytes a token."""
    rows = replace(FIGURES, compresses=True)
    far = estimator(rows, replace(PEAKS, prefill=2_000, far=10_000))
    assert [far.prefill_bytes(tokens) for tokens in (80, 100)] == [0, 2_200]


def test_step_bytes_are_largest_peak_plus_scores_and_merge_copy() -> None:
    """5,000 is rounded up to a sixteenth of 4,096, plus a tenth."""
    unmeasured = (1_024 - 4 * 8**2) * 32
    folds = 2 * 256 * 384
    assert estimator().step_bytes == 5_632 + unmeasured + folds
    sampled = estimator(peaks=replace(PEAKS, sample=4_000))  # and 5 bytes a token for masks
    assert sampled.step_bytes == int(6_144 * 1.1) + unmeasured + folds
    chooses = replace(FIGURES, choice=ChoiceFigures(tokens=64, step_bytes=77))
    assert estimator(chooses).step_bytes == 5_632 + unmeasured + folds + 77


def test_step_bytes_of_compressed_layers_use_long_context_peak() -> None:
    rows = replace(FIGURES, compresses=True)
    far = estimator(rows, replace(PEAKS, far=10_000))
    assert far.step_bytes == 11_000 + 2 * 16 * 384


def test_first_scores_bytes_depend_on_attention_kind() -> None:
    assert first_scores_bytes(FIGURES, MEMORY, 32) == 32**2 * 4 * 32
    fused = replace(FIGURES, shapes=(FUSED,))
    assert first_scores_bytes(fused, MEMORY, 32) == 1_024 * 32
    assert first_scores_bytes(replace(fused, joined=True), MEMORY, 32) == 32**2 * 4 * 16


def test_prompt_logits_are_computed_in_blocks_of_bounded_size() -> None:
    assert estimator().logits_tokens == 32
    large = estimator(replace(FIGURES, vocabulary_size=200_000), prefill_chunk=512)
    assert large.logits_tokens == 16  # 13 would fit in 32 MB: one block at least
    assert estimator(replace(FIGURES, vocabulary_size=60_000)).logits_tokens == 32
    assert estimator(replace(FIGURES, whole=True)).logits_tokens == 32
    assert estimator().logits_bytes == 12 * 32 * 100 + 24 * 2**18
    scores = PromptLogprobs(range(50), top=2)
    of_chunk = 2 * 8 * 32 * 3 + 40 * (2**18 // 100) * 2
    assert estimator().logits_bytes_of(scores) == estimator().logits_bytes + of_chunk


def test_calibration_run_bytes_are_kv_two_states_and_chunk() -> None:
    figures = replace(FIGURES, state_bytes=70)
    of_run = estimator(figures)
    assert of_run.run_bytes(100) == 100 * 384 + 140 + of_run.prefill_bytes(100)
    assert of_run.prefill_token_seconds == 0.25
