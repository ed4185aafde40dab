"""Constrained answers: alone, batched, sampled, cut, preempted, and refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from core_parts import evict_all
from engine_faults import model_of
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import penstock
from penstock.engine.core import Core
from penstock.engine.engine import Engine
from penstock.engine.handle import Choice, Handle
from penstock.engine.model.constraint import (
    COMPILED_GRAMMARS,
    WHITESPACE,
    Grammars,
    json_schema_grammar,
)
from penstock.engine.request import Request, Sampling
from penstock.errors import GrammarFailed, SettingError, StepFailed
from penstock.models.mlx_lm import TokenizerWrapper, encode
from penstock.recall import MODEL_PATH

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "name", "count"],
    "additionalProperties": False,
}
GRAMMAR = json_schema_grammar(SCHEMA)
QUESTION = "Please note: The code of the amber falcon is 4821. What is the code of the falcon?"


@pytest.fixture(scope="module")
def embedded() -> Any:
    return penstock.load(MODEL_PATH)


@pytest.fixture
def core(embedded: Any) -> Iterator[Core]:
    made = Core(*embedded, memory_limit="100MB", block_size=16, max_batch_size=4, max_queue=64)
    yield made
    made.close()


def ask(core: Core, text: str = QUESTION, **settings: Any) -> Handle:
    settings = {"max_tokens": 80, **settings}
    return core.submit(Request(prompt=tuple(encode(core.tokenizer, text)), **settings))


def run(core: Core, *handles: Handle) -> list[Choice]:
    """Run all requests and return the first answers."""
    while core.step():
        core.view.check()
    for handle in handles:
        handle.events()
    return [handle.choices[0] for handle in handles]


def reason(choice: Choice) -> str:
    assert choice.finish is not None
    return choice.finish.reason


def assert_follows(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["city", "name", "count"]
    assert found["city"] in ("Paris", "Rome", "Oslo")
    assert len(found["name"]) <= 12
    assert 0 <= found["count"] <= 99


# ---- grammars


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "object", "properties": 7}, "properties"),
        ({"type": "string", "pattern": "("}, "."),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": {1, 2}}, "."),
    ],
)
def test_invalid_schema_error_comes_from_grammar_library(schema: Any, said: str) -> None:
    with pytest.raises(SettingError, match=f"^the JSON schema (cannot be|is invalid).*{said}"):
        json_schema_grammar(schema)


def test_bad_grammar_is_refused_on_submit(core: Core) -> None:
    with pytest.raises(SettingError, match="the grammar cannot be followed"):
        ask(core, grammar="this is not a grammar")
    assert core.view.idle
    (good,) = run(core, ask(core, grammar=GRAMMAR))
    assert_follows(good.text)


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


CIRCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#"}, "may lead to itself"),
        ({"$ref": "#/$defs/a", "$defs": CIRCLE}, "may lead to itself"),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "may lead to itself"),
        (optional(1_000), "items"),
        (optional(5_000), "at most 65,536 are compiled"),
        ({"enum": [f"value {i}" for i in range(100_000)]}, "at most 65,536"),
    ],
    ids=["itself", "a circle", "any of itself", "1,000", "5,000", "an enum"],
)
def test_uncompilable_grammar_is_refused_before_submit(
    embedded: Any, schema: dict[str, Any], said: str
) -> None:
    with Engine(*embedded, memory_limit="200MB") as engine:
        began = time.process_time()
        with pytest.raises(SettingError, match=said):
            engine.open(Request(prompt=(1, 2), grammar=json_schema_grammar(schema)))
        assert time.process_time() - began < 10.0  # 5,000 properties took 8 s to be compiled
        assert engine.stats().requests == 0


def test_engine_thread_never_compiles_grammars(embedded: Any) -> None:
    """Also a grammar that was dropped between `open` and the engine is not recompiled."""
    with Engine(*embedded, memory_limit="200MB") as engine:
        handle = engine.open(Request(prompt=(1, 2), max_tokens=100, n=2, grammar=GRAMMAR))
        for i in range(COMPILED_GRAMMARS):
            engine.open(Request(prompt=(1, 2), grammar=f'start: "{"a" * (1 + i)}"'))
        core = engine._core
        assert core.intake.grammars is not None and GRAMMAR not in core.intake.grammars._compiled
        engine.enqueue([handle]).result()
        assert GRAMMAR not in core.intake.grammars._compiled
        for choice in handle.result(60):
            assert_follows(choice.text)


def test_grammar_requires_tokenizer() -> None:
    core = Core(model_of("llama"), memory_limit="40MB", block_size=16, max_kv_size=512)
    with pytest.raises(SettingError, match="needs a tokenizer"):
        core.submit(Request(prompt=(1, 2), grammar=GRAMMAR))
    core.close()


def test_compiled_grammars_are_lru_cached(embedded: Any) -> None:
    grammars = Grammars(embedded[1], 3_025)
    asked = [f'start: "{"a" * (1 + i)}"' for i in range(COMPILED_GRAMMARS + 3)]
    for grammar in asked:
        grammars.constraint(grammar)
    kept = dict(grammars._compiled)
    assert list(kept) == asked[3:]
    grammars.constraint(asked[3])
    assert list(grammars._compiled)[-1] == asked[3]
    assert grammars._compiled[asked[3]] is kept[asked[3]]


def test_answers_share_compiled_grammar_but_not_state(embedded: Any) -> None:
    grammars = Grammars(embedded[1], 3_025)
    one, other = (grammars.constraint('start: "{" "}"') for _ in range(2))
    opens, closes = (encode(embedded[1], text)[-1] for text in "{}")
    assert not one.accept(opens)
    assert one.allowed(3_025).nonzero()[0].tolist() == [closes]
    assert other.allowed(3_025).nonzero()[0].tolist() == [opens]
    assert one.accept(closes)
    with pytest.raises(StepFailed, match="the grammar has failed"):
        other.accept(closes)


# ---- answers


def test_answer_follows_schema_and_stops(core: Core) -> None:
    free, bound = run(core, ask(core), ask(core, grammar=GRAMMAR))
    assert_follows(bound.text)
    assert reason(bound) == "stop"
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(free.text)  # negative control: by itself the model says no JSON


def test_empty_schema_means_any_object(core: Core) -> None:
    (found,) = run(core, ask(core, grammar=json_schema_grammar(None), max_tokens=60))
    assert found.text.lstrip().startswith("{")
    if reason(found) == "stop":
        assert isinstance(json.loads(found.text), dict)


def test_greedy_constrained_text_is_batch_invariant(core: Core) -> None:
    texts = (QUESTION, "Animals are good company.", "The code of the royal owl is 17.")
    wishes = [(text, grammar) for text in texts for grammar in (None, GRAMMAR)]
    alone = [run(core, ask(core, text, grammar=grammar))[0].tokens for text, grammar in wishes]
    evict_all(core)
    together = run(core, *[ask(core, text, grammar=grammar) for text, grammar in wishes])
    assert [choice.tokens for choice in together] == alone


def test_sampled_constrained_answers_are_seeded(core: Core) -> None:
    hot = Sampling(temperature=1.5, seed=7, logprobs=True, top_logprobs=3, top_p=0.9, top_k=40)
    handles = [ask(core, grammar=GRAMMAR, sampling=hot, n=3) for _ in range(2)]
    run(core, *handles)
    first, again = (handle.choices for handle in handles)
    for choice in first:
        assert_follows(choice.text)
        assert reason(choice) == "stop"
        assert len(choice.logprobs) == len(choice.tokens)
        for event in choice.logprobs:
            assert event.logprob is not None
            assert np.isfinite(event.logprob)
            assert len(event.top) == 3
    assert [c.tokens for c in first] == [c.tokens for c in again]
    assert len({tuple(c.tokens) for c in first}) > 1


def test_logprobs_ignore_constraint(core: Core) -> None:
    """Log-probabilities include tokens that the grammar forbids."""
    wish = Sampling(logprobs=True, top_logprobs=1)
    free, bound = run(core, ask(core, sampling=wish), ask(core, sampling=wish, grammar=GRAMMAR))
    assert free.logprobs[0].top == bound.logprobs[0].top
    assert bound.logprobs[0].token != free.logprobs[0].token
    likelier, chosen = free.logprobs[0].logprob, bound.logprobs[0].logprob
    assert likelier is not None
    assert chosen is not None
    assert chosen < likelier


def test_logit_bias_cannot_allow_forbidden_tokens(core: Core) -> None:
    bias = Sampling(logit_bias={encode(core.tokenizer, "!")[-1]: 1e9}, repetition_penalty=1.2)
    (found,) = run(core, ask(core, grammar='start: "{" /[a-c]{3}/ "}"', sampling=bias))
    assert found.text[0] + found.text[-1] == "{}"
    assert set(found.text[1:-1]) <= set("abc")


def test_stop_strings_and_max_tokens_end_constrained_answer(core: Core) -> None:
    stopped, short = run(
        core, ask(core, grammar=GRAMMAR, stop=('"name"',)), ask(core, grammar=GRAMMAR, max_tokens=3)
    )
    assert (reason(stopped), reason(short)) == ("stop", "length")
    assert "city" in stopped.text
    assert "name" not in stopped.text
    assert len(short.tokens) == 3


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_open_ended_grammar_ends_with_eos(core: Core, ignore_eos: bool) -> None:
    (found,) = run(core, ask(core, grammar='start: "7"+', ignore_eos=ignore_eos, max_tokens=40))
    assert set(found.text) == {"7"}
    if reason(found) == "stop":
        assert found.finish is not None
        assert found.finish.stop in core.tokenizer.eos_token_ids


def test_constrained_answer_resumes_after_preemption(embedded: Any) -> None:
    settings: dict[str, Any] = {"memory_limit": "100MB", "block_size": 16, "max_batch_size": 1}
    core = Core(*embedded, **settings)
    (alone,) = run(core, ask(core, grammar=GRAMMAR))
    handle = ask(core, grammar=GRAMMAR)
    for _ in range(6):
        core.step()
    other = ask(core, "Animals are good company.", priority=1)
    (found, _) = run(core, handle, other)
    assert core.counters.preemptions == 1
    assert found.tokens == alone.tokens
    core.close()


# ---- other tokenizers


class Signs:
    """A tokenizer without a backend: one token per character or byte, and no EOS."""

    signs = "".join(map(chr, range(32, 127)))
    eos_token_ids: frozenset[int] = frozenset()
    all_special_ids = (100,)

    def __init__(self) -> None:
        self.offset, self.text = 0, ""

    def get_vocab(self) -> dict[str, int]:
        return {**{sign: i for i, sign in enumerate(self.signs)}, "<0x0A>": 95, "<pad>": 100}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        known = {**self.get_vocab(), "\n": 95}
        return [known.get(sign, 100) for sign in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.signs[t] if t < 95 else "\n" if t == 95 else "�" for t in tokens)

    # ---- it is its own detokenizer

    @property
    def detokenizer(self) -> Signs:
        return Signs()

    def reset(self) -> None:
        self.offset, self.text = 0, ""

    def add_token(self, token: int) -> None:
        self.text += self.decode([token])

    def finalize(self) -> None:
        pass

    @property
    def last_segment(self) -> str:
        new, self.offset = self.text[self.offset :], len(self.text)
        return new


@pytest.fixture
def signs() -> Iterator[Core]:
    made = Core(
        model_of("llama"),
        Signs(),
        memory_limit="40MB",
        block_size=16,
        max_batch_size=4,
        max_kv_size=512,
    )
    yield made
    made.close()


def test_grammar_works_without_fast_tokenizer(signs: Core) -> None:
    prompt = tuple(range(40))
    handles = [
        signs.submit(Request(prompt=prompt, max_tokens=200, grammar=grammar, n=2))
        for grammar in (GRAMMAR, 'start: "a" "\\n" "b"')
    ]
    found, lines = run(signs, *handles)
    assert_follows(found.text)
    assert (lines.text, lines.tokens) == ("a\nb", [65, 95, 66])
    assert (reason(found), reason(lines)) == ("stop", "stop")


def test_grammar_without_allowed_token_fails_only_its_answer(signs: Core) -> None:
    bad = signs.submit(Request(prompt=tuple(range(40)), max_tokens=20, grammar='start: "aé"'))
    good = signs.submit(Request(prompt=tuple(range(40)), max_tokens=200, grammar=GRAMMAR))
    free = signs.submit(Request(prompt=tuple(range(40)), max_tokens=20))
    failed, found, said = run(signs, bad, good, free)
    assert failed.text == "a"
    assert failed.finish is not None
    assert isinstance(failed.finish.error, StepFailed)
    assert isinstance(failed.finish.error, GrammarFailed) and failed.finish.error.status == 400
    assert str(failed.finish.error).startswith("the grammar has failed")
    assert_follows(found.text)
    assert (reason(said), len(said.tokens)) == ("length", 20)
    assert signs.counters.failed == 1
    signs.view.check()


def test_grammar_works_with_word_level_tokenizer() -> None:
    words = {word: i for i, word in enumerate(["yes", "no", "maybe", "</s>", "?"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    fast: Any = PreTrainedTokenizerFast
    backend.decoder = decoders.Fuse()
    tokenizer = TokenizerWrapper(fast(tokenizer_object=backend, eos_token="</s>"))
    constraint = Grammars(tokenizer, 8).constraint('start: "yes" | "no"')
    assert constraint.allowed(8).nonzero()[0].tolist() == [0, 1]
    assert constraint.accept(1)


def test_grammar_bounds_whitespace(signs: Core) -> None:
    blank = Sampling(logit_bias={0: 1e6, 95: 1e6})
    handle = signs.submit(
        Request(prompt=(1, 2, 3), max_tokens=300, grammar=GRAMMAR, sampling=blank)
    )
    (found,) = run(signs, handle)
    assert reason(found) == "stop", WHITESPACE
    assert_follows(found.text)
