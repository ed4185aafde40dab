"""A dialogue with a model whose KV caches stay from turn to turn, and the figures of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from penstock.caches import make_kv_cache
from penstock.caches.codes import BLOCK_TOKENS
from penstock.config import KVSettings, SamplingSettings
from penstock.config.defaults import DRAFT_TOKENS
from penstock.errors import SettingError
from penstock.kv.codecs import parse_scheme
from penstock.memory import format_bytes, group_size_for, read_model_spec
from penstock.models.layer_seams import attach
from penstock.models.mlx_lm import Loaded, TextPiece, render, stream
from penstock.models.vocabulary import DRAFT_SETTING


@dataclass(frozen=True, slots=True)
class KVUse:
    """Content of a sequence's caches."""

    tokens: int
    """Tokens whose keys and values are held; 0 if all layers are recurrent."""
    seen_tokens: int
    """Tokens read and generated so far; a full window has dropped some of them."""
    nbytes: int
    capacity: int
    """Tokens the allocated buffers have room for."""
    growths: int
    """Number of times that a buffer was replaced by a larger copy, all layers together."""


def make_caches(loaded: Loaded, kv: KVSettings, capacity: int | None = None) -> list[Any]:
    """Make the caches of one sequence; `capacity` is in tokens.

    Raises:
        SettingError: The head size of the model has no quantized form, or not in this codec.
    """
    codec = kv.kv_cache_quantization
    if codec is not None:
        _check_codec(loaded, codec, kv.max_kv_size)
        attach(loaded.model)
    group_size = 64 if kv.kv_bits is None else group_size_for(read_model_spec(loaded.config))
    return make_kv_cache(
        loaded.model,
        max_kv_size=kv.max_kv_size,
        keep=kv.keep_kv_size,
        kv_bits=kv.kv_bits,
        capacity=capacity,
        kv_group_size=group_size,
        kv_cache_quantization=codec,
        kv_cache_min_quantize_tokens=kv.kv_cache_min_quantize_tokens,
        kv_cache_raw_first_tokens=max(kv.kv_cache_raw_first_tokens, kv.keep_kv_size or 0),
    )


def _check_codec(loaded: Loaded, codec: str, max_kv_size: int) -> None:
    """Raise SettingError if the model's heads, or so small a window, cannot be held in it."""
    if max_kv_size < 2 * BLOCK_TOKENS:
        raise SettingError(
            f"--max-kv-size {max_kv_size}: with --kv-cache-quantization it is at least "
            f"{2 * BLOCK_TOKENS}"
        )
    spec = read_model_spec(loaded.config)
    for layer in spec.layers:
        try:
            if layer.kind == "full":
                parse_scheme(codec).token_bits(layer.key_dim, layer.value_dim, 16)
        except ValueError as error:
            raise SettingError(f"--kv-cache-quantization {codec}: {error}") from None


def kv_use(caches: Sequence[Any], seen_tokens: int) -> KVUse:
    """Sum up caches; recurrent layers have bytes but no tokens and no capacity."""
    parts = [part for cache in caches for part in getattr(cache, "caches", [cache])]
    by_token = [cache for cache in parts if hasattr(cache, "growths")]
    return KVUse(
        tokens=max((cache.size() for cache in by_token), default=0),
        seen_tokens=seen_tokens,
        nbytes=sum(cache.nbytes for cache in caches),
        capacity=max((cache.capacity for cache in by_token), default=0),
        growths=sum(cache.growths for cache in by_token),
    )


def shared_tokens(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Count the first tokens of `wanted` that need no reading; its last one always does.

    >>> shared_tokens([1, 2, 3], [1, 2, 9, 9])
    2
    >>> shared_tokens([1, 2, 3], [1, 2, 3])
    2
    """
    limit = min(len(held), len(wanted) - 1)
    return next((i for i in range(limit) if held[i] != wanted[i]), limit)


class Drafting:
    """A draft model beside another one in mlx-lm's own loop, and its caches.

    Args:
        draft: the draft model.
        kv: how its caches are made.
        caches: the other model's.

    Raises:
        SettingError: the caches of one of the two cannot take tokens back.
    """

    def __init__(self, draft: Loaded, kv: KVSettings, caches: Sequence[Any]) -> None:
        self._draft = draft
        self._kv = kv
        self._caches = make_caches(draft, kv)
        for cache in (*caches, *self._caches):
            if not (cache.is_trimmable() and hasattr(cache, "offset")):
                raise SettingError(
                    f"{DRAFT_SETTING}: tokens that were rejected are taken back, which a "
                    f"{type(cache).__name__} cannot; leave it out"
                )

    def stream(
        self,
        loaded: Loaded,
        prompt: Sequence[int],
        caches: Sequence[Any],
        sampling: SamplingSettings,
    ) -> Iterator[TextPiece]:
        """Generate as `stream`.

        Raises:
            SettingError: the answer could fill the window, which then takes nothing back.
        """
        most = caches[0].offset + len(prompt) + sampling.max_tokens + DRAFT_TOKENS
        if most > self._kv.max_kv_size:
            raise SettingError(
                f"{DRAFT_SETTING}: {most:,} tokens with the answer are more than --max-kv-size "
                f"{self._kv.max_kv_size:,}; raise it, lower --max-tokens, or leave the draft out"
            )
        both = [*caches, *self._caches]
        return stream(loaded, prompt, caches=both, sampling=sampling, draft=self._draft.model)

    def trim(self, held: int) -> None:
        """Go back to the first `held` tokens."""
        for cache in self._caches:
            cache.trim(max(0, cache.offset - held))

    def even(self, caches: Sequence[Any], most: int) -> int:
        """Go back, in both models, to the tokens that both hold, or fewer; return their number."""
        held: int = min(most, *(cache.offset for cache in (*caches, *self._caches)))
        for cache in (*caches, *self._caches):
            cache.trim(cache.offset - held)
        return held


class LocalChat:
    """A dialogue; each turn reads only the tokens that the caches do not hold yet.

    The chat template makes the tokens of a turn. A template that rewrites earlier turns renders a
    history that no longer starts with the tokens of the caches. The caches are then trimmed to the
    common part, or filled anew if their window has already dropped tokens.
    """

    def __init__(
        self,
        loaded: Loaded,
        kv: KVSettings,
        system: str | None = None,
        draft: Loaded | None = None,
    ) -> None:
        self.loaded = loaded
        self.draft = draft
        self.kv = kv
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.last: TextPiece | None = None
        self._empty_caches()

    def answer(self, text: str, sampling: SamplingSettings) -> Generator[TextPiece]:
        """Yield the answer to `text` piece by piece.

        A turn counts once its last piece was taken; one that is broken off is forgotten.
        """
        said = [*self.messages, {"role": "user", "content": text}]
        prompt = self._read_from(render(self.loaded.tokenizer, said))
        pieces: list[TextPiece] = []
        try:
            for piece in self._stream(prompt, sampling):
                pieces.append(piece)
                self.last = piece
                yield piece
        finally:
            if not pieces or pieces[-1].finish_reason is None:
                self._empty_caches()
        self.held += [*prompt, *(piece.token for piece in pieces)]
        if self.drafting is not None:
            del self.held[self.drafting.even(self.caches, len(self.held)) :]
        reply = "".join(piece.text for piece in pieces)
        self.messages = [*said, {"role": "assistant", "content": reply}]

    def kv_use(self) -> KVUse:
        """Sum up the caches."""
        return kv_use(self.caches, len(self.held))

    def stats(self) -> str:
        """Describe the last answer and the caches in one line."""
        use = self.kv_use()
        return kv_line(use) if self.last is None else figures_line(self.last, use)

    def _read_from(self, wanted: list[int]) -> list[int]:
        """Fit the caches to `wanted` and return the tokens that are still to be read."""
        shared = shared_tokens(self.held, wanted)
        surplus = len(self.held) - shared
        if surplus and all(cache.is_trimmable() for cache in self.caches):
            for cache in self.caches:
                cache.trim(surplus)
            if self.drafting is not None:
                self.drafting.trim(shared)
            del self.held[shared:]
        elif surplus:
            self._empty_caches()
        return wanted[len(self.held) :]

    def _empty_caches(self) -> None:
        self.caches = make_caches(self.loaded, self.kv)
        self.drafting = None if self.draft is None else Drafting(self.draft, self.kv, self.caches)
        self.held: list[int] = []

    def _stream(self, prompt: list[int], sampling: SamplingSettings) -> Iterator[TextPiece]:
        if self.drafting is None:
            return stream(self.loaded, prompt, caches=self.caches, sampling=sampling)
        return self.drafting.stream(self.loaded, prompt, self.caches, sampling)


def figures_line(last: TextPiece, use: KVUse) -> str:
    """Describe an answer in one line: tokens, speeds, memory."""
    return (
        f"prompt {last.prompt_tokens:,} tokens, {last.prompt_tokens_per_second:,.0f} tokens/s; "
        f"answer {last.generated_tokens:,} tokens, "
        f"{last.generated_tokens_per_second:,.0f} tokens/s; "
        f"peak memory {format_bytes(mx.get_peak_memory())}; {kv_line(use)}"
    )


def figures_record(answer: str, last: TextPiece, use: KVUse) -> dict[str, object]:
    """Return the same as an object for --json, with the answer's text."""
    figures = {**asdict(last), "text": answer}
    del figures["token"]
    return {**figures, "peak_memory_bytes": mx.get_peak_memory(), "kv": asdict(use)}


def kv_line(use: KVUse) -> str:
    """Describe the content of the caches in one line."""
    if use.nbytes and not use.capacity:
        return f"recurrent states of {use.seen_tokens:,} tokens in {format_bytes(use.nbytes)}"
    dropped = f" of {use.seen_tokens:,}" if use.seen_tokens > use.tokens else ""
    return (
        f"KV {use.tokens:,}{dropped} tokens in {format_bytes(use.nbytes)}, "
        f"room for {use.capacity:,}, {use.growths} growths"
    )
