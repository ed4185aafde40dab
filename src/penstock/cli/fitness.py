"""How the engine would run a model: tried on the loaded model, and told with the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock import config, memory
from penstock.engine.model.attention_ways import try_ways, turned_off
from penstock.engine.model.model_probe import Way
from penstock.engine.model.runner import Runner
from penstock.errors import ModelError
from penstock.kv.kernels import OFF
from penstock.kv.kernels.selftest import SECONDS, WayChoice
from penstock.kv.key_index import KeyIndex
from penstock.kv.tails import token_bytes
from penstock.memory import LayerKind
from penstock.models import mlx_lm as seam
from penstock.models.gguf.header import is_gguf, read_header
from penstock.models.gguf.weights import nearest_errors
from penstock.models.mlx_lm import Loaded
from penstock.models.widening import model_bytes

ATTEND_TOKENS = 1_024
"""Tokens of a choice for which it is said when it pays."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that are alike."""

    count: int
    kind: LayerKind | Literal["compressed"]
    window_tokens: int | None = None
    """Tokens of the window beside the kept ones; None is no window."""
    keep: int = 0

    def __str__(self) -> str:
        seen = "" if self.window_tokens is None else f" of {self.window_tokens:,} tokens"
        kept = f" and the first {self.keep:,}" if self.keep else ""
        return f"{self.count} {self.kind}{seen}{kept}"


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """Milliseconds of a layer's attention in a decode step, by way, and the way that is taken."""

    layer: str
    situation: str
    milliseconds: dict[str, float]
    chosen: str

    @classmethod
    def all_of(cls, choice: WayChoice | None) -> tuple[AttentionTiming, ...]:
        """Return those of a self-test."""
        return tuple(
            cls(
                str(one.layer),
                one.step,
                {way.value: round(ms, 3) for way, ms in one.milliseconds.items()},
                one.chosen.value,
            )
            for one in (() if choice is None else choice.timings)
        )


@dataclass(frozen=True, slots=True)
class FitnessReport:
    """A model, and which way the engine reads its KV."""

    model: str
    model_type: str
    layers: tuple[Layers, ...]
    kv_bytes_per_token: int
    """KV bytes of one token in all layers; recurrent ones have none."""
    way: Way | None
    """Way in which the engine reads the model's KV; None if the engine cannot run it."""
    why: str
    modules: tuple[str, ...]
    """Modules of mlx-lm in which the name of its attention is bound to the engine's."""
    codes_errors: dict[str, float] = field(default_factory=dict)
    """Relative error of the weights' codes, by form of the GGUF file that MLX does not have."""
    attention: tuple[AttentionTiming, ...] = ()
    """Times of the ways to attend in a decode step; empty where there is but one."""
    kernels_off: str | None = None
    """Why the attention kernels are off, where they were tried."""
    kernels_do_not_read: tuple[str, ...] = ()
    """Layers that no kernel reads, where others are read."""
    ways_cut_short: bool = False
    """Whether the self-test's time was over before all ways to attend were tried."""
    attend_halves_from: int | None = None
    """Tokens of a sequence from which a decode step with --attend-tokens 1024 reads half as many
    bytes, weights included; None where no layer can choose."""


def try_model(name: str, loaded: Loaded) -> FitnessReport:
    """Try a model on the engine's ways of reading KV.

    Raises:
        ModelError: the engine cannot run it, and its config does not tell its layers.
    """
    model_type = str(loaded.config.get("model_type"))
    try:
        layers = _seen_layers(loaded.model)
        runner = Runner(loaded.model, max_kv_size=config.MAX_KV_SIZE, keep=config.KEEP)
    except ModelError as error:
        spec = memory.read_model_spec(loaded.config)
        return FitnessReport(
            model=name,
            model_type=model_type,
            layers=tuple(
                Layers(count, layer.kind, layer.window_tokens)
                for count, layer in memory.layer_groups(spec)
            ),
            kv_bytes_per_token=memory.bytes_per_token(spec),
            way=None,
            why=_one_line(str(error)),
            modules=(),
            codes_errors=_codes_errors(name, loaded),
        )
    fitness = runner.fitness
    choice = None
    if not turned_off():
        choice = try_ways(runner, config.MAX_BATCH_SIZE, None, SECONDS)
    return FitnessReport(
        model=name,
        model_type=model_type,
        layers=layers,
        kv_bytes_per_token=runner.token_bytes,
        way=fitness.way,
        why=_one_line(fitness.why),
        modules=fitness.modules,
        codes_errors=_codes_errors(name, loaded),
        attention=AttentionTiming.all_of(choice),
        kernels_off=f"{OFF}=off" if turned_off() else None if choice is None else choice.why_off,
        kernels_do_not_read=() if choice is None else tuple(choice.unread),
        ways_cut_short=choice is not None and choice.is_cut_short,
        attend_halves_from=halves_from(runner),
    )


def halves_from(runner: Runner) -> int | None:
    """Return from how many tokens on a choice halves the bytes that one sequence's step reads.

    A step reads W bytes of weights, b bytes of keys and values a token, and i bytes of the index.
    Of n tokens it reads W + n b bytes where it reads all, and W + N b + n i where it reads N of
    them.
    """
    layers = runner.selectable_layers
    if runner.fitness.way != "shared" or not layers:
        return None
    own = token_bytes([runner.shapes[layer] for layer in layers])
    index = KeyIndex(layers).token_bytes(runner.shapes)
    weights, _ = model_bytes(runner.model)
    if own <= 2 * index:
        return None
    return -(-(weights + 2 * ATTEND_TOKENS * own) // (own - 2 * index))


def _codes_errors(name: str, loaded: Loaded) -> dict[str, float]:
    """Return the errors of a GGUF file's codes; empty where its weights became float32."""
    if not is_gguf(name) or "quantization" not in loaded.config:
        return {}
    return nearest_errors(read_header(name))


def _seen_layers(model: Any) -> tuple[Layers, ...]:
    layout = seam.layout(model)
    states, rows = len(layout.state_sizes), len(layout.rows)
    attention_windows = Counter(
        attention_window
        for at, attention_window in enumerate(layout.attention_windows)
        if at not in layout.rows
    )
    return (
        *(
            Layers(
                count,
                "full" if attention_window.window is None else "window",
                attention_window.window,
                attention_window.keep,
            )
            for attention_window, count in attention_windows.items()
        ),
        *([Layers(rows, "compressed")] if rows else []),
        *([Layers(states, "recurrent")] if states else []),
    )


def _one_line(text: str) -> str:
    """Return the first line: an error of MLX's own goes on with all the types it takes."""
    return text.strip().partition("\n")[0]
