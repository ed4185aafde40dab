"""`penstock bench-kv-cache`: bytes, errors and speed of every KV cache format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import psutil
import typer
from rich.console import Console
from rich.table import Table as Drawn

from penstock.cli import options
from penstock.errors import SettingError
from penstock.memory import format_bytes
from penstock.recall import MODEL_PATH
from penstock_bench.cli.bench_options import Plot, Save, progress_bar

if TYPE_CHECKING:
    from penstock_bench.codecs import CacheShape, Sides, Table

EMBEDDED = "embedded"
TIMES_RAW = 4
"""Memory of a comparison over the raw bytes of all layers."""
TIMES_LAYER = 12
"""Memory over the raw bytes of the layer being measured; 11.8 for a float16 layer."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def bench_kv_cache(
    layers: Annotated[int, typer.Option(help="Number of layers.", min=1)] = 32,
    heads: Annotated[int, typer.Option(help="Number of KV heads.", min=1)] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", min=1)] = 128,
    seq_len: Annotated[int, typer.Option(help="Number of tokens.", min=64)] = 512,
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"],
        typer.Option(help="Data type of the unquantized cache, to which ratios refer."),
    ] = "float16",
    codecs: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated codecs.",
            metavar="NAMES",
            show_default="one or two of every kind and size",
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="gauss, outliers (of some channels of the keys) or biased (keys with a constant, "
            "turned by RoPE). Else KV of a text, as a model computes them: embedded, its folder "
            "or its Hugging Face name.",
            metavar="DATA",
        ),
    ] = "gauss",
    rounds: Annotated[int, typer.Option(help="Number of timed runs per codec.", min=1)] = 5,
    save: Save = None,
    plot: Plot = None,
    as_json: options.Json = False,
) -> None:
    """Measure bytes, errors and speed of every codec.

    All encode the same keys and values. mlx-lm's quantized cache is included, and vllm-mlx's where
    it is installed. Reports bytes, errors of the values and of attention (each query looks for one
    token), and the time to quantize, to dequantize and to attend.
    """
    from penstock_bench import codecs as bench

    names = _codec_names(codecs)
    shape = bench.CacheShape(layers, heads, head_dim, seq_len, dtype, rounds)
    shape, sides = _data(data, shape)
    _check_free(shape)
    done = count()
    with progress_bar("making the data") as notify:
        table = bench.measure(
            shape,
            data,
            names,
            sides,
            lambda name: notify(f"holding as {name}", next(done), len(names)),
        )
    _publish(table, as_json=as_json, save=save, plot=plot)


def _codec_names(codecs: str | None) -> Sequence[str]:
    """Return the codecs to measure.

    Raises:
        SettingError: the list is empty, or a codec is unknown.
    """
    from penstock.kv.codecs.names import parse_scheme
    from penstock_bench.codecs import CODECS

    names = CODECS if codecs is None else [name for name in codecs.split(",") if name.strip()]
    if not names:
        raise SettingError("--codecs is empty")
    try:
        for name in names:
            parse_scheme(name)
    except ValueError as error:
        raise SettingError(f"--codecs: {error}") from None
    return names


def _data(data: str, shape: CacheShape) -> tuple[CacheShape, Sequence[Sides] | None]:
    """Return the shape, and the model's own keys and values if `data` names a model.

    Raises:
        SettingError: the folder does not exist.
    """
    from penstock_bench import codecs as bench

    if data in bench.DATA:
        return shape, None
    model = str(MODEL_PATH) if data == EMBEDDED else data
    if "/" not in model and not Path(model).is_dir():
        known = ", ".join([*bench.DATA, EMBEDDED])
        raise SettingError(f"--data {data}: there is no such folder; or one of {known}")
    taken, sides = bench.of_model(model, shape.seq_len, shape.dtype)
    return replace(taken, seq_len=shape.seq_len, dtype=shape.dtype, rounds=shape.rounds), sides


def _check_free(shape: CacheShape) -> None:
    """Refuse a cache that does not fit in free memory.

    Raises:
        SettingError: has the needed and the free bytes.
    """
    needed = TIMES_RAW * shape.raw_bytes + TIMES_LAYER * shape.raw_bytes // shape.layers
    free = psutil.virtual_memory().available
    if needed > free:
        raise SettingError(
            f"keys and values of {format_bytes(shape.raw_bytes)} need {format_bytes(needed)} with "
            f"what they are compared with, and {format_bytes(free)} are free; take fewer --layers "
            f"or a smaller --seq-len"
        )


def _publish(table: Table, *, as_json: bool, save: Path | None, plot: Path | None) -> None:
    """Store the record, draw the picture, and print JSON or the tables."""
    from penstock_bench.report import keep

    record = table.as_object()
    if save is not None:
        keep("kv-cache", record, save)
    if plot is not None:
        from penstock_bench.codecs_picture import draw_codecs

        draw_codecs(table, plot)
    if as_json:
        print(json.dumps(record))
    else:
        _print(table)


def _print(table: Table) -> None:
    shape = table.shape
    console = Console(highlight=False)
    console.print(
        f"{shape.layers} layers x {shape.heads} heads x {shape.head_dim} x {shape.seq_len} tokens, "
        f"{table.data}; raw is {shape.dtype}"
    )
    losses = _drawn(
        "what it loses", "bytes", "ratio", "MSE K", "MSE V", "mean", "max", "KL", "top 1"
    )
    costs = _drawn("what it costs, ms", "quantize", "dequantize", "attend", "peak")
    for row in table.rows:
        losses.add_row(
            row.name,
            format_bytes(row.nbytes),
            f"{row.ratio:.2f}x",
            f"{row.relative_mse_keys:.1e}",
            f"{row.relative_mse_values:.1e}",
            f"{row.mean_error:.3f}",
            f"{row.max_error:.2f}",
            f"{row.kl:.1e}",
            f"{row.top_1:.1%}",
        )
        costs.add_row(
            row.name,
            f"{row.quantize_ms:.1f}",
            f"{row.dequantize_ms:.1f}",
            f"{row.attend_ms:.2f}",
            format_bytes(row.peak_bytes),
        )
    console.print(losses)
    console.print(costs)
    for name, why in table.refused.items():
        console.print(f"not in the table: {name}: {why}")
    console.print(
        "MSE is relative to the numbers' squares, mean and max are absolute, each of keys and "
        "values. KL is in nats, of the attention weights of queries that look for one token each. "
        "Times are of one pass over all layers, attention with one query a head. The peak is above "
        "the bytes that were there before."
    )


def _drawn(*headings: str) -> Drawn:
    drawn = Drawn(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return drawn
