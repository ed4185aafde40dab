"""`penstock chat`: a conversation whose history stays in the KV caches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock import config
from penstock.blas import load_blas
from penstock.cli import options
from penstock.errors import SettingError
from penstock.recall import MODEL_PATH

if TYPE_CHECKING:
    from penstock.cli.conversation import Conversation
    from penstock.models.mlx_lm import Piece

HELP = """\
/stats  tokens, KV bytes, capacity, growths; speed of the last answer
/reset  forget the conversation
/help   this list
/exit   leave (so does the end of input)"""


def chat(
    model: options.Model = str(MODEL_PATH),
    system: options.System = None,
    max_tokens: options.MaxTokens = config.MAX_TOKENS,
    max_kv_size: options.MaxKVSize = config.MAX_KV_SIZE,
    keep_kv_size: options.KeepKVSize = None,
    kv_bits: options.KVBits = None,
    temp: options.Temp = config.TEMP,
    top_p: options.TopP = config.TOP_P,
    seed: options.Seed = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="File that keeps your lines for the arrow keys; readable by you alone.",
            envvar="PENSTOCK_HISTORY",
            metavar="FILE",
        ),
    ] = None,
    echo: Annotated[
        bool, typer.Option("--echo", help="Print each piped line before its answer.")
    ] = False,
) -> None:
    """Talk with a model, line by line.

    Each turn reads only what the caches do not hold yet. Lines piped in are answered in
    order, without prompts. /help lists the commands.
    """
    kv = config.parse(
        config.KVSettings, max_kv_size=max_kv_size, keep_kv_size=keep_kv_size, kv_bits=kv_bits
    )
    sampling = config.parse(
        config.SamplingSettings, max_tokens=max_tokens, temp=temp, top_p=top_p, seed=seed
    )
    options.check_text("--system", system or "")
    options.lenient_input()
    options.warn_of_slow_blas(load_blas())

    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock.cli.conversation import Conversation
    from penstock.models.mlx_lm import load_all

    conversation = Conversation(load_all(model), kv, system)
    if sys.stdin.isatty():
        with _line_editing(history):
            Chat(conversation, sampling, interactive=True).run(_typed_lines())
    else:
        Chat(conversation, sampling, echo=echo).run(sys.stdin)


class Chat:
    """The loop over a user's lines: commands are obeyed, everything else is answered."""

    def __init__(
        self,
        conversation: Conversation,
        sampling: config.SamplingSettings,
        *,
        interactive: bool = False,
        echo: bool = False,
    ) -> None:
        self.conversation = conversation
        self.sampling = sampling
        self.interactive = interactive
        self.echo = echo
        self.last: Piece | None = None

    def run(self, lines: Iterator[str]) -> None:
        """Handle lines until they end or one of them is /exit."""
        for line in lines:
            text = line.strip()
            if not text or not _is_readable(text):
                continue
            if self.echo:
                print(f"> {text}")
            if text == "/exit":
                return
            if text.startswith("/"):
                self._obey(text)
            else:
                self._answer(text)

    def _obey(self, command: str) -> None:
        if command == "/stats":
            print(self._stats())
        elif command == "/reset":
            self.conversation.reset()
            self.last = None
            print("The conversation is forgotten.")
        elif command == "/help":
            print(HELP)
        else:
            print(f"penstock: unknown command {command}; /help lists them", file=sys.stderr)

    def _stats(self) -> str:
        from penstock.cli.conversation import figures_line, kv_line

        use = self.conversation.kv_use()
        return kv_line(use) if self.last is None else figures_line(self.last, use)

    def _answer(self, text: str) -> None:
        """Print the answer as it comes; at a terminal Ctrl-C breaks it off and the chat goes on."""
        try:
            for piece in self.conversation.answer(text, self.sampling):
                print(piece.text, end="", flush=True)
                self.last = piece
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            print("\n(broken off; this turn is forgotten)", end="")
        print(flush=True)


def _is_readable(line: str) -> bool:
    """Tell whether a line is text; say what is wrong with it if not."""
    try:
        options.check_text("this line", line)
    except SettingError as error:
        print(f"penstock: {error}; it is passed over", file=sys.stderr)
        return False
    return True


def _typed_lines() -> Iterator[str]:
    """Yield what is typed at the prompt, until Ctrl-D."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


@contextmanager
def _line_editing(history: Path | None) -> Iterator[None]:
    """Let the prompt have line editing, and keep its lines in `history` if that is a file."""
    import readline  # changes how input() behaves, so only where somebody types

    if history is None:
        yield
        return
    file = history.expanduser()
    try:
        # Created readable by the owner alone before a line is in it.
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        file.chmod(0o600)
        if file.stat().st_size:  # some versions of the library refuse an empty file
            readline.read_history_file(file)
    except OSError as error:
        raise SettingError(f"--history {file}: {error.strerror}") from error
    try:
        yield
    finally:
        readline.write_history_file(file)
