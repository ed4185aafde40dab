"""`penstock plan`: memory use and requests that fit, before loading a model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from penstock import config, memory
from penstock.cli import options
from penstock.cli.banner import largest_line
from penstock.cli.largest_request import largest_request, spilled_line
from penstock.cli.settings_options import Fields, with_settings
from penstock.cli.whole_words import print_line
from penstock.errors import ModelError, SettingError
from penstock.memory import ModelSpec, format_bytes
from penstock.memory.model_config import read_config
from penstock.models import named, recommended
from penstock.plurals import counted
from penstock.recall import MODEL_PATH

if TYPE_CHECKING:
    from penstock.engine.view import SpilledBytes

NARROW_COLUMNS = 76
"""Terminal width below which the table has no borders and fewer columns."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    kv_bits: int
    quantized: bool
    full_bytes_per_token: int
    window_bytes_per_token: int
    bytes_per_sequence: int
    bytes_of_batch: int
    sequences: int
    largest_window_tokens: int | None
    missing_bytes: int
    impossible: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    model: str
    model_type: str
    dtype: str
    memory_bytes: int
    weight_bytes: int | None
    weight_source: str
    free_bytes: int
    max_kv_size: int
    keep_kv_size: int
    batch: int
    layers: dict[str, int]
    state_bytes_per_sequence: int
    rows: tuple[PlanRow, ...]
    chosen: PlanRow
    arithmetic: tuple[str, ...]
    fits: bool
    advice: str | None
    notes: tuple[str, ...]
    largest_request_tokens: int | None = None
    """Tokens of the largest request that the server admits; None if not measured."""
    spilled: SpilledBytes | None = None


PlannedModel: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="Model folder, .gguf file, config.json, or the name of a downloaded model.",
        envvar="PENSTOCK_MODEL",
        show_default="the embedded model",
    ),
]
PlannedLimit: TypeAlias = Annotated[
    dict[str, int],
    Fields(
        config.EngineSettings,
        "memory_limit",
        unset={"memory_limit": "the limit that penstock doctor shows"},
    ),
]
PlannedKV: TypeAlias = Annotated[
    dict[str, Any],
    Fields(
        config.EngineSettings,
        "max_kv_size",
        "keep",
        unset={"max_kv_size": f"{config.MAX_KV_SIZE}, or the model's context length if less"},
    ),
]
KVBits: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Bits of quantized keys and values: 2, 3, 4, 5, 6 or 8.",
        envvar="PENSTOCK_KV_BITS",
        metavar="BITS",
        show_default="the model's precision",
    ),
]
Batch: TypeAlias = Annotated[
    int, typer.Option(help="Number of sequences held at once.", metavar="SEQUENCES", min=1)
]
Hosts: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Number of machines that share the model, each with --memory-limit for its part.",
        metavar="MACHINES",
        min=1,
    ),
]
Measure: TypeAlias = Annotated[
    bool,
    typer.Option(
        help="Load the model, and measure the largest request that penstock serve admits."
    ),
]
PlannedPipeline: TypeAlias = Annotated[
    bool,
    typer.Option(
        help="With --hosts: give each machine whole layers, if mlx-lm's model class supports it."
    ),
]


@with_settings
def plan(
    model: PlannedModel = str(MODEL_PATH),
    weights_dtype: options.WeightsDtype = "auto",
    *,
    limit: PlannedLimit,
    window: PlannedKV,
    kv_bits: KVBits = None,
    choice: Annotated[
        dict[str, Any],
        Fields(
            config.EngineSettings, "attend_tokens", "attend_rest", "attend_prompt", "active_kv_size"
        ),
    ],
    batch: Batch = 1,
    hosts: Hosts = 1,
    pipeline: PlannedPipeline = False,
    draft: options.DraftModel,
    measure: Measure = False,
    as_json: options.Json = False,
) -> None:
    """Show the memory that a model needs and the requests that fit.

    Reads the config and any headers of the weights; loads the model only with --measure. Exit code
    is 0 if the batch fits, 1 if not.
    """
    draft_model: str | None = draft.get("draft_model")
    if draft_model is not None and hosts > 1:
        raise SettingError("--draft-model does not work with --hosts; leave one of the two out")
    if measure and (hosts > 1 or kv_bits is not None):
        raise SettingError("--measure does not work with --hosts or --kv-bits; leave them out")
    if any(choice.values()) and not measure:
        raise SettingError(
            "--attend-tokens, --attend-rest and --active-kv-size change the largest request: add "
            "--measure"
        )
    limit_bytes = _limit(limit.get("memory_limit"))
    spec = _read_spec(_find(model), weights_dtype, limit_bytes)
    if any(choice.values()):
        spec = replace(spec, raw_dtype=None)
    if draft_model is not None:
        spec = _with_draft(spec, _read_spec(_find(draft_model), weights_dtype, limit_bytes))
    memory_plan = make_plan(
        memory.divided(spec, hosts, pipeline=pipeline),
        memory_bytes=limit_bytes,
        batch=batch,
        kv_bits=kv_bits,
        **window,
    )
    if measure and memory_plan.free_bytes > 0:
        largest = largest_request(model, weights_dtype, limit_bytes, **window, **draft, **choice)
        memory_plan = replace(
            memory_plan, largest_request_tokens=largest.tokens, spilled=largest.spilled
        )
    if as_json:
        print(json.dumps(asdict(memory_plan)))
    else:
        _show(memory_plan, Console(highlight=False, markup=False))
    if not memory_plan.fits:
        raise typer.Exit(1)


def make_plan(
    spec: ModelSpec,
    *,
    memory_bytes: int,
    max_kv_size: int | None = None,
    keep: int | None = None,
    kv_bits: int | None = None,
    batch: int = 1,
) -> MemoryPlan:
    window = _window(spec, max_kv_size)
    config.parse(config.EngineSettings, memory_limit=1, max_kv_size=window, keep=keep)
    if kv_bits is not None and kv_bits not in memory.KV_BITS:
        raise SettingError(f"--kv-bits {kv_bits}: must be 2, 3, 4, 5, 6 or 8")
    rows = tuple(
        _row(spec.keeping(bits), bits, memory_bytes, window, batch)
        for bits in (None, *memory.KV_BITS)
    )
    chosen = next(r for r in rows if (r.kv_bits if r.quantized else None) == kv_bits)
    if chosen.impossible:
        raise SettingError(chosen.impossible)
    free = memory_bytes - (spec.weight_bytes or 0)
    return MemoryPlan(
        model=spec.name,
        model_type=spec.model_type,
        dtype=spec.dtype,
        memory_bytes=memory_bytes,
        weight_bytes=spec.weight_bytes,
        weight_source=spec.weight_source,
        free_bytes=free,
        max_kv_size=window,
        keep_kv_size=config.default_keep(window) if keep is None else keep,
        batch=batch,
        layers={
            kind: sum(layer.kind == kind for layer in spec.layers)
            for kind in ("full", "window", "recurrent")
        },
        state_bytes_per_sequence=spec.state_bytes,
        rows=rows,
        chosen=chosen,
        arithmetic=tuple(_arithmetic(spec.keeping(kv_bits), chosen, memory_bytes, window, batch)),
        fits=chosen.missing_bytes == 0,
        advice=_advice(chosen, rows, memory_bytes, free, batch) if chosen.missing_bytes else None,
        notes=_notes(spec, window),
    )


def _with_draft(spec: ModelSpec, draft: ModelSpec) -> ModelSpec:
    if draft.weight_bytes is None:
        raise ModelError(f"{draft.name}: {draft.weight_source}; a draft model's weights must count")
    added = f"{format_bytes(draft.weight_bytes)} of them the draft model's"
    token = format_bytes(memory.bytes_per_token(draft, kind=None))
    note = (
        f"the draft model {draft.name} needs {token} a token, in memory left free by caches; "
        f"these bytes are freed first"
    )
    return replace(
        spec,
        weight_bytes=(spec.weight_bytes or 0) + draft.weight_bytes,
        weight_source=f"{spec.weight_source}, {added}",
        notes=(*spec.notes, note),
    )


def _window(spec: ModelSpec, max_kv_size: int | None) -> int:
    """Return the window in tokens: as requested, or limited by the model's context length."""
    if max_kv_size is None and spec.max_tokens is not None and spec.max_tokens < 2:
        raise ModelError(
            f"{spec.name}: max_position_embeddings is {spec.max_tokens}, and a window has at least "
            "2 tokens; give one with --max-kv-size if the config is wrong there"
        )
    return max_kv_size or min(config.MAX_KV_SIZE, spec.max_tokens or config.MAX_KV_SIZE)


def _notes(spec: ModelSpec, window: int) -> tuple[str, ...]:
    notes = list(spec.notes)
    if spec.weight_bytes is None:
        notes.append(f"weights: {spec.weight_source}; they are not counted")
    if spec.raw_dtype:
        notes.append(f"keys and values are kept in {spec.raw_dtype} without a codec")
    if spec.max_tokens and window > spec.max_tokens:
        notes.append(
            f"the model's context is {counted(spec.max_tokens, 'token')}, less than the window"
        )
    return tuple(notes)


def _row(spec: ModelSpec, bits: int | None, memory_bytes: int, window: int, batch: int) -> PlanRow:
    label = 8 * spec.scalar_bytes if bits is None else bits
    try:
        group = 64 if bits is None else memory.group_size_for(spec)
    except SettingError as error:
        return PlanRow(label, True, 0, 0, 0, 0, 0, None, 0, str(error))
    fit = memory.what_fits(
        spec, memory_bytes, max_kv_size=window, batch=batch, kv_bits=bits, group_size=group
    )
    largest = fit.largest_window_tokens
    if largest is not None and spec.max_tokens is not None:
        largest = min(largest, max(spec.max_tokens, window))  # beyond the model's context length
    return PlanRow(
        kv_bits=label,
        quantized=bits is not None,
        full_bytes_per_token=memory.bytes_per_token(
            spec, kind="full", kv_bits=bits, group_size=group
        ),
        window_bytes_per_token=memory.bytes_per_token(
            spec, kind="window", kv_bits=bits, group_size=group
        ),
        bytes_per_sequence=fit.sequence_bytes,
        bytes_of_batch=batch * fit.sequence_bytes,
        sequences=fit.sequences,
        largest_window_tokens=largest,
        missing_bytes=fit.missing_bytes,
    )


def _arithmetic(
    spec: ModelSpec, row: PlanRow, memory_bytes: int, window: int, batch: int
) -> list[str]:
    bits = row.kv_bits if row.quantized else None
    group = memory.group_size_for(spec) if row.quantized else 64
    lines, parts = [], []
    for count, layer in memory.layer_groups(spec):
        total = count * memory.layer_bytes_per_token(
            layer, spec.scalar_bytes, kv_bits=bits, group_size=group
        )
        if layer.kind != "recurrent":
            size = f"({layer.key_dim} + {layer.value_dim}) x {spec.scalar_bytes} bytes"
            if bits is not None:
                key, value = (
                    memory.vector_bytes(dim, spec.scalar_bytes, bits, group)
                    for dim in (layer.key_dim, layer.value_dim)
                )
                size = f"({key} + {value}) bytes"
            columns = layer.columns(window)
            lines.append(
                f"{count} {layer.kind} layers x {layer.kv_heads} heads x {size} = "
                f"{counted(total, 'byte')} a token, {counted(columns, 'token')}"
            )
            parts.append(f"{columns:,} x {total:,}")
        if layer.state_bytes:
            lines.append(
                f"{count} layers x {counted(layer.state_bytes, 'byte')} of recurrent state = "
                f"{counted(count * layer.state_bytes, 'byte')} a sequence"
            )
            parts.append(f"{count * layer.state_bytes:,}")
    if bits is not None:
        dim = next(layer.key_dim for layer in spec.layers if layer.key_dim)
        lines.append(
            f"{memory.vector_bytes(dim, spec.scalar_bytes, bits, group)} bytes = "
            f"{dim} x {bits} bits / 8 + {dim} / {group} groups x 2 "
            f"(scale, bias) x {spec.scalar_bytes} bytes"
        )
    lines.append(f"{' + '.join(parts) or 0} = {counted(row.bytes_per_sequence, 'byte')} a sequence")
    lines.append(
        f"{batch} x {row.bytes_per_sequence:,} = {counted(row.bytes_of_batch, 'byte')} of caches; "
        f"{memory_bytes:,} - {spec.weight_bytes or 0:,} of weights = "
        f"{counted(memory_bytes - (spec.weight_bytes or 0), 'byte')} free for them"
    )
    return lines


def _advice(chosen: PlanRow, rows: tuple[PlanRow, ...], limit: int, free: int, batch: int) -> str:
    """Describe by how much the chosen row does not fit, and each single change that would help."""
    short = format_bytes(chosen.missing_bytes)
    if free <= 0:
        return (
            f"does not fit: the weights alone exceed --memory-limit by {format_bytes(-free)}; "
            f"about {memory.enough_for(limit - free)} would be enough, or take a smaller or more "
            "strongly quantized model"
        )
    ways = []
    if chosen.largest_window_tokens and chosen.largest_window_tokens > 1:
        ways.append(f"--max-kv-size {chosen.largest_window_tokens}")
    if 0 < chosen.sequences < batch:
        ways.append(f"--batch {chosen.sequences}")
    better = [r for r in rows if r.quantized and not r.impossible and not r.missing_bytes]
    if better:
        ways.append(f"--kv-bits {better[0].kv_bits}")
    ways.append(f"{short} more --memory-limit")
    return (
        f"does not fit: caches of {format_bytes(chosen.bytes_of_batch)} in "
        f"{format_bytes(free)} beside the weights, {short} too much; use {' or '.join(ways)}"
    )


def _show(plan: MemoryPlan, console: Console) -> None:
    def show(text: str) -> None:
        print_line(console, text, indent=9)

    weights = "unknown" if plan.weight_bytes is None else format_bytes(plan.weight_bytes)
    layers = ", ".join(f"{count} {kind}" for kind, count in plan.layers.items() if count)
    show(f"{plan.model} ({plan.model_type}, {plan.dtype}): {layers} layers")
    show(f"weights  {weights} ({plan.weight_source})")
    show(f"memory   {format_bytes(plan.memory_bytes)}, {format_bytes(plan.free_bytes)} for caches")
    show(
        f"window   {counted(plan.max_kv_size, 'token')} a sequence, of them "
        f"{plan.keep_kv_size:,} kept; "
        f"batch {plan.batch}"
    )
    console.print(_table(plan, narrow=console.width < NARROW_COLUMNS))
    for line in plan.arithmetic:
        show(f"  {line}")
    for reason in sorted({row.impossible for row in plan.rows if row.impossible}):
        show(f"note: {reason}")
    for note in plan.notes:
        show(f"note: {note}")
    show(plan.advice or "fits; a prompt's own working memory comes on top")
    if plan.largest_request_tokens is not None:
        show(largest_line(plan.largest_request_tokens))
    if plan.spilled is not None:
        show(spilled_line(plan.spilled, plan.memory_bytes))


def _table(plan: MemoryPlan, *, narrow: bool) -> Table:
    windows, batches = plan.layers["window"] > 0, plan.batch > 1 or not narrow
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0)) if narrow else Table()
    titles = ("KV bits", "a token", *(["window layers"] if windows else []), "a sequence")
    for title in (*titles, *(["batch"] if batches else []), "sequences fit", "window fits"):
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in plan.rows:
        mark = "*" if row is plan.chosen else ""
        if row.impossible:
            table.add_row(f"{row.kv_bits}", "not possible")
            continue
        table.add_row(
            f"{mark}{row.kv_bits}",
            format_bytes(row.full_bytes_per_token),
            *([format_bytes(row.window_bytes_per_token)] if windows else []),
            format_bytes(row.bytes_per_sequence),
            *([format_bytes(row.bytes_of_batch)] if batches else []),
            f"{row.sequences:,}",
            "any" if row.largest_window_tokens is None else f"{row.largest_window_tokens:,}",
        )
    return table


def _limit(given_bytes: int | None) -> int:
    if given_bytes is None:
        return _default_limit()
    if given_bytes == 0:
        raise SettingError("--memory-limit is 0; give the memory for weights and caches, as 16GB")
    return given_bytes


def _default_limit() -> int:
    """Return the limit that `penstock doctor` shows, for which MLX queries the device."""
    try:
        from penstock.attention import devices  # a plan can be made where MLX has no back end
    except ImportError:
        return memory.read_machine_memory({}).default_limit_bytes
    return devices.machine_memory().default_limit_bytes


def _read_spec(path: Path, weights_dtype: config.WeightsDtype, limit_bytes: int) -> ModelSpec:
    """Return a model's spec with the weights' size once loaded; reads only headers."""
    # numpy takes a while to import, which --help need not wait for.
    from penstock.models.model_files import open_model_file

    def read(*, float32: bool) -> ModelSpec:
        if file is None:
            return memory.read_model_spec(path, float32=float32)
        return memory.read_model_spec(
            file.config, files=file.bytes_by_kind(float32=float32), float32=float32
        )

    file = open_model_file(path)
    native, float32_spec = read(float32=False), read(float32=True)
    try:
        from penstock.models.weight_packer import can_pack, planned_kv_dtype
        from penstock.models.widening import Widening  # where MLX has no back end, nothing is
    except ImportError:
        return native
    packed = memory.packed_weight_bytes(path) if file is None else file.packed_bytes()
    sizes = native.weight_bytes or 0, float32_spec.weight_bytes or 0
    if packed == 0:  # no weights are there to be counted: slightly more than needed
        packed = sizes[0] * 5 // 4
    if packed is not None and weights_dtype == "auto" and not can_pack():
        packed = None
    choice = Widening(weights_dtype, *sizes, limit_bytes, packed)
    if choice.packs:
        settings = _config(path) if file is None else file.config
        raw_dtype = None if choice.exact else planned_kv_dtype(native, settings)
        return replace(float32_spec, weight_bytes=choice.loaded_bytes, raw_dtype=raw_dtype)
    return float32_spec if choice.widens else native


def _config(path: Path) -> dict[str, Any]:
    return read_config(path / "config.json" if path.is_dir() else path)


def _find(model: str) -> Path:
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model in named.MODELS:
        file = named.find(model)
        if file is None:
            raise ModelError(f"{model} is not downloaded yet; penstock generate --model {model} hi")
        return file

    model = recommended.source_of(model)
    # The hub client takes 0.2 s to import, which a folder does not need. It
    # is installed because mlx-lm loads through it (via transformers).
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    raise ModelError(
        f"there is no {model}, and no downloaded model of that name; "
        "name a model folder or its config.json"
    )
