"""Expected answers of the engine, computed by plain mlx-lm.

`solo` is mlx-lm's model on mlx-lm's caches, one sequence by itself, remembered by prompt.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from engine_faults import VOCABULARY_TOKENS, model_of, spell
from hypothesis import strategies as st
from mlx_lm.models import cache as theirs
from small_models import BASE

from penstock import caches
from penstock.config import EngineSettings
from penstock.engine.model.sampling import TokenSampler
from penstock.engine.request import Request, Sampling
from penstock.errors import SettingError
from penstock.kv.quantization import QuantizationRule

MOST_NEW = 14
"""Tokens of the longest answer."""
MOST_GROWN = 40
"""Tokens of the longest answer that is asked for where it may not fit."""
MOST_PROMPT = 100
TIE = 1e-4
"""Two logits closer than this may change places with the order of summation."""
ENDS = frozenset(range(0, VOCABULARY_TOKENS, 29))
"""Tokens that end a sequence: one in 29, so that answers do end."""


@functools.cache
def draft_of(kind: Kind) -> Any:
    """Return a copy of a kind's model with separate arrays; always the same object."""
    copy = deepcopy(kind.model)
    mx.eval(copy.parameters())
    return copy


@dataclass(frozen=True)
class Kind:
    """An engine under test: a model and its settings."""

    name: str
    family: str
    block_size: int
    prefill_chunk: int
    max_kv_size: int = 256
    keep: int | None = None
    quantize: str = "at-rest"
    codec: str | None = None
    """What its nodes are held in; then the account is judged, and not the text."""
    least_blocks: int = 0
    """Blocks of the shortest path that is held so."""
    raw_blocks: int = 1
    """First blocks that are not."""
    places: int = 4
    """Sequences that run at the same time."""
    most_prompt: int = MOST_PROMPT
    """Tokens of the longest prompt."""
    feed_forward: int = BASE["intermediate_size"]
    """Numbers between the two products of a layer: what a long chunk takes most of."""
    max_stall_ms: int = 0
    """Milliseconds of prompts between two decode steps: at 1 they are read block by block."""
    speculative_tokens: int = 0
    """Proposed tokens that a step checks at most: prompts repeat, so some are right."""
    drafts: bool = False
    """Whether a draft model proposes tokens: a copy of the model, so that they are right."""
    attend_tokens: int | None = None
    """Tokens that a decode step reads; then the text is judged as far as it reads all."""
    attend_rest: bool = False
    """Whether it reads the other tokens from the index, where it chooses."""
    active_kv_size: int | None = None
    """Tokens of a sequence that stay in memory, beside a cold tier."""
    piece_blocks: int = 1
    """Blocks of a piece of a prompt."""

    @property
    def model(self) -> Any:
        """The model; always the same object."""
        return model_of(self.family, self.feed_forward)

    @property
    def draft(self) -> tuple[Any, None] | None:
        """The draft model, without a tokenizer; always the same object."""
        return (draft_of(self), None) if self.drafts else None

    @property
    def window(self) -> bool:
        """Whether sequences can exceed their window."""
        return self.max_kv_size < self.most_prompt + MOST_NEW

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "prefill_chunk": self.prefill_chunk,
            "max_stall_ms": self.max_stall_ms,
            "speculative_tokens": self.speculative_tokens,
            "attend_tokens": self.attend_tokens,
            "attend_rest": self.attend_rest and self.attend_tokens is not None,
            "active_kv_size": self.active_kv_size,
            "max_kv_size": self.max_kv_size,
            "keep": self.keep,
            "max_batch_size": self.places,
            "kv_cache_quantization": self.codec,
            "kv_cache_min_quantize_tokens": self.least_blocks * self.block_size,
            "kv_cache_raw_first_tokens": self.raw_blocks * self.block_size,
            "kv_cache_quantize_when": self.quantize,
        }

    def caches(self) -> list[Any]:
        """Return mlx-lm's caches; past a window, of the class with the engine's rule."""
        caches = list(theirs.make_prompt_cache(self.model))
        return [self._bounded(cache) for cache in caches] if self.window else caches

    def _bounded(self, cache: Any) -> Any:
        if isinstance(cache, theirs.CacheList):
            return theirs.CacheList(*map(self._bounded, cache.caches))
        if isinstance(cache, theirs.ArraysCache):
            return cache
        return caches.SinkRotatingKVCache(self.max_kv_size, self.checked.keep_tokens)

    @property
    def checked(self) -> EngineSettings:
        """The validated settings, with a tier if they need one.

        Raises:
            SettingError: an engine does not take them together.
        """
        tier = None if self.active_kv_size is None else Path()
        return EngineSettings(memory_limit=1, ssd_cache_dir=tier, **self.settings)

    @functools.cached_property
    def pieces(self) -> list[tuple[int, ...]]:
        """Pieces that prompts consist of: few, so that prompts share prefixes."""
        draw, tokens = random.Random(self.block_size), self.block_size * self.piece_blocks
        return [tuple(draw.randrange(VOCABULARY_TOKENS) for _ in range(tokens)) for _ in range(3)]


KINDS = [
    Kind("shared", "llama", 16, 24),
    Kind("joined", "gemma2", 8, 16),
    Kind("blocks of one", "llama", 1, 4),
    Kind("proposed", "llama", 16, 24, speculative_tokens=4),
    Kind("drafted", "llama", 16, 24, speculative_tokens=4, drafts=True),
    Kind("indexed", "llama", 16, 24, attend_tokens=256),
    Kind("choosing", "llama", 16, 24, attend_tokens=128, most_prompt=200),
    Kind(
        "choosing for proposed",
        "llama",
        16,
        24,
        256,
        speculative_tokens=4,
        attend_tokens=128,
        most_prompt=200,
    ),
    Kind("reading the rest", "llama", 16, 24, attend_tokens=128, attend_rest=True, most_prompt=200),
    Kind("window", "llama", 8, 16, max_kv_size=48, keep=12),
    Kind("recurrent", "falcon_h1", 16, 24),
    Kind("coded", "llama", 16, 24, codec="turbo4", least_blocks=3, raw_blocks=0),
    Kind("coded at once", "llama", 16, 24, codec="turbo4", quantize="active"),
]


def possible(kind: Kind) -> bool:
    """Return whether an engine accepts these settings, whatever the model."""
    try:
        settings = kind.checked
        QuantizationRule.of(kind.codec, block_size=kind.block_size, first_tokens=0)
    except (ValueError, SettingError):
        return False
    if kind.drafts and (kind.family != "llama" or not kind.speculative_tokens):
        return False
    chooses_joined = kind.attend_tokens is not None and kind.family == "gemma2"
    return settings.keep_tokens < settings.max_kv_size and not chooses_joined


drawn_kinds = st.builds(
    Kind,
    name=st.just("drawn"),
    family=st.sampled_from(["llama", "gemma2", "falcon_h1"]),
    block_size=st.sampled_from([1, 4, 32, 64]),
    piece_blocks=st.sampled_from([1, 4, 16]),
    prefill_chunk=st.sampled_from([1, 24, 64, 128]),
    max_stall_ms=st.sampled_from([0, 1, 200]),
    speculative_tokens=st.sampled_from([0, 0, 2, 16]),
    drafts=st.booleans(),
    attend_tokens=st.sampled_from([None, None, 128, 256]),
    attend_rest=st.booleans(),
    max_kv_size=st.sampled_from([8, 16, 48, 256]),
    keep=st.sampled_from([None, 0, 4, 12]),
    codec=st.sampled_from([None, None, "turbo4", "turbo8"]),
    quantize=st.sampled_from(["at-rest", "active"]),
    least_blocks=st.sampled_from([0, 1, 3]),
    raw_blocks=st.sampled_from([0, 1, 2]),
    places=st.sampled_from([1, 2, 4]),
    most_prompt=st.sampled_from([160, 320, 320]),
    feed_forward=st.just(2_048),
).filter(possible)
"""Engines whose settings are drawn each by itself: a block may be longer than a window."""

spilling_kinds = st.builds(
    Kind,
    name=st.just("spilling"),
    family=st.sampled_from(["llama", "llama", "falcon_h1"]),
    block_size=st.sampled_from([16, 16, 32, 48]),
    piece_blocks=st.sampled_from([1, 3, 5]),
    prefill_chunk=st.sampled_from([8, 48, 64, 128]),
    max_stall_ms=st.sampled_from([0, 1]),
    speculative_tokens=st.sampled_from([0, 0, 2, 16]),
    drafts=st.booleans(),
    attend_tokens=st.sampled_from([128, 128, 256, 700]),
    attend_rest=st.booleans(),
    active_kv_size=st.sampled_from([None, 128, 128, 144, 256, 700]),
    max_kv_size=st.sampled_from([300, 1_024, 1_024]),
    keep=st.sampled_from([None, 0, 40]),
    least_blocks=st.sampled_from([0, 1, 3]),
    places=st.sampled_from([1, 2, 4]),
    most_prompt=st.just(560),
    feed_forward=st.just(2_048),
).filter(possible)
"""Engines that choose what they read, and spill the rest, over prompts that are long enough."""


@dataclass(frozen=True)
class Step:
    """A token, and its logit lead over the second."""

    token: int
    gap: float


@functools.cache
def solo(
    kind: Kind,
    prompt: tuple[int, ...],
    seed: int | None = None,
    choice: int = 0,
    most: int = MOST_NEW,
) -> tuple[Step, ...]:
    """Generate `most` tokens alone; with a seed, sampled at temperature 1."""
    model, caches = kind.model, kind.caches()
    sampler = (
        None if seed is None else TokenSampler(Sampling(temperature=1.0, seed=seed), (), choice)
    )
    steps: list[Step] = []
    read: Sequence[int] = prompt
    while len(steps) < most:
        scores = model(mx.array([read]), cache=caches)[0, -1]
        if sampler is not None:
            scores = scores - mx.max(scores)
            scores = scores + mx.random.gumbel(scores.shape, key=sampler.key(len(steps)))
        second, best = mx.sort(mx.topk(scores, 2)).tolist()
        steps.append(Step(int(mx.argmax(scores)), best - second))
        read = (steps[-1].token,)
    return tuple(steps)


@dataclass(frozen=True)
class Answer:
    """The expected answer if nothing fails."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    stop: str | int | None
    drawn: int
    """Tokens that were chosen: with the one that ends a sequence, which is not said."""
    sure: int
    """Tokens that no order of summation can change."""


def answer(kind: Kind, request: Request, choice: int) -> Answer:
    """Return the expected answer to a request from the model alone."""
    seed = request.sampling.seed if request.sampling.temperature else None
    drawn_as = choice if seed is not None else 0
    steps = solo(kind, request.prompt, seed, drawn_as, min(request.max_tokens, MOST_GROWN))
    sure = next((i for i, step in enumerate(steps) if step.gap < TIE), MOST_GROWN)
    if kind.codec is not None:
        sure = 0
    if kind.attend_tokens is not None:
        sure = min(sure, max(0, kind.attend_tokens - len(request.prompt)))
    tokens: list[int] = []
    for drawn, step in enumerate(steps[: request.max_tokens], 1):
        ends = step.token in ENDS and not request.ignore_eos
        if ends or step.token in request.stop_tokens:
            return Answer(tuple(tokens), spell(tokens), "stop", step.token, drawn, sure)
        tokens.append(step.token)
        text = spell(tokens)
        found = [stop for stop in request.stop if text.endswith(stop)]
        if found:
            stop = max(found, key=len)
            cut = text.removesuffix(stop)
            return Answer(tuple(tokens), cut, "stop", stop, drawn, sure)
    return Answer(tuple(tokens), spell(tokens), "length", None, len(tokens), sure)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of common first tokens."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))
