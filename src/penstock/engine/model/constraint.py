"""Answers that follow a grammar: which tokens may come next, as llguidance says.

    grammar ──Grammars, compiled once──> a copy for each answer: Constraint
    a step:   allowed() masks the logits ──> a token is chosen ──> accept(token)

A grammar is a text in llguidance's form: of a JSON schema (`json_schema_grammar`), or Lark.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from penstock.errors import GrammarFailed, SettingError

__all__ = ["Constraint", "Grammars", "check_grammar", "json_schema_grammar"]

COMPILED_GRAMMARS = 16
"""Grammars that are kept compiled, those used last."""
GRAMMAR_BYTES = 65_536
"""Longest text of a grammar, and of all compiled ones together.

Compiled, it takes 400 times as much, and the time grows faster than the text: 2 seconds for an
object of 2,500 optional properties."""
WHITESPACE = " "
"""Text between the parts of JSON, or nothing: with more a weak model would go on for ever."""
COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")
"""Reasons of a matcher to stop when all is well."""
EMPTY = ("NoExtension", "NoExtensionBias")
"""Reasons of a matcher for a grammar that nothing can begin."""
UNSAID = "doesn't satisfy the grammar"
"""Reason of a matcher for forced text that the tokens cannot spell."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def json_schema_grammar(schema: Mapping[str, Any] | None) -> str:
    """Return the grammar of the JSON that a schema describes; None is any JSON object.

    Raises:
        SettingError: the schema is none, or has rules that cannot be followed token by token.
    """
    wanted = {"type": "object"} if schema is None else dict(schema)
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            wanted, overrides={"whitespace_pattern": WHITESPACE}
        )
    except (ValueError, TypeError) as error:
        raise SettingError(f"the JSON schema cannot be read: {error}") from None
    check_grammar(grammar, "the JSON schema")
    return grammar


def check_grammar(grammar: str, what: str) -> None:
    """Check that a grammar is one, and not too long.

    Raises:
        SettingError: it is not; `what` is its name there.
    """
    _check_size(grammar, what)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        raise SettingError(f"{what} cannot be followed: {_line(messages[0])}")


class Grammars:
    """The grammars of one tokenizer, compiled. Any thread may call it.

    The first call collects the bytes of all tokens for llguidance: about a second for 150,000
    tokens. A large grammar takes as long again, the first time.

    Args:
        tokenizer: mlx-lm's wrapper.
        vocabulary_size: tokens the model gives logits for; it may be another number than the
            tokenizer has.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._size = vocabulary_size
        self._vocabulary: LLTokenizer | None = None
        self._collecting = Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the latest last
        self._looking = Lock()

    def constraint(self, grammar: str) -> Constraint:
        """Return the matcher with which one answer follows a grammar.

        Raises:
            SettingError: the grammar is none.
        """
        with self._looking:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)
        with self._looking:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > COMPILED_GRAMMARS or self._kept > GRAMMAR_BYTES:
                self._compiled.popitem(last=False)
            return Constraint(matcher.deep_copy())

    @property
    def _kept(self) -> int:
        return sum(map(len, self._compiled))

    def _compile(self, grammar: str) -> LLMatcher:
        _check_size(grammar, "the grammar")
        with self._collecting:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._size)
        matcher = LLMatcher(
            self._vocabulary, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        if not matcher.is_error():
            _begin(matcher)
        if matcher.is_error():
            raise SettingError(f"the grammar cannot be followed: {_line(matcher.get_error())}")
        return matcher


class Constraint:
    """The place of one answer in its grammar. Used by the engine's thread alone."""

    free = False
    """Whether any token may come next: only the grammar's next ones may."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Constraint:
        """Return another answer's place, where this one is."""
        return Constraint(self._matcher.deep_copy())

    def forced(self) -> list[int]:
        """Return tokens that spell the only text with which the grammar goes on; perhaps none."""
        return list(self._matcher.compute_ff_tokens())

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many first ones of some tokens the grammar allows, one behind the other."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        """Return which of the first `size` tokens may come next, (size,).

        Raises:
            GrammarFailed: none, or the grammar has become too complex.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar has failed: {_line(self._matcher.get_error())}")
        allowed = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise GrammarFailed("the grammar goes on with no token that the model has")
        return allowed

    def accept(self, token: int) -> bool:
        """Go on with a token; return whether the grammar is complete and nothing can follow.

        Raises:
            GrammarFailed: the grammar does not allow it, or has become too complex.
        """
        matcher = self._matcher
        if not matcher.consume_token(token):
            raise GrammarFailed(f"the grammar has failed: {_line(matcher.get_error())}")
        if not matcher.is_stopped():
            return False
        if matcher.stop_reason() not in COMPLETE:
            raise GrammarFailed(f"the grammar has failed: {matcher.stop_reason()}")
        return True


def _vocabulary(tokenizer: Any, size: int) -> LLTokenizer:
    """Tell llguidance the bytes of each token, and which tokens end an answer."""
    ends = sorted(token for token in tokenizer.eos_token_ids if token is not None and token < size)
    # A tokenizer without an end of sequence gets one that the model cannot choose.
    room, ends = (size, ends) if ends else (size + 1, [size])
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        plain = copy.copy(backend)  # Hugging Face's; to be said as text without these two
        plain.no_padding()
        plain.no_truncation()
        try:
            return LLTokenizer(
                plain.to_str(), n_vocab=max(room, len(tokenizer.get_vocab())), eos_token=ends
            )
        except ValueError:  # it neither works on bytes nor falls back to them
            pass
    return LLTokenizer(TokenizerWrapper(_DecodingTokenizer(tokenizer, room, ends)), eos_token=ends)


class _DecodingTokenizer:
    """Tokenizer for llguidance, with the bytes of each token found by decoding it alone."""

    def __init__(self, tokenizer: Any, size: int, ends: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        special = {*ends, *getattr(tokenizer, "all_special_ids", ())}
        self.tokens = [
            b"" if token in special else text for token, text in enumerate(self._texts(size))
        ]
        # What has no text of its own can be told apart by its number alone, as control tokens.
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        for token in self.special_token_ids:
            self.tokens[token] = b"<token %d>" % token

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text alone can be encoded")  # asked once, to find that out
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _texts(self, size: int) -> Iterable[bytes]:
        """Yield the bytes of each token in the middle of a text; empty if it has none."""
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
    """Check that a grammar can begin, and is not too complex there.

    A grammar that cannot begin may compile, as a schema that only refers to itself.

    Raises:
        SettingError: it cannot.
    """
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        why = _line(first.get_error())
        raise SettingError(
            "the grammar cannot be followed: "
            + ("nothing can begin it; a reference may lead to itself" if why in EMPTY else why)
        )
    forced = first.compute_ff_tokens()
    if forced:
        first.consume_tokens(forced)
        first.compute_bitmask()
        why = _line(first.get_error()) if first.is_error() else EMPTY[0]
        # A token that the model does not have is found where it is needed.
        if why not in EMPTY and UNSAID not in why:
            raise SettingError(f"the grammar cannot be followed: {why}")


def _check_size(grammar: str, what: str) -> None:
    if len(grammar) > GRAMMAR_BYTES:
        raise SettingError(
            f"{what} cannot be followed: as a grammar it has {len(grammar):,} characters; at most "
            f"{GRAMMAR_BYTES:,} are compiled. Name fewer properties or alternatives"
        )


def _line(message: str) -> str:
    """Return the first line of the library's message, without the text of its panics."""
    line = message.strip().split("\n", 1)[0][:500]
    return "a fault inside llguidance" if line.startswith("panic") else line
