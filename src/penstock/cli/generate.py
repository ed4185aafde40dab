"""`penstock generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from penstock import config
from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli.settings_options import with_settings
from penstock.errors import SettingError
from penstock.recall import MODEL_PATH

if TYPE_CHECKING:
    from penstock.models.mlx_lm import TextPiece


@with_settings
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to answer; - reads standard input.")],
    model: options.Model = str(MODEL_PATH),
    weights_dtype: options.WeightsDtype = "auto",
    *,
    draft: options.DraftModel,
    system: options.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")
    ] = False,
    sampling: options.SamplingOptions,
    kv: options.KVOptions,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt.

    The answer streams to standard output; tokens, speeds and memory follow on standard error.
    """
    kv_settings = options.kv_settings(kv)
    sampling_settings = config.parse(config.SamplingSettings, **sampling)
    options.lenient_input()
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise SettingError("the prompt is empty")
    options.check_text("the prompt", text)
    options.check_text("--system", system or "")
    if raw and system is not None:
        raise SettingError("--system needs the chat template that --raw leaves out")
    options.warn_of_slow_blas(load_blas())

    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock.cli.conversation import (
        Drafting,
        figures_line,
        figures_record,
        kv_use,
        make_caches,
    )
    from penstock.models.mlx_lm import encode, render, stream

    loaded = options.load_model(model, weights_dtype)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    tokens = encode(loaded.tokenizer, text) if raw else render(loaded.tokenizer, messages)
    caches = make_caches(loaded, kv_settings, capacity=len(tokens) + sampling_settings.max_tokens)
    draft_model = options.load_draft(draft.get("draft_model"), weights_dtype, loaded)
    drafting = None if draft_model is None else Drafting(draft_model, kv_settings, caches)
    if drafting is None:
        pieces = stream(loaded, tokens, caches=caches, sampling=sampling_settings)
    else:
        pieces = drafting.stream(loaded, tokens, caches, sampling_settings)
    answer, last = _take(pieces, show=not as_json)
    use = kv_use(caches, len(tokens) + last.generated_tokens)
    if as_json:
        print(json.dumps(figures_record(answer, last, use)))
    else:
        print(figures_line(last, use), file=sys.stderr)


def _take(pieces: Iterable[TextPiece], *, show: bool) -> tuple[str, TextPiece]:
    """Print the pieces as they come if `show`; return the whole text and the last piece."""
    parts = []
    for piece in pieces:
        parts.append(piece.text)
        if show:
            print(piece.text, end="", flush=True)
    if show:
        print(flush=True)
    return "".join(parts), piece
