"""`penstock bench kernels`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from penstock.cli import options
from penstock.errors import SettingError
from penstock_bench.cli.bench_options import Save, finish


def kernels(
    heads: Annotated[int, typer.Option(help="Query heads of a layer.", min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key heads of a layer.", min=1)] = 8,
    head_size: Annotated[int, typer.Option(help="Size of a head.", min=32)] = 128,
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"] | None,
        typer.Option(
            help="Data type of keys and values.", show_default="float16; float32 on a CPU"
        ),
    ] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            help="Number of sequences in a step; may be given several times.",
            metavar="NUMBER",
            show_default="2 and 8",
            min=2,
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of the longest sequence; may be given several times.",
            metavar="TOKENS",
            show_default="512, 2048 and 8192",
            min=64,
        ),
    ] = None,
    codec: Annotated[str, typer.Option(help="Codec of keys and values.")] = "raw",
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Time a layer's attention in a decode step.

    Compares kernels, MLX's fused attention over concatenated parts, and plain operations. There are
    no kernels on a CPU. Exits with 1 if plain operations are faster than the default way.
    """
    from penstock.attention import devices
    from penstock.kv.codecs.names import parse_scheme
    from penstock_bench.kernels import KernelsLoad, layer_form, measure

    if heads % kv_heads:
        raise SettingError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}")
    try:
        if codec != "raw":
            parse_scheme(codec)
    except ValueError as error:
        raise SettingError(f"--codec: {error}") from None
    kind = dtype or ("float32" if devices.current().facts.slow_half else "float16")
    defaults = KernelsLoad((layer_form(heads, kv_heads, head_size, kind),))
    load = KernelsLoad(
        defaults.layers,
        tuple(rows or defaults.rows),
        tuple(tokens or defaults.tokens),
        codec,
    )
    finish(measure(load), as_json=as_json, save=save)
