"""Requests to the engine, and the events that answer them.

A request is checked once, where it is made; past that every value is right. It holds tokens,
not text: the caller encodes the prompt.
"""

from __future__ import annotations

import os
import re
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias
from uuid import uuid4

from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.config import MAX_TOKENS, Settings
from penstock.errors import PenstockError, SettingError

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
"""End of a salt that one request alone has."""
GREEDY_BELOW = 1e-5
"""A lower temperature takes the likeliest token: divided by it, logits overflow."""

TokenId: TypeAlias = Annotated[int, Field(ge=0)]
Added: TypeAlias = Annotated[float, Field(ge=-1e30, le=1e30)]
"""Number that is added to logits; it stays a float32 even if added many times."""


class _RequestSettings(Settings):
    """Settings whose constructor reports the first fault in one line.

    Raises:
        SettingError: names the first value that is out of its range.
    """

    if not TYPE_CHECKING:  # type checkers go on reading the arguments off the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise SettingError(_one_line(error)) from None


class Sampling(_RequestSettings):
    """Settings of the choice of a token from the logits; the default takes the likeliest.

    In the order of mlx-lm: bias and penalties, then top-p, min-p, top-k, then temperature.
    Before all of them a request's grammar takes out the tokens that it does not allow.

    >>> Sampling(temperature=0.7, top_p=1.5)
    Traceback (most recent call last):
    penstock.errors.SettingError: top_p 1.5: Input should be less than or equal to 1
    """

    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the probability that is drawn from; 1 draws from all of it."""
    top_k: int = Field(default=0, ge=0)
    """Tokens that are drawn from; 0 draws from all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Least probability that is drawn, as a share of the likeliest token's."""
    repetition_penalty: float | None = Field(default=None, ge=1e-30, le=1e30)
    """Divides the positive logits, and multiplies the negative ones, of tokens that were in the
    prompt or were generated; None and 1 change nothing."""
    repetition_context: int | None = Field(default=None, ge=1)
    """Last tokens, of prompt and answer together, that the repetition penalty looks at; None is
    all of them."""
    presence_penalty: Added = 0.0
    """Subtracted from the logit of every token that was generated; the prompt does not count."""
    frequency_penalty: Added = 0.0
    """Subtracted once for every time the token was generated; the prompt does not count."""
    logit_bias: dict[TokenId, Added] = Field(default_factory=dict)
    """Added to the logits of these tokens."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Decides every draw, together with the choice's number and the token's; None draws a seed
    for each request."""
    logprobs: bool = False
    """Whether each token comes with its log-probability under the model's own distribution:
    before grammar, bias, penalties, filters and temperature."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """Likeliest tokens that are reported beside the chosen one."""

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Sampling:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs {self.top_logprobs} needs logprobs=True")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """Whether the answer is the place of the largest logit as the model gives it."""
        return self.greedy and not self.logprobs and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether a bias or a penalty is asked for."""
        return bool(
            self.logit_bias
            or self.repetition_penalty not in (None, 1.0)
            or self.presence_penalty
            or self.frequency_penalty
        )

    def with_seed(self) -> Sampling:
        """Return these settings with a seed: this one, or one drawn from the system."""
        if self.seed is not None:
            return self
        return self.model_copy(update={"seed": int.from_bytes(os.urandom(8))})


class ReasoningBudget(_RequestSettings):
    """Limit of an answer's reasoning, in tokens, and the marks around it."""

    max_tokens: int = Field(ge=1)
    """Tokens of all reasoning of an answer; then only the end mark may come."""
    start: tuple[TokenId, ...] = ()
    """Tokens that begin it."""
    end: tuple[TokenId, ...] = Field(min_length=1)
    """Tokens that end it."""
    inside: bool = False
    """Whether the prompt ends inside the reasoning."""


class Request(_RequestSettings):
    """A prompt and its settings; `n` answers are generated from one prefill of it.

    >>> Request(prompt=[])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.errors.SettingError: prompt []: Tuple should have at least 1 item after ...
    """

    prompt: tuple[TokenId, ...] = Field(min_length=1)
    max_tokens: int = Field(default=MAX_TOKENS, ge=0, lt=2**31)
    """Tokens of each answer, at most; 0 reads the prompt and no more."""
    sampling: Sampling = Sampling()
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer; they are not part of it, but for `keep_stop`."""
    stop_tokens: tuple[TokenId, ...] = ()
    """Tokens that end an answer, beside the tokenizer's own end of sequence."""
    keep_stop: bool = False
    """Whether the text of the answer has the text, or that of the stop token, which ended it."""
    min_tokens: int = Field(default=0, ge=0)
    """Tokens of an answer before a stop text, a stop token or the end of sequence may end it.

    A grammar alone says where its answers end."""
    silent_tokens: frozenset[TokenId] = frozenset()
    """Tokens of an answer that add nothing to its text."""
    goes_on: bool = False
    """Whether the answer's text goes on with the prompt's, the first space included; if not, it is
    as mlx-lm writes an answer, which drops that space with some tokenizers."""
    ignore_eos: bool = False
    """Whether an answer goes on after the tokenizer's end of sequence."""
    n: int = Field(default=1, ge=1, le=128)
    """Number of answers."""
    priority: int = 0
    """Priority in the queue; higher goes first."""
    client: str = ""
    """Client that the engine serves as much as any other, however many requests it has open."""
    group: str = ""
    """Requests of one client and group are served as one request; empty is a group of its own."""
    timeout_seconds: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Seconds from `submit` to the last token; None waits forever."""
    prompt_logprobs: int | None = Field(default=None, ge=-1)
    """Likeliest tokens that are reported beside each token of the prompt, with log-probabilities
    under the model's own distribution (`Handle.prompt_logprobs`); None reports nothing, -1 the
    whole vocabulary."""
    salt: str = ""
    """Tenant: only requests of the same salt share prefixes."""
    cache_prompt: bool = True
    """Whether prefixes are looked up and kept. If not, all is computed, and its KV goes at its end:
    the answers of this request alone share it, by a salt of their own."""
    grammar: str | None = Field(default=None, min_length=1)
    """Grammar that the answers follow, in llguidance's form (`constraint.json_schema_grammar`).

    An answer that completes it ends with "stop", also with `ignore_eos`."""
    reasoning: ReasoningBudget | None = None
    """Bounds the reasoning. A grammar begins behind the reasoning that the prompt has opened."""
    prediction: tuple[TokenId, ...] = ()
    """Tokens that are expected as the answer: proposals, as far as the engine speculates."""
    hold_seconds: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Seconds after this request in which its prefix is evicted last.

    A preference, never a claim: it takes no room from running sequences."""
    hold_tokens: int | None = Field(default=None, ge=0)
    """First tokens of the prompt that are held, in whole nodes; None is all of them."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _tokens(cls, given: Any) -> Any:
        if isinstance(given, str):
            raise ValueError(
                "a request takes tokens, and this is text; engine.generate(text) takes it, or "
                "prompt=tuple(tokenizer.encode(text))"
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _own_salt(cls, given: Any) -> Any:
        """Salt a request that shares nothing; once, as ranks make the first one's anew."""
        salt = str(given.get("salt", ""))
        if given.get("cache_prompt", True) or _OWN_SALT.search(salt):
            return given
        return {**given, "salt": f"{salt}\0{uuid4().hex}"}

    @model_validator(mode="after")
    def _grammar_without_reasoning(self) -> Request:
        if self.grammar is not None and self.reasoning is not None and not self.reasoning.inside:
            raise ValueError("beside a grammar, reasoning must be opened by the prompt")
        if self.min_tokens and self.reasoning is not None:
            raise ValueError("a request has min_tokens or a budget for reasoning, not both")
        return self

    @property
    def tenant(self) -> str:
        """Salt, without the end that this request alone has."""
        return _OWN_SALT.sub("", self.salt)

    @property
    def held_tokens(self) -> int:
        """First tokens of the prompt that stay held for a while; 0 if that is not asked for."""
        if not self.hold_seconds:
            return 0
        most = len(self.prompt)
        return most if self.hold_tokens is None else min(self.hold_tokens, most)


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token of one answer."""

    choice: int
    """Number of the answer, from 0."""
    token: int
    text: str
    """Text that became certain with this token.

    Empty in the middle of a character, and while the end of the text may begin a stop string."""
    logprob: float | None = None
    """Natural logarithm of its probability; None if the request does not ask for it."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of one answer, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the cache."""
    completion_tokens: int
    accepted_tokens: int = 0
    """Completion tokens that were proposed, see `--speculative-tokens`."""
    rejected_tokens: int = 0
    """Proposed tokens that were not the ones chosen."""


Reason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one answer; nothing follows for this choice."""

    choice: int
    reason: Reason
    text: str
    """Last text, which was held back until the end."""
    stop: str | int | None
    """The text or the token that ended it."""
    usage: Usage
    error: PenstockError | None = None
    end_token: Token | None = None
    """Token that ended it, with its log-probability; None if that is not asked for."""


Event: TypeAlias = Token | Finish


def _one_line(error: ValidationError) -> str:
    """Return the first fault: field, value, reason."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    if not where:
        return message
    if isinstance(first.get("ctx", {}).get("error"), SettingError):  # one of settings in settings
        return f"{where}.{message}"
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "extra_forbidden":
        return f"{where} is no setting of a request"
    return f"{where} {reprlib.repr(first['input'])}: {message}"  # a prompt may be very long
