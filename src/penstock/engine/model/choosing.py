"""Setup of token selection in decode steps and prompts, done once when an engine starts."""

from __future__ import annotations

from dataclasses import replace

from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import READ_ALL, Selection
from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner


def selection(runner: Runner, limits: EngineSettings, *, compiled: bool) -> Selection:
    """Create the token selection, without key centers; `READ_ALL` if `attend_tokens` is unset."""
    if limits.attend_tokens is None:
        return READ_ALL
    layers = runner.selectable_layers - set(limits.attend_full_layers)
    latents = runner.fitness.way == "latent"
    index = KeyIndex(layers, limits.attend_rest, latents=latents)
    chosen = Selection(limits.attend_tokens, index, compiled=compiled)
    if latents:  # read with MLX's operations
        return chosen
    for sizes in {(runner.shapes[n].key_dim, runner.shapes[n].value_dim) for n in index.layers}:
        reader = runner.device.choice_reader(chosen, *sizes)
        reader.prepare()
        if limits.attend_prompt is not None:
            reader.prepare_chunks()
    return chosen


def of_prompts(chosen: Selection, limits: EngineSettings) -> Selection:
    """Return the selection for prompt chunks; `READ_ALL` if `attend_prompt` is unset."""
    if limits.attend_prompt is None:
        return READ_ALL
    return replace(chosen, tokens=limits.attend_prompt)
