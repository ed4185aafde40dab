"""How decode steps of a model choose the tokens that they read: set once, when an engine starts."""

from __future__ import annotations

from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import Selection
from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner


def selection(runner: Runner, limits: EngineSettings, *, compiled: bool) -> Selection | None:
    """Return how steps choose, with loops compiled and no centers yet; None if all is read.

    Args:
        runner: of the model.
        limits: settings of the choice.
        compiled: see `Selection`.
    """
    if limits.attend_tokens is None:
        return None
    layers = runner.selectable_layers - set(limits.attend_full_layers)
    index = KeyIndex(layers, limits.attend_rest)
    chosen = Selection(limits.attend_tokens, index, compiled)
    for sizes in {(runner.shapes[n].key_dim, runner.shapes[n].value_dim) for n in index.layers}:
        runner.device.choice_reader(chosen, *sizes).prepare()
    return chosen
