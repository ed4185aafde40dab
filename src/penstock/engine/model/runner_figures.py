"""Conversion of a runner's model to `ModelFigures`."""

from __future__ import annotations

from penstock.attention.selection.selected_reads import ChoiceReader
from penstock.engine.model.figures import ChoiceFigures, ModelFigures
from penstock.engine.model.runner import Runner
from penstock.models.adapters import adapters_of


def figures_of(runner: Runner) -> ModelFigures:
    return ModelFigures(
        shapes=runner.shapes,
        heads=runner.heads,
        choice=_choice(runner),
        most_joined=runner.most_joined,
        state_bytes=runner.state_bytes,
        windows=tuple(runner.distinct_windows),
        whole=runner.fitness.whole,
        joined=runner.fitness.way != "shared",
        compresses=runner.layout.compresses,
        is_recurrent=runner.is_recurrent,
        vocabulary_size=runner.vocabulary_size,
        context_tokens=runner.context_tokens,
        adapters=adapters_of(runner.model).names,
    )


def _choice(runner: Runner) -> ChoiceFigures:
    if not runner.selection.layers:
        return ChoiceFigures()
    index, memory = runner.selection.index, runner.device.memory
    step_bytes = index.piece_bytes(runner.shapes)
    step_bytes += index.read_bytes(runner.shapes, runner.heads, memory.code_bytes)
    score_bytes = [_score_bytes(runner, layer) for layer in index.layers]
    return ChoiceFigures(
        tokens=runner.selection.tokens,
        layers=index.layers,
        index_token_bytes=runner.index_token_bytes,
        step_bytes=step_bytes,
        score_token_bytes=max(step for step, _ in score_bytes),
        prompt_tokens=runner.prompt_selection.tokens,
        prompt_score_token_bytes=max(chunk for _, chunk in score_bytes),
    )


def _score_bytes(runner: Runner, layer: int) -> tuple[int, int]:
    """Return the bytes per token of a sequence while a step, or a chunk, scores a layer's index."""
    shape, selection = runner.shapes[layer], runner.selection
    reader = ChoiceReader(selection, runner.device, runner.device.facts)
    if not selection.index.latents:
        reader = runner.device.choice_reader(selection, shape.key_dim, shape.value_dim)
    heads = runner.heads, shape.kv_heads
    return reader.score_bytes(*heads), reader.chunk_score_bytes(*heads)
