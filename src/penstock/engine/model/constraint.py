"""Guided decoding with llguidance: token masks from grammars and JSON schemas.

    grammar ──trial in a subprocess──> Grammars, compiled once ──> a Constraint per answer
    a step:   allowed() masks the logits ──> a token is chosen ──> accept(token)

A grammar is a string in llguidance's format: from a JSON schema (`json_schema_grammar`), or Lark.
"""

from __future__ import annotations

import copy
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from penstock.engine.model.grammar_trials import grammar_limits, grammar_trials
from penstock.errors import GrammarFailed, LedgerFull, NeverFits, SettingError
from penstock.heap import give_back_freed_memory
from penstock.memory.sizes import format_bytes
from penstock.plurals import counted

__all__ = ["Constraint", "Grammars", "check_grammar", "json_schema_grammar", "pool_bytes"]

COMPILED_GRAMMARS = 16
"""Size of the LRU cache of compiled grammars."""
GRAMMAR_BYTES = 65_536
"""Maximum length of a grammar in bytes.

Compile time grows faster than linearly: 2 seconds for an object of 2,500 optional properties.
"""
POOL_SHARE = 8
"""Divisor of the memory limit for the memory of compiled grammars."""
LEAST_POOL_BYTES = 16_000_000
MOST_POOL_BYTES = 256_000_000
STEP_SECONDS = 0.01
"""Average processor time per token that an answer may spend on its grammar, in seconds. With a
vocabulary of 150,000, a step takes 0.1 to 2 ms, the first one 5 to 25 ms."""
BURST_SECONDS = 0.1
"""Processor time by which an answer may exceed its average, in seconds."""
FULL_SHARES = 8
"""Number of answers that each get the full processor time; more answers share it."""
WHITESPACE = " "
"""Allowed whitespace between JSON tokens. Weak models may generate whitespace without end
otherwise."""
COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")
"""Stop reasons of a matcher after a complete answer."""
EMPTY = ("NoExtension", "NoExtensionBias")
"""Stop reasons of a matcher whose grammar matches nothing."""
UNSAID = "doesn't satisfy the grammar"
"""Error text of a matcher if no tokens produce a forced text."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def json_schema_grammar(schema: Mapping[str, Any] | None) -> str:
    """Return the grammar of a JSON schema, None for any JSON object; raises SettingError."""
    object_schema = {"type": "object"} if schema is None else dict(schema)
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            object_schema, overrides={"whitespace_pattern": WHITESPACE}
        )
    except (ValueError, TypeError) as error:
        raise SettingError(f"the JSON schema is invalid: {error}") from None
    check_grammar(grammar, "the JSON schema")
    return grammar


def check_grammar(grammar: str, what: str) -> None:
    """Raise SettingError unless a grammar compiles quickly. Blocking: runs a subprocess."""
    _tried(grammar, what)


def pool_bytes(limit_bytes: int) -> int:
    return min(max(limit_bytes // POOL_SHARE, LEAST_POOL_BYTES), MOST_POOL_BYTES)


class Compiled:
    """Compiled grammar. All answers that use it share its lexer, whose number of states grows."""

    def __init__(self, matcher: LLMatcher, nbytes: int) -> None:
        self.matcher = matcher
        self.nbytes = nbytes
        self.spoilt = False
        """Whether the lexer has reached its limit of states, so no further answer can use it."""


class NoGrammars:
    """Replaces `Grammars` in an engine without a tokenizer, which supports no grammars."""

    nbytes = 0
    reserve: Callable[[int], None]

    def constraint(self, grammar: str) -> Constraint:
        raise SettingError("a grammar needs a tokenizer, and the engine has none")

    def evict(self) -> int:
        return 0


class Grammars:
    """LRU cache of compiled grammars for one tokenizer. Thread-safe.

    The first call collects the bytes of all tokens, about a second for 150,000 tokens. The model's
    `vocabulary_size` may differ from the tokenizer's.
    """

    def __init__(
        self, tokenizer: Any, vocabulary_size: int, pool_bytes: int = MOST_POOL_BYTES
    ) -> None:
        self.pool_bytes = pool_bytes
        self.reserve: Callable[[int], None] = lambda nbytes: None
        """Called with the new total bytes of compiled grammars before they grow; may raise."""
        self._tokenizer = tokenizer
        self._size = vocabulary_size
        self._vocabulary: LLTokenizer | None = None
        self._compiling = Lock()
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()  # most recently used last
        self._alive: WeakSet[Compiled] = WeakSet()
        """Cached grammars, and evicted ones that answers still use."""
        self._shares: WeakSet[GrammarTime] = WeakSet()
        self._compiling_bytes = 0
        self._looking = Lock()

    def constraint(self, grammar: str) -> Constraint:
        """Return the constraint of one answer; raises SettingError, LedgerFull or NeverFits."""
        compiled = self._kept(grammar)
        if compiled is None:
            nbytes = _tried(grammar, "the grammar")
            with self._compiling:
                compiled = self._kept(grammar)  # another request may have compiled it
                if compiled is None:
                    self._make_room(nbytes)
                    self._compiling_bytes = nbytes
                    try:
                        compiled = self._compile(grammar, nbytes)
                    finally:
                        self._compiling_bytes = 0
        return Constraint(compiled, self._shares)

    @property
    def nbytes(self) -> int:
        """Upper bound of the memory of all compiled grammars, including one being compiled."""
        return sum(compiled.nbytes for compiled in self._alive) + self._compiling_bytes

    def evict(self) -> int:
        with self._looking:
            self._compiled.clear()
            return self.nbytes

    def _kept(self, grammar: str) -> Compiled | None:
        with self._looking:
            compiled = self._compiled.get(grammar)
            if compiled is not None and compiled.spoilt:
                compiled = self._compiled.pop(grammar)
                return None
            if compiled is not None:
                self._compiled.move_to_end(grammar)
            return compiled

    def _compile(self, grammar: str, nbytes: int) -> Compiled:
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self._size)
        limits = LLParserLimits(**grammar_limits(grammar))
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            _begin(matcher)
        if matcher.is_error():
            raise SettingError(f"the grammar cannot be followed: {_line(matcher.get_error())}")
        compiled = Compiled(matcher, nbytes)
        with self._looking:
            self._alive.add(compiled)
            self._compiled[grammar] = compiled
            if len(self._compiled) > COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _make_room(self, nbytes: int) -> None:
        if nbytes > self.pool_bytes:
            raise NeverFits(
                f"the grammar needs {format_bytes(nbytes)}; there are "
                f"{format_bytes(self.pool_bytes)} for all grammars. Ask for smaller counts, or "
                "raise the memory limit",
                nbytes,
                self.pool_bytes,
                self.pool_bytes,
            )
        while True:
            used = self.nbytes
            try:
                if used + nbytes <= self.pool_bytes:
                    self.reserve(used + nbytes)
                    return
                free = self.pool_bytes - used
                raise LedgerFull(
                    f"the grammar needs {format_bytes(nbytes)}; {format_bytes(free)} of "
                    f"{format_bytes(self.pool_bytes)} for all grammars are free, as answers follow "
                    "the others; try again later",
                    nbytes,
                    free,
                    self.pool_bytes,
                )
            except LedgerFull:
                with self._looking:
                    if not self._compiled:
                        raise
                    self._compiled.popitem(last=False)
                give_back_freed_memory()


class GrammarTime:
    """Accounting of the processor time that an answer spends on its grammar."""

    def __init__(self, shares: WeakSet[GrammarTime]) -> None:
        self._shares = shares
        self._late_seconds = 0.0
        shares.add(self)

    @contextmanager
    def spend(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self._late_seconds += time.thread_time() - began

    def next_token(self) -> None:
        self._late_seconds = max(0.0, self._late_seconds - STEP_SECONDS / self._parts)

    def check(self) -> None:
        limit = BURST_SECONDS / self._parts
        if self._late_seconds > limit:
            raise GrammarFailed(
                f"the grammar has failed: its steps take {self._late_seconds * 1e3:.0f} ms more "
                f"than {STEP_SECONDS / self._parts * 1e3:.0f} ms a token, and may take "
                f"{limit * 1e3:.0f} ms more. Make it less ambiguous"
            )

    @property
    def _parts(self) -> float:
        return max(1.0, len(self._shares) / FULL_SHARES)


class Constraint:
    """State of one answer's grammar; implements `Rule`. Used only by the engine's thread."""

    free = False

    def __init__(
        self,
        compiled: Compiled,
        shares: WeakSet[GrammarTime],
        matcher: LLMatcher | None = None,
        spent: GrammarTime | None = None,
    ) -> None:
        self._compiled = compiled
        self._shares = shares
        self._matcher = (matcher or compiled.matcher).deep_copy()
        self._spent = spent

    def copy(self) -> Constraint:
        return Constraint(self._compiled, self._shares, self._matcher, self._spent)

    def forced(self) -> list[int]:
        """Return the tokens of the only possible continuation; may be empty."""
        with self._timed():
            return list(self._matcher.compute_ff_tokens())

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        with self._timed():
            return int(self._matcher.validate_tokens(list(tokens)))

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the allowed next tokens, (size,) bool. Raises GrammarFailed."""
        with self._timed() as spent:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._failed()
        spent.check()
        allowed = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise GrammarFailed("the grammar allows no token of the model")
        return allowed

    def accept(self, token: int) -> bool:
        """Advance by a token; return whether the answer is complete. Raises GrammarFailed."""
        matcher = self._matcher
        with self._timed() as spent:
            accepted = matcher.consume_token(token)
        spent.next_token()
        if not accepted:
            raise self._failed()
        if not matcher.is_stopped():
            return False
        if matcher.stop_reason() not in COMPLETE:
            raise GrammarFailed(f"the grammar has failed: {matcher.stop_reason()}")
        return True

    @contextmanager
    def _timed(self) -> Iterator[GrammarTime]:
        if self._spent is None:
            self._spent = GrammarTime(self._shares)
        with self._spent.spend():
            yield self._spent

    def _failed(self) -> GrammarFailed:
        """Return the matcher's error, and mark the compiled grammar as unusable."""
        self._compiled.spoilt = True
        return GrammarFailed(f"the grammar has failed: {_line(self._matcher.get_error())}")


def _vocabulary(tokenizer: Any, size: int) -> LLTokenizer:
    ends = sorted(token for token in tokenizer.eos_token_ids if token is not None and token < size)
    # A tokenizer without an end-of-sequence token gets one outside the model's vocabulary.
    room, ends = (size, ends) if ends else (size + 1, [size])
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        plain = copy.copy(backend)  # Hugging Face's; these two options cannot be serialized
        plain.no_padding()
        plain.no_truncation()
        try:
            return LLTokenizer(
                plain.to_str(), n_vocab=max(room, len(tokenizer.get_vocab())), eos_token=ends
            )
        except ValueError:  # neither byte-level nor with byte fallback
            pass
    return LLTokenizer(TokenizerWrapper(_DecodingTokenizer(tokenizer, room, ends)), eos_token=ends)


class _DecodingTokenizer:
    """Tokenizer for llguidance that determines the bytes of tokens by decoding them."""

    def __init__(self, tokenizer: Any, size: int, ends: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        special = {*ends, *getattr(tokenizer, "all_special_ids", ())}
        self.tokens = [
            b"" if token in special else text for token, text in enumerate(self._texts(size))
        ]
        # Tokens without text, such as control tokens, are distinguished only by their ids.
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        for token in self.special_token_ids:
            self.tokens[token] = b"<token %d>" % token

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("only text can be encoded")  # llguidance tries bytes first
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _texts(self, size: int) -> Iterable[bytes]:
        """Yield the bytes that each token adds in the middle of a text; empty if it adds none."""
        decode = self._tokenizer.decode
        names = {token: name for name, token in self._tokenizer.get_vocab().items()}
        before = list(self._tokenizer.encode("a", add_special_tokens=False))
        begun = decode(before)
        for token in range(size):
            name = names.get(token)
            if name is None:
                yield b""
            elif byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
                yield bytes.fromhex(byte[1])
            else:
                text = decode([*before, token]).removeprefix(begun)
                yield b"" if REPLACEMENT in text else text.encode()


def _begin(matcher: LLMatcher) -> None:
    """Raise SettingError if a grammar matches nothing, or is too complex at its start."""
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        why = _line(first.get_error())
        raise SettingError(
            "the grammar cannot be followed: "
            + ("it matches nothing; a reference may lead to itself" if why in EMPTY else why)
        )
    forced = first.compute_ff_tokens()
    if forced:
        first.consume_tokens(forced)
        first.compute_bitmask()
        why = _line(first.get_error()) if first.is_error() else EMPTY[0]
        # A forced text that no tokens produce is only an error once it is needed.
        if why not in EMPTY and UNSAID not in why:
            raise SettingError(f"the grammar cannot be followed: {why}")


def _tried(grammar: str, what: str) -> int:
    """Return the bytes of a compiled grammar, from its trial; raises SettingError if rejected."""
    if len(grammar) > GRAMMAR_BYTES:
        raise SettingError(
            f"{what} cannot be followed: as a grammar it has "
            f"{counted(len(grammar), 'character')}; at most "
            f"{GRAMMAR_BYTES:,} are compiled. Name fewer properties or alternatives"
        )
    verdict = grammar_trials.verdict(grammar)
    if verdict.error:
        raise SettingError(f"{what} cannot be followed: {_line(verdict.error)}")
    return verdict.nbytes


def _line(message: str) -> str:
    """Return the first line of an error message of llguidance; panics are summarized."""
    line = message.strip().split("\n", 1)[0][:500]
    return "a fault inside llguidance" if line.startswith("panic") else line
