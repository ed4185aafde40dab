"""The trial of a model before it is trusted: its tokens, its tolerances, and its outcome.

A probe is read on parts and tails, and compared with mlx-lm's own caches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.reads import decode_reads
from penstock.attention.span_attention import AttentionWindow
from penstock.errors import ModelError
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.states import RecurrentState, States, arrays, stacked
from penstock.kv.tails import LayerShape, Tails
from penstock.models import mlx_lm as seam

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""Part of a weight's name that names its layer."""
ACTIVATIONS = 2
"""Numbers that are alive at once for each number that a layer's products compute, about."""
MOST_EXPERTS = 8
"""Experts of a layer that a token is read by, at most."""
Way = Literal["shared", "joined"]
PROBE = (3, 1, 4, 1, 5, 2)
"""Tokens that a model reads both ways before it is trusted; every vocabulary has them."""
TOLERANCE = {mx.float32: 1e-3}
"""Largest difference of two logits by dtype, as a share of the largest logit."""
HALF_TOLERANCE = 6e-2
"""Largest difference for all other dtypes, as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class Fitness:
    """The way in which a model reads KV that lies in parts, and the reason."""

    way: Way
    """Way to read: `shared`, part by part in place; `joined`, layer by layer, copied together."""
    why: str
    modules: tuple[str, ...]
    """Modules of mlx-lm in which the seam was put."""
    whole: bool = False
    """Whether its results depend on the cuts in a prompt. Such a prompt is cut as mlx-lm cuts it,
    and nothing of it is shared."""


class ProbedChunk(Protocol):
    """Keys, values and states that a chunk has left."""

    @property
    def segment(self) -> Segment:
        """Keys and values of its tokens."""

    @property
    def states(self) -> States:
        """States of the recurrent layers after its last token."""


class ProbedRunner(Protocol):
    """A model on trial, and its ways to read. See `runner.Runner`."""

    model: Any
    device: Any
    layout: seam.ModelLayout
    shapes: tuple[LayerShape, ...]
    attention_windows: list[AttentionWindow]

    def take_forms(self, segment: Segment, states: Sequence[States]) -> None:
        """Take the forms of keys, values and states."""

    def chunk(
        self,
        tokens: Sequence[int],
        parts: Sequence[KVSpan],
        position: int,
        recurrent_state: RecurrentState | None,
        way: Way,
    ) -> ProbedChunk:
        """Read tokens of one sequence in this way."""

    def decode_joined(
        self, token: int, row: DecodeRow, tails: Tails, recurrent_state: RecurrentState | None
    ) -> tuple[mx.array, States]:
        """Read one token over joined keys and values; return its logits and states."""

    def fresh_state(self) -> RecurrentState:
        """Return the first states of the recurrent layers."""

    def last_logits(self, tokens: list[list[int]], caches: list[Any]) -> mx.array:
        """Return the logits of the last tokens, (b, vocabulary)."""


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights, those outside of MLX's arrays among them."""
    arrays: Any = tree_flatten(model.parameters())
    outside: int = sum(getattr(module, "packed_bytes", 0) for module in model.modules())
    return outside + sum(int(array.nbytes) for _, array in arrays)


def step_token_bytes(model: Any) -> int:
    """Estimate the bytes of one token's activations in a model's widest layer, in float32."""
    widths: Counter[str] = Counter()
    weights: Any = tree_flatten(model.parameters())
    for name, weight in weights:
        layer = LAYER.search(name)
        if layer is not None and weight.ndim > 1 and not name.endswith(("scales", "biases")):
            experts = min(weight.shape[0], MOST_EXPERTS) if weight.ndim > 2 else 1
            widths[layer[1]] += experts * weight.shape[-2]
    outside = outside_row_bytes(model)
    return max(outside, ACTIVATIONS * mx.float32.size * max(widths.values(), default=0))


def outside_row_bytes(model: Any) -> int:
    """Return the bytes of one token's activations outside of MLX's arrays, in the widest module."""
    return max((getattr(module, "packed_row_bytes", 0) for module in model.modules()), default=0)


def probe_bytes(model: Any) -> int:
    """Estimate the bytes that trying a model takes."""
    return len(PROBE) * step_token_bytes(model)


def differs(logits: mx.array, expected: mx.array, dtype: mx.Dtype) -> str:
    """Return by how much float32 logits differ, in words; empty if it is little for a dtype."""
    # Some models give tokens that do not exist an infinite logit.
    difference = float(mx.where(logits == expected, 0.0, mx.abs(logits - expected)).max())
    largest = float(mx.where(mx.isfinite(expected), mx.abs(expected), 0.0).max())
    off = difference / max(1e-6, largest)
    return "" if off <= TOLERANCE.get(dtype, HALF_TOLERANCE) else f"{off:.1%}"


def try_model(runner: ProbedRunner, modules: tuple[str, ...]) -> tuple[Fitness, int]:
    """Find a way to read on which the model's results are those on its own caches.

    Returns the way, and the size of the vocabulary. The runner takes the forms of keys, values and
    states.

    Args:
        runner: the model's, with windows that drop nothing.
        modules: of mlx-lm, in which the seam was put.

    Raises:
        ModelError: there is no such way.
    """
    expected = _plain_logits(runner)
    vocabulary_size = expected.shape[-1]
    if runner.layout.compresses:
        why = "its layers compress what they keep"
    elif not modules and runner.attention_windows:
        why = "its attention does not go through mlx-lm's common function"
    else:
        why = _difference(runner, "shared", expected)
        if not why:
            why = "its attention goes through mlx-lm's function"
            if not runner.attention_windows:
                why = "it has no attention"
            return Fitness("shared", why, modules), vocabulary_size
    wrong = _difference(runner, "joined", expected)
    if wrong and _difference(runner, "joined", expected, whole=True):
        raise ModelError(f"the engine cannot run this model: {why}; joined, {wrong}")
    return Fitness("joined", why, modules, whole=bool(wrong)), vocabulary_size


def _plain_logits(runner: ProbedRunner) -> mx.array:
    """Return the logits of the last two tokens of the probe, on mlx-lm's caches."""
    caches = seam.plain_caches(runner.model)
    *first, before, last = PROBE
    mx.eval(runner.model(mx.array([first]), cache=caches))
    logits = []
    for token in (before, last):  # one after the other, as stages pass them on
        logits.append(runner.last_logits([[token]], caches))
        mx.eval(logits)
    return mx.concatenate(logits).astype(mx.float32)


def _difference(runner: ProbedRunner, way: Way, expected: mx.array, *, whole: bool = False) -> str:
    """Return the fault of reading the probe this way; empty if it is right.

    `whole`: the prompt is cut only as for the expected logits, not for parts to be shared.
    """
    try:
        logits, dtype = _probe(runner, way, whole=whole)
    # A boundary: a model's own code is handed caches it was not written for, and may do
    # anything with them; whatever it raises, the other way is tried.
    except Exception as error:  # noqa: BLE001
        text = str(error).strip() or type(error).__name__
        return f"{type(error).__name__}: {text.splitlines()[0]}"
    off = differs(logits, expected, dtype)
    return off and f"its logits differ by {off} from those on mlx-lm's own caches"


def _probe(runner: ProbedRunner, way: Way, *, whole: bool) -> tuple[mx.array, mx.Dtype]:
    """Read the probe as two rows that share a part, one a token ahead of the other."""
    *first, before, last = PROBE
    half = len(first) if whole else len(first) // 2
    chunk = runner.chunk(first[:half], [], 0, None, way)
    shared = KVSpan(chunk.segment, 0, half)
    paths: list[tuple[KVSpan, ...]] = []
    recurrent_states = []
    for rest in (first[half:], [*first[half:], before]):
        output = chunk
        path: tuple[KVSpan, ...] = (shared,)
        if rest:
            output = runner.chunk(rest, path, half, RecurrentState(chunk.states), way)
            path = (shared, KVSpan(output.segment, half, len(rest)))
        paths.append(path)
        recurrent_states.append(RecurrentState(output.states))
    runner.take_forms(chunk.segment, [state.states for state in recurrent_states])
    rows = [DecodeRow(path, path[-1].end, slot, 0) for slot, path in enumerate(paths)]
    if way == "shared":
        _check_fresh(runner, first[:half], chunk.states)
    logits = _decoded(runner, way, (before, last), rows, recurrent_states)
    dtype = runner.shapes[0].dtype if runner.shapes else logits.dtype
    logits = logits.astype(mx.float32)
    mx.eval(logits)
    return logits, dtype


def _decoded(
    runner: ProbedRunner,
    way: Way,
    tokens: Sequence[int],
    rows: list[DecodeRow],
    recurrent_states: list[RecurrentState],
) -> mx.array:
    """Return the logits of a decode step of two rows, (2, vocabulary)."""
    tails = Tails(2, 2, runner.shapes)
    tails.ready()
    if way == "joined":
        inputs = zip(tokens, rows, recurrent_states, strict=True)
        row_logits = [
            runner.decode_joined(token, row, tails, recurrent_state)[0]
            for token, row, recurrent_state in inputs
        ]
        return mx.concatenate(row_logits)
    step = DecodeStep.of(runner.device, rows, tails)
    readers = decode_reads(step, runner.attention_windows)
    caches, _ = runner.layout.caches(readers, stacked(recurrent_states))
    return runner.last_logits([[token] for token in tokens], caches)


def _check_fresh(runner: ProbedRunner, tokens: Sequence[int], expected: States) -> None:
    """Raise ModelError if the first states of the recurrent layers are not zeros.

    Rows that have read nothing could then not be stacked with others.
    """
    states = runner.chunk(tokens, [], 0, runner.fresh_state(), "shared").states
    for one, other in zip(arrays(states), arrays(expected), strict=True):
        if not mx.allclose(one, other, rtol=1e-3, atol=1e-5).item():
            raise ModelError("its recurrent layers do not begin with zeros")
