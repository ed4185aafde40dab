"""`penstock explain`: how far a prompt matches a running server's cache, and why no further."""

from __future__ import annotations

import json
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from penstock.cli import options
from penstock.cli.whole_words import print_line
from penstock.errors import SettingError
from penstock.plurals import counted

ASKED = ("model", "messages", "tools", "prompt", "cache_salt")
"""Fields of a request's body that decide what it shares with others."""


def explain(
    file: Annotated[
        typer.FileText,
        typer.Argument(
            metavar="FILE",
            encoding="utf-8",
            help="Body of a chat or completions request, as JSON; - reads standard input.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model to ask, or MODEL+ADAPTER, instead of the body's.",
            show_default="none",
        ),
    ] = None,
    url: options.ServerURL = options.SERVER_URL,
    api_key: options.ServerKey = None,
    as_json: options.Json = False,
) -> None:
    """Explain how much of a request's prompt a running server has cached, and why no more."""
    body = _body(file)
    if model is not None:
        body["model"] = model
    # httpx takes a moment to import, and --help and wrong flags do not need it.
    from penstock.cli.remote import asked

    explained = asked(url, api_key, "/v1/cache/explain", body)
    if as_json:
        print(json.dumps(explained))
        return
    prompt, held = explained["prompt_tokens"], explained["held_tokens"]
    console = Console(highlight=False, markup=False)
    print_line(console, f"{held:,} of {counted(prompt, 'prompt token')} cached")
    print_line(console, explained["reason"])


def _body(file: TextIO) -> dict[str, Any]:
    try:
        body = json.load(file)
    except ValueError as error:
        raise SettingError(f"{file.name} is not JSON: {error}") from error
    if not isinstance(body, dict) or not {"messages", "prompt"} & body.keys():
        raise SettingError(f"{file.name} has neither messages nor prompt")
    return {field: body[field] for field in ASKED if body.get(field) is not None}
