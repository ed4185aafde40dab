"""Benchmarks of the engine, each against mlx-lm on the same model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from penstock import config
from penstock.cli import options
from penstock.cli.settings_options import Fields, with_settings
from penstock.errors import SettingError
from penstock_bench.cli.bench_options import (
    AnyModel,
    EngineCodec,
    KnownTokens,
    Plot,
    Rounds,
    Save,
    Which,
    engine_shape,
    finish,
    progress_bar,
)


@with_settings
def shared_prefix(
    model: AnyModel = "random",
    conversations: Annotated[
        int, typer.Option(help="Conversations at the same time.", metavar="NUMBER", min=2)
    ] = 8,
    prefix: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of the shared prefix; may be given several times.",
            metavar="TOKENS",
            show_default="8192 and 2048",
            min=1,
        ),
    ] = None,
    rounds: Rounds = 5,
    cold_rounds: Annotated[
        int,
        typer.Option(
            help="Number of runs in which mlx-lm prefills the prefix of every conversation; "
            "takes minutes.",
            min=0,
        ),
    ] = 1,
    *,
    codec: EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Decode conversations that share a prefix.

    Measures speed and bytes. The other side is mlx-lm's batches. Exits with 1 if a goal is not met.
    """
    from penstock_bench.shared_prefix import SharedPrefixLoad, measure

    load = SharedPrefixLoad(
        model,
        engine=engine_shape(codec),
        conversations=conversations,
        rounds=rounds,
        cold_rounds=cold_rounds,
    )
    if prefix:
        load = replace(load, prefix_tokens=tuple(prefix))
    finish(measure(load), as_json=as_json, save=save, plot=plot)


@with_settings
def hit(
    model: AnyModel = "random",
    tokens: KnownTokens = 8_192,
    rounds: Rounds = 5,
    *,
    codec: EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Time the first token of a cached prompt.

    Also counts the copied bytes. The other side is mlx-lm's prompt cache. Exits with 1 if a goal is
    not met.
    """
    from penstock_bench.hit import HitLoad, measure

    engine = engine_shape(codec)
    report = measure(HitLoad(model, engine=engine, known_tokens=tokens, rounds=rounds))
    finish(report, as_json=as_json, save=save, plot=plot)


@with_settings
def restore(
    model: Which = "random",
    tokens: KnownTokens = 8_192,
    rounds: Rounds = 5,
    *,
    codec: EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Time the first token after a restart.

    Also measures the cost of writing. The other side is mlx-lm's prompt file. Files are written to
    the temporary folder (TMPDIR). Exits with 1 if a goal is not met.
    """
    from penstock_bench.models import ModelChoice
    from penstock_bench.restore import RestoreLoad, measure

    engine = engine_shape(codec)
    report = measure(
        RestoreLoad(ModelChoice(model), engine=engine, known_tokens=tokens, rounds=rounds)
    )
    finish(report, as_json=as_json, save=save, plot=plot)


@with_settings
def ragged(
    model: Which = "random",
    rounds: Rounds = 5,
    *,
    codec: EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Decode one long sequence and seven short ones.

    Measures speed and bytes. The other side is mlx-lm's padded batches. Exits with 1 if a goal is
    not met.
    """
    from penstock_bench.models import ModelChoice
    from penstock_bench.ragged import RaggedLoad, measure

    report = measure(RaggedLoad(ModelChoice(model), engine=engine_shape(codec), rounds=rounds))
    finish(report, as_json=as_json, save=save, plot=plot)


@with_settings
def single(
    model: AnyModel = "random",
    rounds: Rounds = 5,
    longest: Annotated[
        int,
        typer.Option(
            help="Length up to which the cost of a step is measured; 0 disables it.",
            metavar="TOKENS",
            min=0,
        ),
    ] = 32_768,
    curve_only: Annotated[
        bool, typer.Option("--curve-only", help="Measure only the cost of a step (--longest).")
    ] = False,
    prompt: Annotated[
        list[int] | None,
        typer.Option(
            help="Prompt length of one sequence, in place of the usual shapes; may be given "
            "several times.",
            metavar="TOKENS",
            min=64,
            show_default="the usual shapes",
        ),
    ] = None,
    *,
    codec: EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Prefill and decode sequences that share nothing.

    Measures speed and the cost of a step. The other side is mlx-lm, alone and in batches. Exits
    with 1 if a goal is not met.
    """
    from penstock_bench.single import SingleLoad, measure

    load = SingleLoad(model, engine=engine_shape(codec), rounds=rounds)
    load = replace(load, curve_tokens=load.curve_to(longest))
    if curve_only:
        if not longest:
            raise SettingError("--curve-only needs --longest above 0")
        load = replace(load, shapes=())
    elif prompt:
        load = replace(load, shapes=tuple((1, tokens) for tokens in prompt))
    finish(measure(load), as_json=as_json, save=save, plot=plot)


@with_settings
def quantized(
    codec: Annotated[
        str,
        typer.Option(
            "--codec",
            "--kv-cache-quantization",
            help="Codec that is compared with full precision.",
            metavar="CODEC",
        ),
    ] = "auto3.5x",
    *,
    min_tokens: Annotated[
        dict[str, Any], Fields(config.EngineSettings, "kv_cache_min_quantize_tokens")
    ],
    model: Which = "random",
    longest: Annotated[
        int, typer.Option(help="Length of the longest prompt.", metavar="TOKENS", min=1_024)
    ] = 8_192,
    rounds: Rounds = 5,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Decode a sequence in a codec and in full precision.

    Measures peak memory and speed. The other side is mlx-lm's quantized cache. Exits with 1 if a
    goal is not met.
    """
    from penstock_bench.engine_sides import EngineShape
    from penstock_bench.models import ModelChoice
    from penstock_bench.quantized_runs import QuantizedLoad, measure

    load = QuantizedLoad(codec, ModelChoice(model), engine=EngineShape(**min_tokens), rounds=rounds)
    lengths = tuple(tokens for tokens in load.lengths if tokens <= longest)
    finish(measure(replace(load, lengths=lengths)), as_json=as_json, save=save, plot=plot)


@with_settings
def hybrid(
    known: Annotated[
        int, typer.Option(help="Length of the first turn's prompt.", metavar="TOKENS", min=512)
    ] = 4_096,
    rounds: Rounds = 5,
    *,
    codec: EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Time the second turn with a model of recurrent layers.

    The other side is mlx-lm's server cache. Exits with 1 if a goal is not met.
    """
    from penstock_bench.hybrid import HybridLoad, measure

    report = measure(HybridLoad(engine=engine_shape(codec), known_tokens=known, rounds=rounds))
    finish(report, as_json=as_json, save=save)


def speculate(
    model: Annotated[
        str,
        typer.Option(
            help="random: a llama of 21 million parameters; embedded; or a model with real "
            "weights: a folder, a .gguf file, or smollm2.",
            metavar="MODEL",
        ),
    ] = "random",
    tokens: Annotated[
        int,
        typer.Option(
            help="Maximum number of proposed tokens per step.", metavar="TOKENS", min=1, max=16
        ),
    ] = 16,
    packed: Annotated[
        bool,
        typer.Option("--packed", help="Multiply by the weights' codes; mlx-lm is then left out."),
    ] = False,
    rounds: Rounds = 5,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Decode answers that repeat text, and one that does not, several tokens a step.

    The answers follow a script. The other sides are our engine without proposals, mlx-lm, and
    mlx-lm with a draft model that always guesses right; without repetition our engine has that
    draft model, too. No round but the first begins where 400 seconds would be passed. Exits with 1
    if a goal is not met.
    """
    from penstock_bench.speculate import SpeculateLoad, measure

    report = measure(SpeculateLoad(model, proposed=tokens, packed=packed, rounds=rounds).for_real())
    finish(report, as_json=as_json, save=save)


def attend(
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of the prompt of one sequence; may be given several times.",
            metavar="TOKENS",
            show_default="8192 and 32768, and eight sequences that share 8192",
            min=64,
        ),
    ] = None,
    attend_tokens: Annotated[
        int,
        typer.Option(
            help="Number of tokens that a decode step attends to.", metavar="TOKENS", min=128
        ),
    ] = 1_024,
    attend_rest: Annotated[
        bool,
        typer.Option(
            "--attend-rest", help="Also attend to the other tokens, at two bits per number."
        ),
    ] = False,
    packed: Annotated[
        bool,
        typer.Option("--packed", help="Give the llama 4 bits, multiplied by its codes on a CPU."),
    ] = False,
    rounds: Rounds = 5,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Time decode steps that read selected tokens of a long sequence.

    The other side is the same engine with full attention. Prompts are prefilled without attention,
    which does not affect the time of steps. Exits with 1 if a goal is not met.
    """
    from penstock_bench.attend_steps import AttendLoad, measure

    load = AttendLoad(
        attend_tokens=attend_tokens, attend_rest=attend_rest, packed=packed, rounds=rounds
    )
    if tokens:
        load = replace(load, shapes=tuple((1, length) for length in tokens))
    with progress_bar("stepping") as notify:
        measured = measure(load, notify)
    finish(measured, as_json=as_json, save=save)


def million(
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of the dialogue at which steps are timed; may be given several times.",
            metavar="TOKENS",
            show_default="32000, 128000, 512000 and 1000000",
            min=2_000,
        ),
    ] = None,
    memory_limit: Annotated[
        str, typer.Option(help="Memory limit of the engine.", metavar="BYTES")
    ] = "4GB",
    as_trained: Annotated[
        bool, typer.Option(help="With the model's own config, for 32,768 positions.")
    ] = False,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Time steps behind a million tokens, within a memory limit.

    The embedded model reads in part, also prompts, and leaves most keys and values on a disk. At
    the end it is asked for facts of the beginning. Exits with 1 if a goal is not met.
    """
    from penstock_bench.million import MillionLoad, measure
    from penstock_bench.million_picture import draw

    load = MillionLoad(memory_limit=memory_limit, stretched=not as_trained)
    if tokens:
        load = replace(load, lengths=tuple(sorted(tokens)))
    with progress_bar("reading") as notify:
        measured = measure(load, notify)
    finish(measured, as_json=as_json, save=save, plot=plot, draw=draw)
