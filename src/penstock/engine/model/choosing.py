"""How decode steps of a model choose the tokens that they read: set once, when an engine starts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner
from penstock.kv.key_centers import KeyCenters, centers_of, run_of_tokens
from penstock.kv.key_index import KeyIndex
from penstock.kv.selection import Selection


def selection(runner: Runner, limits: EngineSettings, *, compiled: bool) -> Selection | None:
    """Return how steps choose, with loops compiled; None if all is read.

    Args:
        runner: of the model, which is run once.
        limits: settings of the choice.
        compiled: see `Selection`.
    """
    if limits.attend_tokens is None:
        return None
    layers = runner.selectable_layers - set(limits.attend_full_layers)
    index = KeyIndex(layers, limits.attend_rest, _centers(runner))
    chosen = Selection(limits.attend_tokens, index, compiled)
    for sizes in {(runner.shapes[n].key_dim, runner.shapes[n].value_dim) for n in index.layers}:
        loops = chosen.loops(*sizes)
        if loops is not None:
            loops.compile()
    return chosen


def _centers(runner: Runner) -> dict[int, KeyCenters]:
    """Return what the keys of each layer have in common."""
    tokens = run_of_tokens(runner.vocabulary_size)
    output = runner.chunk(tokens, [], 0, runner.fresh_state(), runner.fitness.way)
    keys = [
        np.array(side.astype(mx.float32))[0] if isinstance(side, mx.array) else None
        for side, _ in output.segment.layers
    ]
    return centers_of(runner.model, keys)
