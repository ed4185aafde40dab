"""The command line: `penstock serve | chat | generate | top | cache | doctor`, and others."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.main import get_command

from penstock import __version__
from penstock.cli import (
    agents,
    cache,
    chat,
    doctor,
    generate,
    launch,
    plan,
    serve,
    top,
    verify,
)
from penstock.cli.command_group import CommandGroup
from penstock.cli.options import with_values
from penstock.errors import PenstockError
from penstock.models import named

# Plain help: it is the same in a pipe, in a narrow terminal and in docs/cli.md.
app = typer.Typer(
    name="penstock",
    cls=CommandGroup,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(agents.agents)
app.command()(serve.serve)
app.command()(launch.launch)
app.command()(top.top)
app.command()(verify.verify)
app.command()(plan.plan)
app.add_typer(cache.app, name="cache", no_args_is_help=False)  # a refusal is one line
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit()


def _forbid_downloads(wanted: bool) -> None:
    if wanted:
        os.environ[named.OFFLINE] = "1"


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Fetch no model, from a hub or from the package index.",
            callback=_forbid_downloads,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Serve language models on MLX inside a fixed amount of memory.

    An environment variable named beside a flag sets its default.
    """


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 2 a wrong flag, model or file (one line on standard error), 130 Ctrl-C.
    """
    given = with_values(sys.argv[1:] if arguments is None else arguments)
    try:
        code = get_command(app)(given or ["--help"], prog_name="penstock", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(error.format_message())
    except PenstockError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except ImportError as error:
        return _fail(f"a needed package is missing or broken ({error}); run penstock doctor")
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    print(f"penstock: {' '.join(message.split())}", file=sys.stderr)
    return 2
