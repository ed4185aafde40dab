"""Sampling: grammar masks, logit bias, penalties, filters and seeded draws, row by row.

The filters are those of `mlx_lm.sample_utils`, in the same order. Unlike there, each draw has its
own random key, made from the seed, the choice and the token's index. No generator is shared, so a
sequence's tokens do not depend on others in the batch.

Nothing here keeps an array between calls: MLX binds lazy arrays to the thread that made them.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.engine.request import Sampling
from penstock.errors import PenstockError, SettingError
from penstock.kv.numpy_arrays import Floats
from penstock.kv.readable_arrays import ReadableArray

__all__ = [
    "Likeliest",
    "Rule",
    "SampledToken",
    "TokenSampler",
    "apply_min_p",
    "apply_top_k",
    "apply_top_p",
    "greedy_only",
    "likeliest",
    "likeliest_tokens",
    "sample_all",
    "without_frames",
]

NUCLEUS_TOKENS = 4096
"""Number of likeliest tokens searched first for top-p. Of 151,936 tokens, selecting and sorting
these takes 1 ms on a CPU; sorting all takes 11 ms."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token, with its log-probability and the likeliest tokens' if requested."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Rule(Protocol):
    """Constraint on an answer, such as a grammar or a reasoning budget."""

    @property
    def free(self) -> bool:
        """Whether any token may come next."""

    def allowed(self, size: int) -> npt.NDArray[np.bool_]: ...
    def accept(self, token: int) -> bool: ...

    def forced(self) -> list[int]:
        """Return the tokens that must come next; empty if there is a choice."""

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        """Return the number of allowed leading tokens of a proposal."""

    def copy(self) -> Rule: ...


class NoRule:
    free = True

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        return np.ones(size, np.bool_)

    def accept(self, token: int) -> bool:
        return False

    def forced(self) -> list[int]:
        return []

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def copy(self) -> Rule:
        return self


NO_RULE = NoRule()


class TokenSampler:
    """Samples the tokens of one answer. Used only by the thread that computes the logits.

    Args:
        sampling: sampling parameters; without a seed, one is drawn. Answers of one request must
            share the seed of `Sampling.with_seed()`.
        prompt_tokens: all tokens of the prompt, cached or not.
        choice: index of the answer; part of the random key.
        vocabulary_size: vocabulary of the model, to check `logit_bias` here; None to check it in
            `choose`.
        constraint: constraint of the answer; `accept` is called with each committed token.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_tokens: Sequence[int],
        choice: int = 0,
        vocabulary_size: int | None = None,
        *,
        constraint: Rule = NO_RULE,
    ) -> None:
        self.sampling = sampling.with_seed()
        self.constraint = constraint
        self.choice = choice
        self._in_all = _Occurrences(prompt_tokens, sampling.repetition_context)
        self._in_answer = _Occurrences((), None)
        if vocabulary_size is not None:
            _check_bias(sampling.logit_bias, vocabulary_size)

    @property
    def plain(self) -> bool:
        return self.sampling.plain and self.constraint.free

    def choose(self, logits: mx.array, generated: Sequence[int]) -> SampledToken:
        """Sample the token after `generated`, from logits (vocabulary,) of any float dtype.

        Between calls, `generated` may only be extended or truncated.

        Raises:
            SettingError: `logit_bias` names a token beyond the logits.
            PenstockError: no logit is finite.
        """
        draft = self._draft(logits, generated)
        mx.eval(draft.arrays)
        return self._read(draft, logits, generated)

    def ahead(self) -> TokenSampler:
        """Return a copy at the same position, which can advance independently."""
        sampler = shallow_copy(self)
        sampler.constraint = self.constraint.copy()
        return sampler

    def accept(self, token: int) -> bool:
        return self.constraint.accept(token)

    def key(self, position: int) -> mx.array:
        name = f"{self.sampling.seed} {self.choice} {position}".encode()
        return mx.random.key(int.from_bytes(blake2b(name, digest_size=8).digest()))

    def penalized(self, logits: mx.array, generated: Sequence[int]) -> mx.array:
        """Apply bias and penalties to float32 logits (vocabulary,), in mlx-lm's order."""
        sampling, size = self.sampling, logits.size
        if sampling.logit_bias:
            _check_bias(sampling.logit_bias, size)
            tokens = mx.array(list(sampling.logit_bias), mx.uint32)
            values = mx.array(list(sampling.logit_bias.values()), mx.float32)
            logits = logits.at[tokens].add(values)
        penalty = sampling.repetition_penalty
        if penalty not in (None, 1.0):
            seen = mx.array(self._in_all.counts(generated, size) > 0)
            lowered = mx.where(logits < 0, logits * penalty, logits / penalty)
            logits = mx.where(seen, lowered, logits)
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = mx.array(self._in_answer.counts(generated, size))
            logits = logits - sampling.presence_penalty * (counts > 0).astype(mx.float32)
            logits = logits - sampling.frequency_penalty * counts.astype(mx.float32)
        return logits

    def _allowed(self, logits: mx.array) -> mx.array:
        if self.constraint.free:
            return logits
        return mx.where(mx.array(self.constraint.allowed(logits.size)), logits, -math.inf)

    def _draft(self, logits: mx.array, generated: Sequence[int], *, sure: bool = False) -> _Draft:
        """Build the sampling graph without evaluating it; `sure` is slower but always exact."""
        sampling = self.sampling
        raw = logits.astype(mx.float32)
        scores = self.penalized(self._allowed(raw), generated)
        enough = None
        if sampling.greedy:
            token = mx.argmax(scores)
        else:
            kept, enough = _filtered(scores - mx.max(scores), sampling, sure=sure)
            key = self.key(len(generated))
            token = mx.random.categorical(kept / sampling.temperature, key=key)
        draft = _Draft(token, scores[token], enough)
        if sampling.logprobs:
            logprobs = raw - mx.logsumexp(raw)
            draft.logprob = logprobs[token]
            if sampling.top_logprobs:
                count = min(sampling.top_logprobs, logprobs.size)
                draft.top_tokens = mx.argpartition(-logprobs, kth=count - 1)[:count]
                draft.top_logprobs = logprobs[draft.top_tokens]
        return draft

    def _read(self, draft: _Draft, logits: mx.array, generated: Sequence[int]) -> SampledToken:
        """Read an evaluated draft; repeat it with `sure` if top-p needs more tokens."""
        if draft.enough is not None and not draft.enough.item():
            draft = self._draft(logits, generated, sure=True)
            mx.eval(draft.arrays)
        token, value = _numbers(draft.token), _numbers(draft.value)
        if not math.isfinite(value):
            raise _no_finite_logit(value)
        if draft.logprob is None:
            return SampledToken(token)
        return SampledToken(token, _numbers(draft.logprob), draft.top())


def greedy_only(samplers: Sequence[TokenSampler]) -> bool:
    """Return whether argmax (`likeliest`) suffices to sample all rows."""
    return all(sampler.plain for sampler in samplers)


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Largest logit of each row and its index, possibly not evaluated yet."""

    tokens: mx.array
    """(B,) uint32."""
    values: mx.array
    """(B,) float32."""

    def read(self) -> list[SampledToken | Exception]:
        """Return the token of each row, or an error if no logit is finite; calls `mx.eval` once."""
        mx.eval(self.tokens, self.values)
        return _sampled(_numbers(self.tokens), _numbers(self.values))


def likeliest(logits: mx.array) -> Likeliest:
    """Build greedy sampling of all rows of logits (..., vocabulary), without evaluating it.

    Evaluate `tokens` and `values` of the result together with other arrays, then call `read`.
    """
    if isinstance(logits, ReadableArray):
        rows = logits.host.reshape(-1, logits.shape[-1])
        best = rows.argmax(axis=-1)
        top = rows[np.arange(len(best)), best]
        return Likeliest(mx.array(best.astype(np.uint32)), mx.array(top))
    if logits.ndim > 2:
        logits = logits.reshape(-1, logits.shape[-1])
    tokens = mx.argmax(logits, axis=-1)
    values = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0].astype(mx.float32)
    return Likeliest(tokens, values)


def likeliest_tokens(logits: Floats) -> list[SampledToken | Exception]:
    """Return the likeliest token of each row of logits (rows, vocabulary), see `Likeliest`."""
    best = logits.argmax(axis=-1)
    return _sampled(best.tolist(), logits[np.arange(len(best)), best].tolist())


def _sampled(tokens: Sequence[int], values: Sequence[float]) -> list[SampledToken | Exception]:
    return [
        SampledToken(token) if math.isfinite(value) else _no_finite_logit(value)
        for token, value in zip(tokens, values, strict=True)
    ]


def sample_all(
    logits: mx.array, samplers: Sequence[TokenSampler], generated: Sequence[Sequence[int]]
) -> list[SampledToken | Exception]:
    """Sample a token for each row of logits (B, vocabulary), or return the row's error.

    Plain rows cost a single argmax and `mx.eval`. Errors in computing the logits are raised.
    """
    if logits.shape[0] != len(samplers):
        raise ValueError(f"logits of {logits.shape[0]} rows for {len(samplers)} samplers")
    best = likeliest(logits)
    if greedy_only(samplers):
        return best.read()
    mx.eval(logits, best.tokens, best.values)
    chosen = best.read()
    drafts: dict[int, _Draft] = {}
    for row, sampler in enumerate(samplers):
        if sampler.plain:
            continue
        try:
            drafts[row] = sampler._draft(logits[row], generated[row])
        except Exception as error:  # noqa: BLE001 - fails only this row's answer
            chosen[row] = without_frames(error)
    computed = _computed(drafts.values())
    for row, draft in drafts.items():
        try:
            if computed:
                chosen[row] = samplers[row]._read(draft, logits[row], generated[row])
            else:
                chosen[row] = samplers[row].choose(logits[row], generated[row])
        except Exception as error:  # noqa: BLE001 - as above
            chosen[row] = without_frames(error)
    return chosen


def without_frames(error: Exception) -> Exception:
    """Return the error with its traceback as a note instead of frames.

    Frames keep local variables alive, and so the step's arrays, which the ledger does not count.
    """
    if error.__traceback__ is not None:
        error.add_note("".join(traceback.format_exception(error)))
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def apply_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the smallest set of top tokens with probability `top_p`; set the others to -inf.

    logprobs: (..., vocabulary), or scores with the largest near 0. Ties with the last kept token
    are kept too.
    """
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending.astype(mx.float32))
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + probs[..., :1]
    return _at_least(logprobs, ascending, above >= top_p * total)


def apply_min_p(logprobs: mx.array, min_p: float) -> mx.array:
    """Keep tokens with at least `min_p` times the top probability; set the others to -inf.

    logprobs: (..., vocabulary), or scores with the largest near 0. min_p: above 0.
    """
    least = mx.max(logprobs, axis=-1, keepdims=True) + math.log(min_p)
    return mx.where(logprobs < least, -math.inf, logprobs)


def apply_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Keep the `top_k` most probable tokens; set others to -inf.

    The last axis of `logprobs` must be longer than `top_k`.
    """
    others = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)[..., top_k:]
    least = mx.array(-math.inf, logprobs.dtype)
    return mx.put_along_axis(logprobs, others, least, axis=-1)


def _filtered(
    scores: mx.array, sampling: Sampling, *, sure: bool
) -> tuple[mx.array, mx.array | None]:
    """Set excluded tokens to -inf; return also whether top-p saw enough tokens, None if certain.

    scores: (vocabulary,) float32, at most 0: log-probabilities up to a constant.
    """
    enough = None
    if sampling.top_p < 1.0 and (sure or scores.size <= NUCLEUS_TOKENS):
        scores = apply_top_p(scores, sampling.top_p)
    elif sampling.top_p < 1.0:
        scores, enough = _nucleus(scores, sampling.top_p, NUCLEUS_TOKENS)
    if sampling.min_p > 0.0:
        scores = apply_min_p(scores, sampling.min_p)
    if 0 < sampling.top_k < scores.size:
        scores = apply_top_k(scores, sampling.top_k)
    return scores, enough


def _nucleus(logprobs: mx.array, top_p: float, tokens: int) -> tuple[mx.array, mx.array]:
    """Apply `apply_top_p` to the top `tokens` only; also return whether they were enough."""
    ascending = mx.sort(mx.topk(logprobs, tokens))
    above = mx.cumsum(mx.exp(ascending), reverse=True, inclusive=False)
    dropped = above >= top_p * mx.exp(logprobs).sum()
    return _at_least(logprobs, ascending, dropped), dropped[0]


def _at_least(logprobs: mx.array, ascending: mx.array, dropped: mx.array) -> mx.array:
    first = dropped.sum(axis=-1, keepdims=True)
    least = mx.take_along_axis(ascending, first, axis=-1)
    return mx.where(logprobs < least, -math.inf, logprobs)


@dataclass(slots=True)
class _Draft:
    token: mx.array
    value: mx.array
    enough: mx.array | None = None
    """Whether the tokens considered for top-p sufficed; None if all were considered."""
    logprob: mx.array | None = None
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        every = (
            self.token,
            self.value,
            self.enough,
            self.logprob,
            self.top_tokens,
            self.top_logprobs,
        )
        return [array for array in every if array is not None]

    def top(self) -> tuple[tuple[int, float], ...]:
        """Return the top tokens in order; ties are ordered by id."""
        if self.top_tokens is None or self.top_logprobs is None:
            return ()
        pairs = zip(_numbers(self.top_tokens), _numbers(self.top_logprobs), strict=True)
        return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


class _Occurrences:
    """Counts of each token in the last `window` tokens of `before` and the answer."""

    def __init__(self, before: Sequence[int], window: int | None) -> None:
        self._before = before
        self._window = window
        self._counts: npt.NDArray[np.int32] | None = None
        self._taken = 0

    def counts(self, answer: Sequence[int], size: int) -> npt.NDArray[np.int32]:
        if self._counts is None or self._counts.size != size or len(answer) < self._taken:
            self._counts = self._counted(answer, size)
        else:
            for position in range(self._taken, len(answer)):
                self._move(self._counts, answer, position)
        self._taken = len(answer)
        return self._counts

    def _counted(self, answer: Sequence[int], size: int) -> npt.NDArray[np.int32]:
        tokens = np.array([*self._before, *answer], np.int64)
        if self._window is not None:
            tokens = tokens[-self._window :]
        return np.bincount(tokens[tokens < size], minlength=size).astype(np.int32)

    def _move(self, counts: npt.NDArray[np.int32], answer: Sequence[int], position: int) -> None:
        if answer[position] < counts.size:
            counts[answer[position]] += 1
        if self._window is None:
            return
        gone = len(self._before) + position - self._window
        if gone < 0:
            return
        inside = gone - len(self._before)
        token = answer[inside] if inside >= 0 else self._before[gone]
        if token < counts.size:
            counts[token] -= 1


def _check_bias(bias: dict[int, float], size: int) -> None:
    if bias and max(bias) >= size:
        raise SettingError(
            f"logit_bias names token {max(bias)}; the model has the {size} tokens from 0"
        )


def _computed(drafts: Iterable[_Draft]) -> bool:
    """Evaluate all drafts together; return whether that succeeded.

    If not, none of them may be read: after a failed `mx.eval`, arrays of its graph count as
    computed, but hold stale memory.
    """
    try:
        mx.eval([draft.arrays for draft in drafts])
    except Exception:  # noqa: BLE001 - raised again when rows are computed one by one
        return False
    return True


def _numbers(array: mx.array) -> Any:
    return array.tolist()


def _no_finite_logit(value: float) -> PenstockError:
    return PenstockError(
        f"the largest logit is {value}: the model, or a bias or penalty of the request, "
        f"computed what is not a number or too large for one"
    )
