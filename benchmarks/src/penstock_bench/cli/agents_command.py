"""`penstock bench agents`: concurrent conversations that share a long system prompt."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock import config
from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli.settings_options import option_of, with_settings
from penstock.memory import format_bytes
from penstock.plurals import counted
from penstock.recall import MODEL_PATH
from penstock_bench.cli.bench_options import EngineSize

if TYPE_CHECKING:
    from penstock_bench.crowd import Account, AgentsReport, Crowd, Figures

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 1.0
"""Seconds between two printed lines if the output is not a terminal."""


AgentCount: TypeAlias = Annotated[
    int,
    typer.Option(
        "--agents",
        help="Conversations at the same time.",
        envvar="PENSTOCK_AGENTS",
        metavar="NUMBER",
        min=2,
    ),
]
PromptTokens: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Maximum length of the shared system prompt.",
        envvar="PENSTOCK_TOKENS",
        metavar="TOKENS",
        min=32,
    ),
]
Seed: TypeAlias = Annotated[
    int,
    option_of(config.SamplingSettings, "seed", words="Seed of the facts and of the questions."),
]


@with_settings
def agents(
    model: options.Model = str(MODEL_PATH),
    weights_dtype: options.WeightsDtype = "auto",
    count: AgentCount = 8,
    tokens: PromptTokens = 4_000,
    *,
    engine_size: EngineSize,
    seed: Seed = 1,
    as_json: options.Json = False,
) -> None:
    """Let several conversations share a long system prompt.

    All run concurrently on the engine. The system prompt consists of facts. Each agent adds facts
    of its own, and asks for both. The answers are checked. A live line shows running and waiting
    requests, bytes in the ledger, and the bytes that separate caches would take.
    """
    engine = options.engine_size(model, engine_size)
    options.warn_of_slow_blas(load_blas())

    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock_bench.crowd import Crowd

    with Crowd(
        options.load_model(model, weights_dtype, engine.get("memory_limit")),
        agents=count,
        prompt_tokens=tokens,
        seed=seed,
        **{"block_size": config.BLOCK_SIZE, **engine},
    ) as crowd:
        if as_json:
            crowd.run(lambda _: None, PLAIN_SECONDS)
            print(json.dumps(crowd.report().record()))
            return
        # Without a terminal, no line is redrawn and nothing is colored.
        console = Console(highlight=False, markup=False, force_terminal=sys.stdout.isatty())
        _watch(crowd, console)
        _show(crowd.report(), console)


def _watch(crowd: Crowd, console: Console) -> None:
    """Run the agents and show progress: a live line on a terminal, else a line per second."""
    if not console.is_interactive:
        crowd.run(lambda figures: console.print(figures.line(), soft_wrap=True), PLAIN_SECONDS)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def draw(figures: Figures) -> None:
            live.update(Text(figures.line()), refresh=True)

        crowd.run(draw, LIVE_SECONDS)


def _show(report: AgentsReport, console: Console) -> None:
    said = Table(box=None, pad_edge=False)
    for title in ("agent", "asked", "fact", "answered", ""):
        said.add_column(title, overflow="fold")
    for account in report.agents:
        for index, answer in enumerate(account.answers):
            said.add_row(
                "" if index else str(account.agent),
                answer.question,
                "shared" if answer.shared else "own",
                answer.answer,
                "right" if answer.right else f"wrong: {answer.expected}",
            )
    console.print(said)
    console.print()
    console.print(_figures_table(report))
    for line in _summary(report):
        console.print(line, soft_wrap=True)


def _figures_table(report: AgentsReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("agent")
    for title in ("right", "tokens", "holds", "plain cache", "hit rate", "prefill avoided"):
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    shared = format_bytes(report.shared_bytes)
    table.add_row("shared", "", f"{report.shared_tokens:,}", shared, "", "", "")
    for account in report.agents:
        table.add_row(
            str(account.agent),
            _right(account),
            f"{account.conversation_tokens:,}",
            format_bytes(account.own_bytes),
            format_bytes(account.plain_bytes),
            f"{account.hit_rate:.0%}",
            f"{account.hit_tokens:,}",
        )
    table.add_row(
        "all",
        f"{report.right}/{report.asked}",
        f"{sum(account.conversation_tokens for account in report.agents):,}",
        format_bytes(report.held_bytes),
        format_bytes(report.plain_bytes),
        f"{report.hit_rate:.0%}",
        f"{report.hit_tokens:,}",
    )
    return table


def _right(account: Account) -> str:
    return f"{sum(answer.right for answer in account.answers)}/{len(account.answers)}"


def _summary(report: AgentsReport) -> list[str]:
    return [
        f"Prefilled {counted(report.prefilled_tokens, 'token')}; agents with "
        f"caches of their own would "
        f"have prefilled {report.plain_prefilled_tokens:,}.",
        f"At most {format_bytes(report.peak_bytes)} were allocated, of a limit of "
        f"{format_bytes(report.limit_bytes)}; "
        f"{counted(report.generated_tokens, 'token')} generated in "
        f"{report.seconds:.1f} s.",
    ]
