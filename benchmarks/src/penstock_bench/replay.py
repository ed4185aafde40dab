"""Replay of `penstock bench verify`: the same prompts on an empty and on a warm engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.cli.engines import make_engine
from penstock.engine.engine import Engine
from penstock.engine.request import Request, Sampling
from penstock.models.mlx_lm import Loaded

WAYS = ("cold", "memory", "disk")
ANSWER_SECONDS = 600.0
"""Timeout of one answer, in seconds."""
LOGPROBS = Sampling(logprobs=True)


@dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """Answer to a prompt from one source of KV."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass(slots=True)
class ReplayVerdict:
    """Answers to one prompt, by source of KV."""

    prompt_tokens: int
    answers: dict[str, ReplayedAnswer] = field(default_factory=dict)

    @property
    def cached(self) -> dict[str, int]:
        """Cached tokens of the prompt, by source of KV."""
        return {way: answer.cached_tokens for way, answer in self.answers.items()}

    @property
    def same_tokens(self) -> bool:
        """Whether all answers have the same tokens."""
        return len({answer.tokens for answer in self.answers.values()}) == 1

    @property
    def difference(self) -> float:
        """Largest difference of a token's log-probability from the cold one.

        Only up to the first different token.
        """
        cold = self.answers["cold"]
        differences = [0.0]
        for answer in self.answers.values():
            for i, (ours, theirs) in enumerate(zip(answer.tokens, cold.tokens, strict=False)):
                if ours != theirs:
                    break
                differences.append(abs(answer.logprobs[i] - cold.logprobs[i]))
        return max(differences)

    def is_within(self, tolerance: float) -> bool:
        """Return whether the answers agree."""
        return self.same_tokens and self.difference <= tolerance

    def fault(self, tolerance: float) -> str:
        """Describe the differences."""
        return "OTHER TOKENS" if not self.same_tokens else f"MORE THAN {tolerance:g}"

    def as_object(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached,
            "same_tokens": self.same_tokens,
            "difference": self.difference,
            "tokens": {way: list(answer.tokens) for way, answer in self.answers.items()},
        }


def replay(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    notify: Callable[[int, int], None],
    **settings: Any,
) -> list[ReplayVerdict]:
    """Ask all prompts each way: computed, from memory, and from disk after a restart.

    Args:
        loaded: the model.
        prompts: tokens.
        max_tokens: limit of each answer.
        notify: takes the number of answers so far, and the total.
        settings: settings of the engines.
    """
    verdicts = [ReplayVerdict(len(prompt)) for prompt in prompts]
    done, of = 0, (len(WAYS) + 1) * len(prompts)

    def ask(engine: Engine, way: str | None) -> None:
        nonlocal done
        for prompt, verdict in zip(prompts, verdicts, strict=True):
            if way == "cold":
                engine.clear()
            answer = _answer(engine, prompt, max_tokens)
            if way is not None:
                verdict.answers[way] = answer
            done += 1
            notify(done, of)

    notify(done, of)
    with make_engine(loaded, hot_cache_only=True, **settings) as engine:
        ask(engine, "cold")
    with TemporaryDirectory(prefix="penstock-verify-") as name:
        folder = Path(name)
        with make_engine(loaded, ssd_cache_dir=folder, **settings) as engine:
            ask(engine, None)
            ask(engine, "memory")
        with make_engine(loaded, ssd_cache_dir=folder, **settings) as engine:
            ask(engine, "disk")
    return verdicts


def _answer(engine: Engine, prompt: Sequence[int], max_tokens: int) -> ReplayedAnswer:
    request = Request(prompt=tuple(prompt), max_tokens=max_tokens, sampling=LOGPROBS)
    (choice,) = engine.submit(request).result(ANSWER_SECONDS)
    assert choice.finish is not None
    if choice.finish.error is not None:
        raise choice.finish.error
    logprobs = tuple(float(token.logprob or 0.0) for token in choice.logprobs)
    return ReplayedAnswer(tuple(choice.tokens), logprobs, choice.finish.usage.cached_tokens)
