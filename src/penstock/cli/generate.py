"""`penstock generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from penstock import config
from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli.settings_options import with_settings
from penstock.errors import SettingError
from penstock.recall import MODEL_PATH


@with_settings
def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt text; - reads standard input.")],
    model: options.Model = str(MODEL_PATH),
    weights_dtype: options.WeightsDtype = "auto",
    model_source: options.ModelSource = "auto",
    adapter: options.Adapter = None,
    *,
    system: options.System,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text without applying a chat template.")
    ] = False,
    sampling: options.SamplingOptions,
    engine: options.LocalEngine,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt.

    Streams the answer to standard output, and then prints token counts, speeds and memory to
    standard error.
    """
    limits = options.local_limits(model, engine)
    settings = config.parse(config.SamplingSettings, **sampling).model_dump()
    options.lenient_input()
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise SettingError("the prompt is empty")
    options.check_text("the prompt", text)
    system_text = system.get("system")
    options.check_text("--system", system_text or "")
    if raw and system_text is not None:
        raise SettingError("--system requires the chat template, which --raw skips")
    options.warn_of_slow_blas(load_blas())

    # mlx-lm takes a second to import, and --help and wrong flags do not need it.
    from penstock.cli.answer_figures import AnswerFigures
    from penstock.cli.local_chat import (
        adapter_of,
        figures_line,
        figures_record,
        measured,
        open_engine,
    )

    messages = [{"role": "system", "content": system_text}] if system_text is not None else []
    messages.append({"role": "user", "content": text})
    with open_engine(model, weights_dtype, limits, model_source, adapter) as running:
        settings["adapter"] = adapter_of(running)
        if raw:
            answer = running.generate(text, stream=True, **settings)
        else:
            answer = running.chat(messages, stream=True, **settings)
        figures, pieces = AnswerFigures(), []
        for piece in measured(answer, figures):
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
        assert answer.finish is not None
        if as_json:
            reason = answer.finish.reason
            print(json.dumps(figures_record("".join(pieces), reason, figures, running)))
        else:
            print(flush=True)
            print(figures_line(figures, running), file=sys.stderr)
