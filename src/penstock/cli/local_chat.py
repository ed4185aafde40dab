from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from penstock.cli import options
from penstock.cli.answer_figures import AnswerFigures
from penstock.cli.engines import make_engine
from penstock.config import ModelSource, SamplingSettings, WeightsDtype
from penstock.engine.engine import Engine
from penstock.engine.text_calls import Text
from penstock.memory.sizes import format_bytes
from penstock.plurals import counted


def open_engine(
    model: str,
    weights_dtype: WeightsDtype,
    limits: dict[str, Any],
    model_source: ModelSource = "auto",
    adapter: Path | None = None,
) -> Engine:
    """Load a model, and an adapter if given, and create an engine for one answer at a time."""
    adapters = {} if adapter is None else {adapter.name: adapter}
    limit = limits["memory_limit"]
    loaded = options.load_model(
        model, weights_dtype, limit, model_source, adapters, mtp=options.head_of(limits)
    )
    # Only one answer decodes at a time, so blocks can be quantized during decoding.
    return make_engine(loaded, max_batch_size=1, kv_cache_quantize_when="active", **limits)


def adapter_of(engine: Engine) -> str | None:
    """Return the name of the engine's first adapter; None without adapters."""
    return next(iter(engine.ask(lambda view: view.adapters).result()), None)


class LocalChat:
    """A conversation with a local model; earlier turns are in the engine's prefix cache."""

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self.system = system
        self._adapter = adapter_of(engine)
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.last: AnswerFigures | None = None
        self.engine.clear()

    def answer(self, text: str, sampling: SamplingSettings) -> Generator[str]:
        """Stream the answer; the turn is recorded after the last piece was consumed."""
        said = [*self.messages, {"role": "user", "content": text}]
        reply, figures = "", AnswerFigures()
        settings = {**sampling.model_dump(), "adapter": self._adapter}
        with self.engine.chat(said, stream=True, **settings) as answer:
            for piece in measured(answer, figures):
                reply += piece
                yield piece
        self.messages = [*said, {"role": "assistant", "content": reply}]
        self.last = figures

    def stats(self) -> str:
        return kv_line(self.engine) if self.last is None else figures_line(self.last, self.engine)

    def close(self) -> None:
        self.engine.close()


def measured(answer: Text, figures: AnswerFigures) -> Iterator[str]:
    began = first = time.perf_counter()
    for piece in answer:
        if not figures.first_seconds:
            first = time.perf_counter()
            figures.first_seconds = first - began
        yield piece
    assert answer.finish is not None
    usage = answer.finish.usage
    figures.prompt_tokens = usage.prompt_tokens
    figures.cached_tokens = usage.cached_tokens
    figures.completion_tokens = usage.completion_tokens
    figures.seconds = time.perf_counter() - first


def figures_line(figures: AnswerFigures, engine: Engine) -> str:
    peak = format_bytes(peak_bytes(engine))
    return f"{figures.line()}; peak memory {peak}; {kv_line(engine)}"


def figures_record(
    text: str, reason: str, figures: AnswerFigures, engine: Engine
) -> dict[str, Any]:
    return {
        "text": text,
        "finish_reason": reason,
        "prompt_tokens": figures.prompt_tokens,
        "prompt_tokens_per_second": figures.prompt_tokens_per_second,
        "generated_tokens": figures.completion_tokens,
        "generated_tokens_per_second": figures.tokens_per_second,
        "peak_memory_bytes": peak_bytes(engine),
        "kv": kv_use(engine),
    }


def peak_bytes(engine: Engine) -> int:
    """Return MLX's peak, or the bytes in the ledger if more: MLX does not hold packed weights."""
    return max(mx.get_peak_memory(), engine.stats().used_bytes)


def kv_use(engine: Engine) -> dict[str, int]:
    stats = engine.stats()
    kinds = ("nodes", "checkpoints", "key_index")
    return {"tokens": stats.held_tokens, "nbytes": sum(stats.by_kind[kind] for kind in kinds)}


def kv_line(engine: Engine) -> str:
    use = kv_use(engine)
    return f"KV {counted(use['tokens'], 'token')} in {format_bytes(use['nbytes'])}"
