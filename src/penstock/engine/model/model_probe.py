"""Self-test of a model at load time, which selects its attention path.

A short prompt is run on spans and tails, and its logits are compared with those on mlx-lm's caches.
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
from penstock.attention.choosing_reads import check_read, choosing_reads
from penstock.attention.latent_reads import latent_reads
from penstock.attention.reads import Reads, decode_reads
from penstock.attention.span_attention import AttentionWindow
from penstock.errors import ModelError
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.states import RecurrentState, States, arrays, stacked
from penstock.kv.tails import LayerShape, Tails
from penstock.models import mlx_lm as seam
from penstock.models.adapters import adapters_of
from penstock.models.arguments import absorbs
from penstock.models.headless import vocabulary_of
from penstock.models.own_indexes import has_index

LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
"""Pattern of the layer in the name of a weight."""
ACTIVATIONS = 2
"""Approximate number of values alive per output value of a layer's matrix products."""
MOST_EXPERTS = 8
"""Assumed maximum number of experts per token in a layer."""
Way = Literal["shared", "indexed", "latent", "joined"]
PROBE = (3, 1, 4, 1, 5, 2)
"""Token ids of the test prompt, valid in every vocabulary."""
TOLERANCE = {mx.float32: 1e-3}
"""Maximum difference of two logits by dtype, relative to the largest logit."""
HALF_TOLERANCE = 6e-2
"""Maximum relative difference for all other dtypes."""
_PARTS = {"latent": "latents", "indexed": "chosen tokens"}


@dataclass(frozen=True, slots=True)
class Fitness:
    """Attention path of a model, and how it was determined."""

    way: Way
    """`shared`: attend to each span in place; `indexed`: the same in decode steps, to what an index
    of the model's own chooses, and prefill as `joined`; `latent`: as `indexed` to the latents of
    MLA, with or without an index; `joined`: copy the spans of a layer together first."""
    why: str
    modules: tuple[str, ...]
    """Patched modules of mlx-lm."""
    whole: bool = False
    """Whether results depend on how a prompt is chunked. Then prompts use mlx-lm's chunks, and
    their KV is not shared."""
    indexed: bool = False
    """Whether layers choose by an index of the model's own."""
    several: bool = True
    """Whether steps with several tokens per row read KV as those with one do; else it is joined."""


class ProbedChunk(Protocol):
    @property
    def segment(self) -> Segment: ...
    @property
    def states(self) -> States: ...


class ProbedRunner(Protocol):
    model: Any
    device: Any
    layout: seam.ModelLayout
    shapes: tuple[LayerShape, ...]
    attention_windows: list[AttentionWindow]

    def take_forms(self, segment: Segment, states: Sequence[States]) -> None: ...

    def chunk(
        self,
        tokens: Sequence[int],
        parts: Sequence[KVSpan],
        position: int,
        recurrent_state: RecurrentState | None,
        way: Way,
    ) -> ProbedChunk: ...

    def decode_joined(
        self,
        tokens: Sequence[int],
        row: DecodeRow,
        tails: Tails,
        recurrent_state: RecurrentState | None,
    ) -> tuple[mx.array, States]: ...

    def fresh_state(self) -> RecurrentState: ...
    def last_logits(self, tokens: list[list[int]], caches: list[Any]) -> mx.array:
        """Return the logits after the last token of each row, (b, vocabulary)."""


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights and adapters, including those outside MLX arrays."""
    arrays: Any = tree_flatten(model.parameters())
    outside: int = sum(getattr(module, "packed_bytes", 0) for module in model.modules())
    return outside + adapters_of(model).nbytes + sum(int(array.nbytes) for _, array in arrays)


def step_token_bytes(model: Any) -> int:
    """Estimate the activation bytes of one token in a model's widest layer, in float32."""
    widths: Counter[str] = Counter()
    weights: Any = tree_flatten(model.parameters())
    for name, weight in weights:
        layer = LAYER.search(name)
        if layer is not None and weight.ndim > 1 and not name.endswith(("scales", "biases")):
            experts = min(weight.shape[0], MOST_EXPERTS) if weight.ndim > 2 else 1
            widths[name[: layer.end()]] += experts * weight.shape[-2]
    outside = outside_row_bytes(model)
    return max(outside, ACTIVATIONS * mx.float32.size * max(widths.values(), default=0))


def outside_row_bytes(model: Any) -> int:
    """Return the activation bytes of one token outside MLX arrays, in the widest module."""
    return max((getattr(module, "packed_row_bytes", 0) for module in model.modules()), default=0)


def probe_bytes(model: Any) -> int:
    """Estimate the bytes needed by `try_model`."""
    return len(PROBE) * step_token_bytes(model)


def differs(logits: mx.array, expected: mx.array, dtype: mx.Dtype) -> str:
    """Return the deviation of float32 logits as text; empty if within the dtype's tolerance."""
    # Some models give infinite logits to unused token ids.
    difference = float(mx.where(logits == expected, 0.0, mx.abs(logits - expected)).max())
    largest = float(mx.where(mx.isfinite(expected), mx.abs(expected), 0.0).max())
    off = difference / max(1e-6, largest)
    return "" if off <= TOLERANCE.get(dtype, HALF_TOLERANCE) else f"{off:.1%}"


def try_model(runner: ProbedRunner, modules: tuple[str, ...]) -> tuple[Fitness, int]:
    """Find an attention path whose logits match those on mlx-lm's own caches.

    Returns the path and the vocabulary size, and sets the runner's shapes of KV and states.

    Args:
        runner: runs the model without dropping any tokens.
        modules: patched modules of mlx-lm.

    Raises:
        ModelError: no path matches.
    """
    expected = _plain_logits(runner)
    vocabulary_size = vocabulary_of(runner.model, expected.shape[-1])
    indexed, why = has_index(runner.model), ""
    if runner.layout.compresses:
        why = "its layers compress what they keep"
    elif not modules and runner.attention_windows:
        why = "its attention does not go through mlx-lm's common function"
    elif not indexed:
        why = _difference(runner, "shared", expected)
        if not why:
            why = "its attention goes through mlx-lm's function"
            if not runner.attention_windows:
                why = "it has no attention"
            return Fitness("shared", why, modules), vocabulary_size
    way: Way | None = "latent" if absorbs(runner.model) else "indexed" if indexed else None
    if way is not None and not runner.layout.compresses:
        in_place = _difference(runner, way, expected)
        if not in_place:
            why = f"its {_PARTS[way]} go through mlx-lm's attention function"
            several = _reads_two(runner, way, expected)
            fitness = Fitness(way, why, modules, indexed=indexed, several=several)
            return fitness, vocabulary_size
        why = "; ".join(filter(None, [why, f"its {_PARTS[way]}: {in_place}"]))
    wrong = _difference(runner, "joined", expected)
    if wrong and _difference(runner, "joined", expected, whole=True):
        raise ModelError(f"the engine cannot run this model: {why}; joined, {wrong}")
    return Fitness("joined", why, modules, whole=bool(wrong)), vocabulary_size


def _reads_two(runner: ProbedRunner, way: Way, expected: mx.array) -> bool:
    """Return whether a step with two tokens of a row gives the logits of two steps in place."""
    *first, before, last = PROBE
    try:
        chunk = runner.chunk(first, [], 0, None, way)
        row = DecodeRow((KVSpan(chunk.segment, 0, len(first)),), len(first), 0, 0)
        tails = Tails(1, 2, runner.shapes)
        tails.ready()
        step = DecodeStep.of(runner.device, [row], tails, 2)
        readers = step_reads(way, step, runner.attention_windows)
        states = RecurrentState(chunk.states).row_states()
        caches, _ = runner.layout.caches(readers, states)
        logits = runner.model(mx.array([[before, last]]), cache=caches)[0]
        return not differs(logits.astype(mx.float32), expected, logits.dtype)
    # As in `_difference`: joined KV is read then.
    except Exception:  # noqa: BLE001
        return False


def _plain_logits(runner: ProbedRunner) -> mx.array:
    """Return the logits of the last two tokens of the test prompt, on mlx-lm's caches."""
    caches = seam.plain_caches(runner.model)
    *first, before, last = PROBE
    mx.eval(runner.model(mx.array([first]), cache=caches))
    logits = []
    for token in (before, last):  # one by one, as pipeline stages require
        logits.append(runner.last_logits([[token]], caches))
        mx.eval(logits)
    return mx.concatenate(logits).astype(mx.float32)


def _difference(runner: ProbedRunner, way: Way, expected: mx.array, *, whole: bool = False) -> str:
    """Return the deviation of the test prompt on this path; empty if it is within tolerance."""
    try:
        logits, dtype = _probe(runner, way, whole=whole)
    # A model's code may raise anything on caches that it was not written for; the other path is
    # tried then.
    except Exception as error:  # noqa: BLE001
        text = str(error).strip() or type(error).__name__
        return f"{type(error).__name__}: {text.splitlines()[0]}"
    off = differs(logits, expected, dtype)
    return off and f"its logits differ by {off} from those on mlx-lm's own caches"


def _probe(runner: ProbedRunner, way: Way, *, whole: bool) -> tuple[mx.array, mx.Dtype]:
    """Run the test prompt as two rows that share a span; one is a token ahead."""
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
    if way != "joined":
        _check_fresh(runner, first[:half], chunk.states, way)
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
            runner.decode_joined([token], row, tails, recurrent_state)[0][:, -1]
            for token, row, recurrent_state in inputs
        ]
        return mx.concatenate(row_logits)
    step = DecodeStep.of(runner.device, rows, tails)
    readers = step_reads(way, step, runner.attention_windows)
    caches, _ = runner.layout.caches(readers, stacked(recurrent_states))
    logits = runner.last_logits([[token] for token in tokens], caches)
    check_read(readers)
    return logits


def step_reads(
    way: Way, step: DecodeStep, attention_windows: Sequence[AttentionWindow]
) -> Sequence[Reads]:
    """Return the caches for a decode step that reads KV in place, one per layer."""
    if way == "latent":
        return latent_reads(step, attention_windows)
    make = choosing_reads if way == "indexed" else decode_reads
    return make(step, attention_windows)


def _check_fresh(runner: ProbedRunner, tokens: Sequence[int], expected: States, way: Way) -> None:
    """Raise ModelError unless the initial states of the recurrent layers are as expected.

    Otherwise rows without states could not be batched with others.
    """
    states = runner.chunk(tokens, [], 0, runner.fresh_state(), way).states
    for actual, reference in zip(arrays(states), arrays(expected), strict=True):
        if not mx.allclose(actual, reference, rtol=1e-3, atol=1e-5).item():
            raise ModelError("its recurrent layers do not start from known states")
