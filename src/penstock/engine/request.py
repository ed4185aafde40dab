"""Requests to the engine, and the events of their answers.

A request is validated once, when it is constructed. It holds tokens, not text: the caller encodes
the prompt.
"""

from __future__ import annotations

import os
import re
import reprlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias
from uuid import uuid4

from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.config import MAX_TOKENS, Settings
from penstock.errors import PenstockError, SettingError
from penstock.models.input_spans import InputSpan, with_keys

__all__ = [
    "Event",
    "Finish",
    "Reason",
    "ReasoningBudget",
    "Request",
    "Sampling",
    "Token",
    "Usage",
]

_OWN_SALT = re.compile(r"\0[0-9a-f]{32}\Z")
"""Suffix of a salt, unique to one request."""
GREEDY_BELOW = 1e-5
"""Temperature below which decoding is greedy; division by it would overflow the logits."""

TokenId: TypeAlias = Annotated[int, Field(ge=0)]
Added: TypeAlias = Annotated[float, Field(ge=-1e30, le=1e30)]
"""Value added to logits, bounded so that repeated additions do not overflow float32."""


class _RequestSettings(Settings):
    """Settings whose constructor reports the first error in one line.

    Raises:
        SettingError: a value is out of range; the message names the first one.
    """

    if not TYPE_CHECKING:  # type checkers derive the arguments from the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise SettingError(_one_line(error)) from None


class Sampling(_RequestSettings):
    """Sampling parameters; the default is greedy decoding.

    They are applied in mlx-lm's order: bias and penalties, then top-p, min-p, top-k, then
    temperature. Tokens that the grammar does not allow are masked before all of them.

    >>> Sampling(temperature=0.7, top_p=1.5)
    Traceback (most recent call last):
    penstock.errors.SettingError: top_p 1.5: Input should be less than or equal to 1
    """

    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Cumulative probability of the tokens to sample from; 1 samples from all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens to sample from; 0 samples from all tokens."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Minimum probability of a token, as a share of the likeliest token's probability."""
    repetition_penalty: float | None = Field(default=None, ge=1e-30, le=1e30)
    """Divides the positive logits and multiplies the negative logits of tokens in the prompt or the
    answer so far; None and 1 disable it."""
    repetition_context: int | None = Field(default=None, ge=1)
    """Number of last tokens, of prompt and answer, that the repetition penalty applies to; None
    means all."""
    presence_penalty: Added = 0.0
    """Subtracted from the logit of every generated token; prompt tokens do not count."""
    frequency_penalty: Added = 0.0
    """Subtracted from a token's logit for each time it was generated; the prompt does not count."""
    logit_bias: dict[TokenId, Added] = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Random seed; each draw also depends on the index of the answer and of the token. None draws a
    seed per request."""
    logprobs: bool = False
    """Whether to report each token's log-probability under the model's own distribution, before
    grammar, bias, penalties, filters and temperature."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """Number of likeliest tokens reported with each sampled token."""

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Sampling:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs {self.top_logprobs} needs logprobs=True")
        return self

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy: the likeliest token is chosen without a random draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """Whether the token is the argmax of the model's unchanged logits."""
        return self.greedy and not self.logprobs and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether a bias or a penalty is set."""
        return bool(
            self.logit_bias
            or self.repetition_penalty not in (None, 1.0)
            or self.presence_penalty
            or self.frequency_penalty
        )

    def with_seed(self) -> Sampling:
        """Return these settings with a seed; draw one from the system if none is set."""
        if self.seed is not None:
            return self
        return self.model_copy(update={"seed": int.from_bytes(os.urandom(8))})


class ReasoningBudget(_RequestSettings):
    """Token limit of an answer's reasoning, and the tokens that delimit the reasoning."""

    max_tokens: int = Field(ge=1)
    """Maximum reasoning tokens of an answer, after which `end` is forced."""
    start: tuple[TokenId, ...] = ()
    end: tuple[TokenId, ...] = Field(min_length=1)
    inside: bool = False
    """Whether the prompt ends inside the reasoning."""


class Request(_RequestSettings):
    """A prompt and its settings; `n` answers are generated from one prefill.

    >>> Request(prompt=[])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.errors.SettingError: prompt []: Tuple should have at least 1 item after ...
    """

    ENDLESS: ClassVar[int] = 2**31 - 1
    """Value of `max_tokens` without a limit: the answer may use all of the context and memory."""
    prompt: tuple[TokenId, ...] = Field(min_length=1)
    spans: tuple[InputSpan, ...] = ()
    """Parts of the prompt that stand for other inputs, such as images, in order."""
    max_tokens: int = Field(default=MAX_TOKENS, ge=0, le=ENDLESS)
    """Maximum tokens of each answer; 0 only computes the prompt, `ENDLESS` is no limit."""
    sampling: Sampling = Sampling()
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer; excluded from it unless `keep_stop` is set."""
    stop_tokens: tuple[TokenId, ...] = ()
    """Tokens that end an answer, in addition to the tokenizer's end-of-sequence tokens."""
    keep_stop: bool = False
    """Whether the answer's text includes the stop string or the text of the stop token."""
    min_tokens: int = Field(default=0, ge=0)
    """Minimum tokens of an answer before a stop string, stop token or end of sequence may end it.

    Ignored with a grammar, which alone decides where an answer ends."""
    silent_tokens: frozenset[TokenId] = frozenset()
    """Tokens omitted from an answer's text."""
    goes_on: bool = False
    """Whether the answer's text continues the prompt's, with its leading space. If not, the text is
    as in mlx-lm, which drops that space with some tokenizers."""
    ignore_eos: bool = False
    """Whether an answer continues after an end-of-sequence token."""
    n: int = Field(default=1, ge=1, le=128)
    priority: int = 0
    """Priority in the queue; higher is served first."""
    client: str = ""
    """Client of the request; each client gets an equal share, however many requests it sends."""
    group: str = ""
    """Group of requests of a client that get one request's share together; empty means no group."""
    timeout_seconds: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Maximum seconds from `submit` to the last token; None means no limit."""
    prompt_logprobs: int | None = Field(default=None, ge=-1)
    """Number of likeliest tokens reported in `Handle.prompt_logprobs` for each prompt token, with
    log-probabilities under the model's own distribution. None reports nothing, -1 the whole
    vocabulary."""
    logprobs_from: int = Field(default=0, ge=0)
    """First prompt token that `prompt_logprobs` reports; the KV of earlier tokens may be cached."""
    candidates: tuple[TokenId, ...] = ()
    """Tokens that `prompt_logprobs` reports for each prompt token, in place of the likeliest."""
    embeds: bool = False
    """Whether `Handle.embedding` reports the output of a model without a head after the last token
    but one. The last token is a placeholder that is not computed."""
    adapter: str | None = None
    """LoRA adapter to apply to the model; None applies none. Only requests with the
    same adapter share prefixes."""
    salt: str = ""
    """Salt of the tenant: only requests with the same salt share prefixes."""
    cache_prompt: bool = True
    """Whether to look up and cache prefixes. If False, the whole prompt is computed under
    a unique salt, shared by this request's answers, and its KV is freed at the end."""
    grammar: str | None = Field(default=None, min_length=1)
    """Grammar of the answers, in llguidance's format (see `constraint.json_schema_grammar`).

    An answer that completes the grammar finishes with "stop", even with `ignore_eos`."""
    reasoning: ReasoningBudget | None = None
    """Limit of the reasoning. A grammar applies after the reasoning, which the prompt must open."""
    prediction: tuple[TokenId, ...] = ()
    """Expected tokens of the answer, used as proposals if speculative decoding is enabled."""
    hold_seconds: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Seconds after this request during which its prefix is evicted last.

    Held prefixes are still evicted if running sequences need the memory."""
    hold_tokens: int | None = Field(default=None, ge=0)
    """Number of first prompt tokens to hold, in whole nodes; None means all."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(
                "a request takes tokens, not text; engine.generate(text) takes it, or "
                "prompt=tuple(tokenizer.encode(text))"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _own_salt(cls, values: Any) -> Any:
        """Give a request without caching a unique salt; other ranks rebuild rank 0's request."""
        salt = str(values.get("salt", ""))
        if values.get("cache_prompt", True) or _OWN_SALT.search(salt):
            return values
        return {**values, "salt": f"{salt}\0{uuid4().hex}"}

    @model_validator(mode="after")
    def _grammar_without_reasoning(self) -> Request:
        if self.grammar is not None and self.reasoning is not None and not self.reasoning.inside:
            raise ValueError("with a grammar, reasoning must be opened by the prompt")
        if self.min_tokens and self.reasoning is not None:
            raise ValueError("min_tokens and a reasoning budget cannot be combined")
        return self

    @model_validator(mode="after")
    def _spans_in_prompt(self) -> Request:
        end = 0
        for span in self.spans:
            if span.start < end or not span.tokens:
                raise ValueError(f"spans: one of {span.tokens} tokens at {span.start} is misplaced")
            end = span.end
        if self.spans and end >= len(self.prompt):
            raise ValueError("spans: the prompt must end with tokens of its own")
        if self.spans and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be combined with inputs other than tokens")
        return self

    @model_validator(mode="after")
    def _logprobs_asked(self) -> Request:
        if self.prompt_logprobs is None and (self.candidates or self.logprobs_from):
            raise ValueError("candidates and logprobs_from need prompt_logprobs")
        if self.embeds and (self.prompt_logprobs is not None or len(self.prompt) < 2):
            raise ValueError("embeds needs a placeholder after the prompt, and no prompt_logprobs")
        if self.logprobs_from >= len(self.prompt):
            raise ValueError(
                f"logprobs_from {self.logprobs_from} is beyond the prompt's {len(self.prompt)} "
                "tokens"
            )
        return self

    @cached_property
    def keyed_prompt(self) -> tuple[int, ...]:
        """Prompt used to look up KV: tokens of spans are replaced by hashes of their content."""
        return with_keys(self.prompt, self.spans)

    @property
    def tenant(self) -> str:
        """Salt without the suffix unique to this request."""
        return _OWN_SALT.sub("", self.salt)

    @property
    def held_tokens(self) -> int:
        """Number of first prompt tokens to hold; 0 without `hold_seconds`."""
        if not self.hold_seconds:
            return 0
        total = len(self.prompt)
        return total if self.hold_tokens is None else min(self.hold_tokens, total)


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token of one answer."""

    choice: int
    """Index of the answer, from 0."""
    token: int
    text: str
    """Text that this token completes.

    Empty in the middle of a character, and while the text may be the start of a stop string."""
    logprob: float | None = None
    """Natural log-probability of the token; None if not requested."""
    top: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens and their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token usage of one answer."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the cache."""
    completion_tokens: int
    accepted_tokens: int = 0
    """Completion tokens that were accepted proposals, see `--speculative-tokens`."""
    rejected_tokens: int = 0
    """Rejected proposed tokens."""


Reason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Finish:
    """End of one answer; the last event of its choice."""

    choice: int
    reason: Reason
    text: str
    """Remaining text, held back until the end."""
    stop: str | int | None
    """Stop string or token that ended the answer."""
    usage: Usage
    error: PenstockError | None = None
    end_token: Token | None = None
    """Token that ended the answer, with its log-probability; None if not requested."""


Event: TypeAlias = Token | Finish


def _one_line(error: ValidationError) -> str:
    """Return the first error as one line: field, value, reason."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    if not where:
        return message
    if isinstance(first.get("ctx", {}).get("error"), SettingError):  # an error of nested settings
        return f"{where}.{message}"
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "extra_forbidden":
        return f"{where} is not a setting of a request"
    return f"{where} {reprlib.repr(first['input'])}: {message}"  # a prompt may be very long
