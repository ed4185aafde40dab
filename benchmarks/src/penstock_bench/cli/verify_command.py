"""`penstock bench verify`: compares answers from cold, warm and restarted engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli.settings_options import with_settings
from penstock.errors import SettingError
from penstock.recall import MODEL_PATH
from penstock_bench.cli.bench_options import EngineSize, progress_bar
from penstock_bench.recall import dialogue

if TYPE_CHECKING:
    from penstock_bench.replay import ReplayVerdict

OWN_PROMPTS = 4
"""Number of conversations for the embedded model if no file is given."""
OWN_TOKENS = 600


Prompts: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help='Prompts to replay: lines of JSON, {"messages": [...]} or {"prompt": "..."}.',
        metavar="FILE.jsonl",
        show_default="conversations of its own, for the embedded model",
        exists=True,
        dir_okay=False,
    ),
]
MaxTokens: TypeAlias = Annotated[
    int, typer.Option(help="Length of each answer.", metavar="TOKENS", min=1)
]
Tolerance: TypeAlias = Annotated[
    float,
    typer.Option(
        help="Maximum difference of a log-probability. Matrix products of other shapes round "
        "differently: by about 1e-4 in float32 and 0.1 in bfloat16.",
        min=0.0,
    ),
]


@with_settings
def verify(
    model: options.Model = str(MODEL_PATH),
    weights_dtype: options.WeightsDtype = "auto",
    prompts: Prompts = None,
    max_tokens: MaxTokens = 32,
    tolerance: Tolerance = 0.05,
    *,
    engine_size: EngineSize,
    as_json: options.Json = False,
) -> None:
    """Ask prompts cold, from memory and after a restart; compare the answers.

    Tokens must be equal, and log-probabilities within the tolerance. Blocks are written to a
    temporary folder, which is removed. Exits with 1 if an answer differs.
    """
    engine = options.engine_size(model, engine_size)
    conversations = _read_conversations(model, prompts)
    options.warn_of_slow_blas(load_blas())

    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock.models.mlx_lm import encode, render
    from penstock_bench.replay import replay

    loaded = options.load_model(model, weights_dtype, engine.get("memory_limit"))
    tokens = [
        encode(loaded.tokenizer, conversation)
        if isinstance(conversation, str)
        else render(loaded.tokenizer, conversation)
        for conversation in conversations
    ]
    with progress_bar("asking") as notify:
        verdicts = replay(
            loaded, tokens, max_tokens, lambda done, of: notify("asking", done, of), **engine
        )
    wrong = [verdict for verdict in verdicts if not verdict.is_within(tolerance)]
    if as_json:
        objects = [verdict.as_object() for verdict in verdicts]
        print(json.dumps({"same": not wrong, "tolerance": tolerance, "prompts": objects}))
    else:
        _print(verdicts, tolerance)
    raise typer.Exit(1 if wrong else 0)


def _read_conversations(model: str, file: Path | None) -> list[Any]:
    """Read the prompts: messages, or texts.

    Raises:
        SettingError: a line is not a prompt, or the file has none.
    """
    if file is not None:
        lines = enumerate(file.read_text(errors="surrogateescape").splitlines(), 1)
        conversations = [
            _prompt(f"{file}, line {number}", line) for number, line in lines if line.strip()
        ]
        if not conversations:
            raise SettingError(f"--prompts {file} holds no prompt")
        return conversations
    if Path(model).expanduser().resolve() != MODEL_PATH.resolve():
        raise SettingError(
            "--prompts is required, because only the embedded model has default prompts"
        )
    dialogues = [dialogue(seed, tokens=OWN_TOKENS, facts=2) for seed in range(OWN_PROMPTS)]
    return [talk.ask(question) for talk in dialogues for question in talk.questions]


def _prompt(where: str, line: str) -> Any:
    options.check_text(where, line)
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise SettingError(f"{where} is no JSON: {error}") from None
    if isinstance(fields, dict) and isinstance(fields.get("messages"), list) and fields["messages"]:
        return fields["messages"]
    if isinstance(fields, dict) and isinstance(fields.get("prompt"), str) and fields["prompt"]:
        return fields["prompt"]
    raise SettingError(f"{where} has neither messages nor a prompt")


def _print(verdicts: list[ReplayVerdict], tolerance: float) -> None:
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for title in ("prompt", "tokens", "from memory", "from disk", "difference"):
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("")
    for number, verdict in enumerate(verdicts, 1):
        table.add_row(
            str(number),
            f"{verdict.prompt_tokens:,}",
            f"{verdict.cached['memory']:,}",
            f"{verdict.cached['disk']:,}",
            f"{verdict.difference:.1e}",
            "same" if verdict.is_within(tolerance) else verdict.fault(tolerance),
        )
    Console(highlight=False).print(table)
    wrong = sum(not verdict.is_within(tolerance) for verdict in verdicts)
    said = "all answers are the same" if not wrong else f"{wrong} of {len(verdicts)} differ"
    print(f"{said}: cold, from memory, and from the disk after a restart", file=sys.stderr)
