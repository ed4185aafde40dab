"""Entry point of the command line."""

from __future__ import annotations

import os
import re
import sys
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.main import get_command

from penstock import __version__
from penstock.blas import INSTALL_BACK_END, has_back_end
from penstock.cli import (
    background_service,
    cache,
    chat,
    doctor,
    explain,
    generate,
    launch,
    model_list,
    plan,
    serve,
    top,
)
from penstock.cli.foreign_names import translated
from penstock.cli.help_groups import CommandGroup, GroupedCommand
from penstock.cli.options import lenient_output, with_values
from penstock.config import in_plain_words
from penstock.errors import PenstockError
from penstock.models import named

# Plain help, so that it is the same in a pipe, a narrow terminal and docs/cli.md.
app = typer.Typer(
    name="penstock",
    cls=CommandGroup,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=GroupedCommand)(generate.generate)
app.command(cls=GroupedCommand)(chat.chat)
app.command(cls=GroupedCommand)(serve.serve)
app.command()(launch.launch)
app.command()(top.top)
app.command()(explain.explain)
app.command()(model_list.models)
app.command()(model_list.pull)
app.command()(plan.plan)
app.add_typer(cache.app, name="cache", no_args_is_help=False)  # for one-line errors
app.add_typer(background_service.app, name="service", no_args_is_help=False)
app.command()(doctor.doctor)


SEVERAL = re.compile(r"(Did you mean '[^']*')(?:, '[^']*')+\?")
"""Pattern of the parser's message that suggests several commands, nearest first."""
VARIABLE = re.compile(r"\(env var: '\['(\w+)'\]'\)")
"""Pattern of the parser's hint at an environment variable, in quotes and brackets."""
UNLISTED = r"Missing command\.|No such command '.*'\."
"""Pattern of the parser's messages about a missing or unknown command."""


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"penstock {__version__}")
        raise typer.Exit()


def _forbid_downloads(is_set: bool) -> None:
    if is_set:
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
            help="Do not download models, from a hub or from the package index.",
            callback=_forbid_downloads,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Serve language models on MLX inside a fixed amount of memory.

    The environment variable shown next to a flag sets its default.
    """
    named.forbid_downloads()  # before any command imports the hub's client


def main(words: list[str]) -> int:
    """Run a command and return its exit code.

    0 for success, 2 for a wrong flag, model or file (one line on standard error), 130 for Ctrl-C.
    """
    lenient_output()
    command = get_command(app)
    try:
        translated_words = with_values(_in_own_flags(command, words))
        code = command(translated_words or ["--help"], prog_name="penstock", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(_refusal(error))
    except PenstockError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except ImportError as error:
        if not has_back_end():
            return _fail(f"MLX has no back end; {INSTALL_BACK_END}")
        return _fail(f"a needed package is missing or broken ({error}); run penstock doctor")
    return code if isinstance(code, int) else 0


def _in_own_flags(group: Any, words: list[str]) -> list[str]:
    position = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    command = group.commands.get(words[position]) if position < len(words) else None
    if not isinstance(command, GroupedCommand):
        return words
    known = {name for parameter in command.params for name in parameter.opts}
    translation = translated(words[position + 1 :], known, os.environ)
    for note in translation.notes:
        print(f"penstock: {note}", file=sys.stderr)
    return [*words[: position + 1], *translation.words]


def _refusal(error: typer.TyperException) -> str:
    wrong, known = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if not wrong:
        message, context = _wrong_value(error), getattr(error, "ctx", None)
        message = VARIABLE.sub(r"or \1", SEVERAL.sub(r"\1?", message))
        if context is not None and re.fullmatch(UNLISTED, message):
            message += f" {context.command_path} --help lists the commands."
        return message
    if wrong == "--offline":
        return "--offline goes before the command, as in penstock --offline serve."
    near = get_close_matches(wrong, known or [], 1, 0.7)
    return f"No such option {wrong!r}." + (f" Did you mean {near[0]!r}?" if near else "")


def _wrong_value(error: typer.TyperException) -> str:
    """Return the parser's message, or a plainer one if a flag's value is invalid."""
    cause, parameter = error.__context__, getattr(error, "param", None)
    if not isinstance(cause, ValidationError) or parameter is None:
        return error.format_message()
    fault = cause.errors()[0]
    return f"{parameter.opts[0]} {fault['input']}: {in_plain_words(fault['msg'])}"


def _fail(message: str) -> int:
    print(f"penstock: {' '.join(message.split())}", file=sys.stderr)
    return 2
