"""Report on how the engine would run a loaded model, with the reasons."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx

from penstock import config, memory
from penstock.attention import devices
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import READ_ALL, Selection
from penstock.config import KERNELS_VARIABLE
from penstock.engine.model.model_probe import Way
from penstock.engine.model.runner import Runner
from penstock.engine.settings import kernels_off
from penstock.errors import ModelError
from penstock.extensions import extension
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails, token_bytes
from penstock.memory import LayerKind
from penstock.models import mlx_lm as seam
from penstock.models.head_source import ships_head
from penstock.models.image_reader import image_reader
from penstock.models.mlx_lm import Loaded
from penstock.models.model_files import open_model_file
from penstock.models.weight_packer import PackedParts, kv_dtype
from penstock.models.widening import model_bytes
from penstock.plurals import counted

ATTEND_TOKENS = 1_024
"""Value of `--attend-tokens` for which `attend_halves_from` is computed."""


@dataclass(frozen=True, slots=True)
class Layers:
    count: int
    kind: LayerKind | Literal["compressed"]
    window_tokens: int | None = None
    keep: int = 0

    def __str__(self) -> str:
        seen = "" if self.window_tokens is None else f" of {counted(self.window_tokens, 'token')}"
        kept = f" and the first {self.keep:,}" if self.keep else ""
        return f"{self.count} {self.kind}{seen}{kept}"


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """Times of a layer's decode attention by implementation, and the chosen implementation."""

    layer: str
    situation: str
    milliseconds: dict[str, float]
    chosen: str

    @classmethod
    def all_of(cls, choice: Any) -> tuple[AttentionTiming, ...]:
        return tuple(
            cls(
                str(timing.layer),
                timing.step,
                {way.value: round(ms, 3) for way, ms in timing.milliseconds.items()},
                timing.chosen.value,
            )
            for timing in (() if choice is None else choice.timings)
        )


@dataclass(frozen=True, slots=True)
class FitnessReport:
    model: str
    model_type: str
    source: str
    """Library of the model's classes."""
    source_why: str
    layers: tuple[Layers, ...]
    kv_bytes_per_token: int
    """KV bytes per token over all layers; recurrent layers have none."""
    way: Way | None
    """Mode in which the engine reads KV; None if it cannot run the model."""
    why: str
    modules: tuple[str, ...]
    codes_errors: dict[str, float] = field(default_factory=dict)
    """Relative error of converting GGUF formats that MLX does not have, by format."""
    attention: tuple[AttentionTiming, ...] = ()
    """Times of the attention implementations in a decode step; empty if there is only one."""
    kernels_off: str | None = None
    """Reason why the attention kernels are off, if any."""
    kernels_do_not_read: tuple[str, ...] = ()
    """Descriptions of layers that no kernel supports, if kernels support others."""
    ways_cut_short: bool = False
    """Whether the self-test ran out of time before trying all implementations."""
    packed: PackedParts | None = None
    """Modules with packed weights; None if there are none."""
    images: str | None = None
    """Whether images are read, and why not; None for a model without a vision tower."""
    mtp: str | None = None
    """Note on the multi-token head that the model's folder ships; None without one."""
    attend_halves_from: int | None = None
    """Sequence length from which `--attend-tokens 1024` halves a decode step's bytes, or None."""
    choice: tuple[ChoiceTiming, ...] = ()
    """Times of decode steps with `--attend-tokens 1024`; empty if no layer supports it."""


def try_model(name: str, loaded: Loaded) -> FitnessReport:
    """Test how the engine would run a model; `way` is None if it cannot."""
    model_type = str(loaded.config.get("model_type"))
    try:
        layers = _seen_layers(loaded.model)
        runner = Runner(
            loaded.model,
            devices.current(),
            max_kv_size=config.MAX_KV_SIZE,
            keep=config.KEEP,
            kv_dtype=kv_dtype(loaded.model),
        )
    except ModelError as error:
        spec = memory.read_model_spec(loaded.config)
        return FitnessReport(
            model=name,
            model_type=model_type,
            source=loaded.source.name,
            source_why=loaded.source.why,
            layers=tuple(
                Layers(count, layer.kind, layer.window_tokens)
                for count, layer in memory.layer_groups(spec)
            ),
            kv_bytes_per_token=memory.bytes_per_token(spec),
            way=None,
            why=_one_line(str(error)),
            modules=(),
            codes_errors=_codes_errors(name, loaded),
            packed=PackedParts.of(loaded.model),
            images=_images(loaded),
            mtp=_mtp(name, loaded),
        )
    fitness = runner.fitness
    kernels, choice = extension("kernels"), None
    if kernels is not None and not kernels_off():
        choice = kernels.try_ways(runner, config.MAX_BATCH_SIZE)
    why_off = f"{KERNELS_VARIABLE}=off" if kernels_off() else getattr(choice, "why_off", None)
    return FitnessReport(
        model=name,
        model_type=model_type,
        source=loaded.source.name,
        source_why=loaded.source.why,
        layers=layers,
        kv_bytes_per_token=runner.token_bytes,
        way=fitness.way,
        why=_one_line(fitness.why),
        modules=fitness.modules,
        codes_errors=_codes_errors(name, loaded),
        packed=PackedParts.of(loaded.model),
        images=_images(loaded),
        mtp=_mtp(name, loaded),
        attention=AttentionTiming.all_of(choice),
        kernels_off=why_off,
        kernels_do_not_read=() if choice is None else tuple(choice.unread),
        ways_cut_short=choice is not None and choice.is_cut_short,
        attend_halves_from=halves_from(runner),
        choice=choice_timings(runner, ATTEND_TOKENS),
    )


def halves_from(runner: Runner) -> int | None:
    """Return the sequence length from which selection halves the bytes of a decode step.

    A full step reads W + n b bytes: W of weights, b of KV for each of n tokens. A step that selects
    N tokens reads W + N b + n i, with i bytes of index for each token.
    """
    layers = runner.selectable_layers
    if runner.fitness.way != "shared" or not layers:
        return None
    kv = token_bytes([runner.shapes[layer] for layer in layers])
    index = KeyIndex(layers).token_bytes(runner.shapes)
    weights, _ = model_bytes(runner.model)
    if kv <= 2 * index:
        return None
    return -(-(weights + 2 * ATTEND_TOKENS * kv) // (kv - 2 * index))


def _images(loaded: Loaded) -> str | None:
    """Return whether a model's images are read, or why not; None without a vision tower."""
    if image_reader(loaded.model) is not None:
        return "read"
    if "vision_config" not in loaded.config:
        return None
    if loaded.source.name == "mlx-lm":
        return "not read: mlx-lm supports only text; mlx-vlm with --model-source auto may read them"
    return "not read: docs/images.md lists the families whose images are read"


def _mtp(name: str, loaded: Loaded) -> str | None:
    """Return a note on the multi-token head that a model's folder ships; None without one."""
    ships = ships_head(name, loaded.config.get("model_type"))
    return "shipped; --draft-model mtp proposes by it" if ships else None


def _codes_errors(name: str, loaded: Loaded) -> dict[str, float]:
    file = open_model_file(name) if "quantization" in loaded.config else None
    return {} if file is None else file.codes_errors()


def _seen_layers(model: Any) -> tuple[Layers, ...]:
    layout = seam.layout(model)
    states, rows = len(layout.state_sizes), len(layout.rows)
    attention_windows = Counter(
        attention_window
        for index, attention_window in enumerate(layout.attention_windows)
        if index not in layout.rows
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
    return text.strip().partition("\n")[0]


LENGTHS = 8_192, 32_768
STEPS = 5
"""Number of timed steps of each kind, alternating, after one untimed step."""
MOST_BYTES = 2**29
"""Maximum bytes of keys and values; lengths that need more are skipped."""


@dataclass(frozen=True, slots=True)
class ChoiceTiming:
    """Minimum times of a decode step of one sequence of `tokens` tokens, in milliseconds."""

    tokens: int
    all_ms: float
    choice_ms: float

    @property
    def pays(self) -> bool:
        return self.choice_ms < self.all_ms


def choice_timings(
    runner: Runner, attend_tokens: int, lengths: Sequence[int] = LENGTHS
) -> tuple[ChoiceTiming, ...]:
    """Time decode steps after `lengths` tokens; empty if selective attention is not supported.

    All layers of a shape read the same random keys and values, so that they fit into memory.
    """
    if runner.fitness.way != "shared" or runner.is_recurrent or not runner.selectable_layers:
        return ()
    choice = Selection(
        attend_tokens, KeyIndex(runner.selectable_layers), compiled=not kernels_off()
    )
    before = runner.selection
    try:
        return tuple(
            _timing(runner, choice, tokens)
            for tokens in lengths
            if sum(shape.nbytes for shape in set(runner.shapes)) * tokens <= MOST_BYTES
        )
    finally:
        runner.selection = before


def _timing(runner: Runner, choice: Selection, tokens: int) -> ChoiceTiming:
    row = DecodeRow((KVSpan(_segment(runner, choice, tokens), 0, tokens),), tokens, 0, 0)
    tails, times = Tails(1, 2, runner.shapes), dict[int, list[float]]()
    for _ in range(1 + STEPS):
        for number, read in enumerate((READ_ALL, choice)):
            runner.selection = read
            began = time.perf_counter()
            mx.eval(runner.decode([[1]], [row], tails).logits, tails.buffers())
            times.setdefault(number, []).append(1e3 * (time.perf_counter() - began))
    return ChoiceTiming(tokens, *(min(of[1:]) for of in times.values()))


def _segment(runner: Runner, choice: Selection, tokens: int) -> Segment:
    sides = {shape: _random(shape, tokens) for shape in set(runner.shapes)}
    first = {runner.shapes[layer]: layer for layer in choice.layers}
    index = {
        shape: choice.index.of(*sides[shape], layer, 0, runner.device)
        for shape, layer in first.items()
    }
    layers = tuple(sides[shape] for shape in runner.shapes)
    chosen = (
        index[shape] if layer in choice.layers else None
        for layer, shape in enumerate(runner.shapes)
    )
    return replace(Segment(layers, length=tokens), index=tuple(chosen))


def _random(shape: LayerShape, tokens: int) -> tuple[mx.array, mx.array]:
    keys, values = (
        mx.random.normal((1, shape.kv_heads, tokens, dim)).astype(shape.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    mx.eval(keys, values)
    return keys, values
