"""`penstock plan`: computes memory use and the requests that fit, without loading a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
from penstock.cli.model_table import TableModel, table_models
from penstock.cli.plan_several import (
    PlannedMember,
    PlannedTogether,
    beside_pinned,
    show_together,
    together,
)
from penstock.cli.planned_encoder import downloaded_encoder, encoder_bytes, planned_encoder
from penstock.cli.planned_spec import limit_or_usual, read_spec
from penstock.cli.serve_options import ModelsFile, MoreModels
from penstock.cli.settings_options import Fields, with_settings
from penstock.cli.whole_words import print_line
from penstock.errors import ModelError, SettingError
from penstock.memory import ModelSpec, format_bytes
from penstock.models.head_source import head_of
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
    """Tokens of the largest request that the server would admit; None if not measured."""
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
    more_models: MoreModels = None,
    models_file: ModelsFile = None,
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
    """Show the memory that one or several models need, and the requests that fit.

    Reads only the config and the headers of weight files; --measure loads the model. Exits with 0
    if the batch fits, 1 if not.
    """
    draft_model: str | None = draft.get("draft_model")
    if draft_model is not None and hosts > 1:
        raise SettingError("--draft-model does not work with --hosts; remove one of them")
    if measure and (hosts > 1 or kv_bits is not None):
        raise SettingError("--measure does not work with --hosts or --kv-bits; remove these")
    if any(choice.values()) and not measure:
        raise SettingError(
            "--attend-tokens, --attend-rest and --active-kv-size change the largest request: add "
            "--measure"
        )
    limit_bytes = limit_or_usual(limit.get("memory_limit"))
    if more_models or models_file is not None:
        if measure or hosts > 1 or batch > 1 or kv_bits is not None or draft_model is not None:
            raise SettingError(
                "--measure, --hosts, --batch, --kv-bits and --draft-model do not work with "
                "several models; plan one, or remove these"
            )
        given = [] if models_file is not None and model == str(MODEL_PATH) else [model]
        models = table_models(
            [*given, *(more_models or [])],
            models_file,
            weights_dtype=weights_dtype,
            model_source="auto",
            chat_template=None,
        )
        show_together(_planned_together(models, limit_bytes, window), as_json=as_json)
        return
    folder = downloaded_encoder(model)
    if folder is not None:
        encoder = planned_encoder(folder.name, folder, limit_bytes)
        show_together(together([encoder], limit_bytes), as_json=as_json)
        return
    head = head_of(draft)

    def planned(limit_bytes: int) -> MemoryPlan:
        spec = read_spec(model, weights_dtype, limit_bytes, head=head)
        if any(choice.values()):
            spec = replace(spec, raw_dtype=None)
        if draft_model is not None and head is None:
            spec = _with_draft(spec, read_spec(draft_model, weights_dtype, limit_bytes))
        return make_plan(
            memory.divided(spec, hosts, pipeline=pipeline),
            memory_bytes=limit_bytes,
            batch=batch,
            kv_bits=kv_bits,
            **window,
        )

    memory_plan = planned(limit_bytes)
    if not memory_plan.fits and memory_plan.free_bytes <= 0:
        enough = _enough(memory_plan, planned)
        memory_plan = replace(memory_plan, advice=_too_large(-memory_plan.free_bytes, enough))
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


def _planned_together(
    models: Sequence[TableModel], limit_bytes: int, window: dict[str, Any]
) -> PlannedTogether:
    sources = [
        downloaded_encoder(model.path) or read_spec(model.path, model.weights_dtype, limit_bytes)
        for model in models
    ]
    weights = [
        encoder_bytes(source) if isinstance(source, Path) else source.weight_bytes or 0
        for source in sources
    ]
    rooms = beside_pinned(weights, [model.pin for model in models], limit_bytes)
    members = []
    for model, source, room in zip(models, sources, rooms, strict=True):
        if isinstance(source, Path):
            members.append(planned_encoder(model.name, source, room, pinned=model.pin))
            continue
        sized = {name: model.engine.get(name, value) for name, value in window.items()}
        chosen = make_plan(source, memory_bytes=max(0, room), **sized).chosen
        members.append(
            PlannedMember(
                name=model.name,
                pinned=model.pin,
                weight_bytes=source.weight_bytes,
                bytes_per_token=chosen.full_bytes_per_token,
                largest_tokens=chosen.largest_window_tokens,
                missing_bytes=max(0, (source.weight_bytes or 0) - max(0, room)),
            )
        )
    return together(members, limit_bytes)


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
        raise ModelError(f"{draft.name}: {draft.weight_source}; a draft model's size must be known")
    added = f"including {format_bytes(draft.weight_bytes)} of the draft model"
    token = format_bytes(memory.bytes_per_token(draft, kind=None))
    note = (
        f"the draft model {draft.name} needs {token} a token, of memory that caches leave free; "
        f"it is freed first"
    )
    return replace(
        spec,
        weight_bytes=(spec.weight_bytes or 0) + draft.weight_bytes,
        weight_source=f"{spec.weight_source}, {added}",
        notes=(*spec.notes, note),
    )


def _window(spec: ModelSpec, max_kv_size: int | None) -> int:
    """Return the window in tokens: the requested one, or the default within the context length."""
    if max_kv_size is None and spec.max_tokens is not None and spec.max_tokens < 2:
        raise ModelError(
            f"{spec.name}: max_position_embeddings is {spec.max_tokens}, and a window has at least "
            "2 tokens; set it with --max-kv-size if the config is wrong"
        )
    return max_kv_size or min(config.MAX_KV_SIZE, spec.max_tokens or config.MAX_KV_SIZE)


def _notes(spec: ModelSpec, window: int) -> tuple[str, ...]:
    notes = list(spec.notes)
    if spec.weight_bytes is None:
        notes.append(f"weights: {spec.weight_source}; they are not counted")
    if spec.raw_dtype:
        notes.append(f"keys and values are stored in {spec.raw_dtype} without a codec")
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


def _enough(plan: MemoryPlan, planned: Callable[[int], MemoryPlan]) -> str:
    """Return the smallest limit of a plan that fits; a larger one may convert the weights."""
    while plan.chosen.missing_bytes:
        enough = memory.round_up(_needed_bytes(plan))
        plan = planned(memory.parse_bytes(enough))
    less = memory.round_up(_needed_bytes(plan))  # the converted weights may be smaller
    return less if planned(memory.parse_bytes(less)).fits else enough


def _needed_bytes(plan: MemoryPlan) -> int:
    return plan.memory_bytes - plan.free_bytes + plan.chosen.bytes_of_batch


def _too_large(excess_bytes: int, enough: str) -> str:
    return (
        f"does not fit: the weights alone exceed --memory-limit by {format_bytes(excess_bytes)}; "
        f"raise it to at least {enough} for weights and caches, or use a smaller or more strongly "
        f"quantized model"
    )


def _advice(chosen: PlanRow, rows: tuple[PlanRow, ...], limit: int, free: int, batch: int) -> str:
    """Describe how many bytes the chosen row lacks, and each change that would suffice."""
    short = format_bytes(chosen.missing_bytes)
    if free <= 0:
        return _too_large(-free, memory.round_up(limit + chosen.missing_bytes))
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
        f"{format_bytes(free)} besides the weights, {short} too much; use {' or '.join(ways)}"
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
    show(plan.advice or "fits; prefill needs additional working memory")
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
