"""`penstock chat`: a conversation with a local model or a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from penstock import config
from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli.settings_options import with_settings
from penstock.errors import PenstockError, SettingError
from penstock.recall import MODEL_PATH

HELP = """\
/stats  tokens and speed of the last answer
/reset  forget the conversation
/help   this list
/quit   leave; so do /exit, /q and Ctrl-D"""
WELCOME = "/help lists the commands, Ctrl-C ends an answer."
LEAVE = ("/quit", "/exit", "/q")


class Partner(Protocol):
    """Source of answers, a local model or a server; drops the turn if an answer is interrupted."""

    def answer(self, text: str, sampling: config.SamplingSettings) -> Generator[str]: ...
    def reset(self) -> None: ...
    def stats(self) -> str: ...
    def close(self) -> None: ...


@with_settings
def chat(
    context: typer.Context,
    model: options.Model = str(MODEL_PATH),
    weights_dtype: options.WeightsDtype = "auto",
    model_source: options.ModelSource = "auto",
    adapter: options.Adapter = None,
    *,
    url: options.PartnerURL = None,
    api_key: options.ServerKey = None,
    system: options.System,
    sampling: options.SamplingOptions,
    engine: options.LocalEngine,
    history: Annotated[
        Path | None,
        typer.Option(
            help="File that stores input lines for the arrow keys; readable only by you.",
            envvar="PENSTOCK_HISTORY",
            metavar="FILE",
        ),
    ] = None,
    echo: Annotated[
        bool, typer.Option("--echo", help="Print each piped line before its answer.")
    ] = False,
) -> None:
    """Chat with a model, line by line.

    Each turn computes only its new tokens; earlier ones are cached, here or on the server. Lines of
    piped input are answered in order. /help lists the commands.
    """
    sampling_settings = config.parse(config.SamplingSettings, **sampling)
    system_text = system.get("system")
    options.check_text("--system", system_text or "")
    options.lenient_input()
    if url is None:
        limits = options.local_limits(model, engine)
        partner = _local(model, weights_dtype, model_source, limits, system_text, adapter)
    else:
        partner = _remote(context, url, api_key, system_text)
    with closing(partner):
        if sys.stdin.isatty():
            with _line_editing(history):
                print(WELCOME)
                Chat(partner, sampling_settings, interactive=True).run(_typed_lines())
        else:
            Chat(partner, sampling_settings, echo=echo).run(sys.stdin)


def _local(
    model: str,
    weights_dtype: config.WeightsDtype,
    model_source: config.ModelSource,
    limits: dict[str, Any],
    system: str | None,
    adapter: Path | None,
) -> Partner:
    options.warn_of_slow_blas(load_blas())
    # mlx-lm takes a second to import, and --help and wrong flags do not need it.
    from penstock.cli.local_chat import LocalChat, open_engine

    return LocalChat(open_engine(model, weights_dtype, limits, model_source, adapter), system)


def _remote(context: typer.Context, url: str, api_key: str | None, system: str | None) -> Partner:
    if context.params["adapter"] is not None:
        raise SettingError("--adapter is set by the server; select one with --model MODEL+NAME")
    for name in options.LOCAL_FIELDS:
        flag = config.flag_of(config.EngineSettings, name)
        if _source(context, flag.replace("-", "_")) == "COMMANDLINE":
            raise SettingError(f"--{flag} is the server's to decide; leave it out with --url")
    # A model set in the environment is a local folder, which the server does not know.
    model = context.params["model"] if _source(context, "model") == "COMMANDLINE" else None
    from penstock.cli.remote import Remote  # httpx takes a moment, too

    return Remote(url, api_key=api_key, model=model, system=system)


def _source(context: typer.Context, name: str) -> str | None:
    source = context.get_parameter_source(name)
    return None if source is None else source.name


class Chat:
    def __init__(
        self,
        partner: Partner,
        sampling: config.SamplingSettings,
        *,
        interactive: bool = False,
        echo: bool = False,
    ) -> None:
        self.partner = partner
        self.sampling = sampling
        self.interactive = interactive
        self.echo = echo

    def run(self, lines: Iterator[str]) -> None:
        for line in lines:
            text = line.strip()
            if not text or not _is_readable(text):
                continue
            if self.echo:
                print(f"> {text}")
            if text in LEAVE:
                return
            if text.startswith("/"):
                self._obey(text)
            else:
                self._answer(text)

    def _obey(self, command: str) -> None:
        if command == "/stats":
            print(self.partner.stats())
        elif command == "/reset":
            self.partner.reset()
            print("The conversation is forgotten.")
        elif command == "/help":
            print(HELP)
        else:
            print(f"penstock: unknown command {command}; /help lists them", file=sys.stderr)

    def _answer(self, text: str) -> None:
        try:
            with closing(self.partner.answer(text, self.sampling)) as pieces:
                for piece in pieces:
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            print("\n(interrupted; this turn is forgotten)", end="")
        except PenstockError as error:
            if not self.interactive:
                raise
            print(f"penstock: {error}; this turn is forgotten", file=sys.stderr)
        print(flush=True)


def _is_readable(line: str) -> bool:
    try:
        options.check_text("this line", line)
    except SettingError as error:
        print(f"penstock: {error}; ignoring it", file=sys.stderr)
        return False
    return True


def _typed_lines() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()  # so that the shell's prompt starts a line
            raise


@contextmanager
def _line_editing(history: Path | None) -> Iterator[None]:
    import readline  # changes how input() behaves, so only on a terminal

    if history is None:
        yield
        return
    file = history.expanduser()
    try:
        # Created with owner-only permissions before lines are written.
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        file.chmod(0o600)
        if file.stat().st_size:  # some versions of the library reject an empty file
            readline.read_history_file(file)
    except OSError as error:
        raise SettingError(f"--history {file}: {error.strerror}") from error
    try:
        yield
    finally:
        readline.write_history_file(file)
