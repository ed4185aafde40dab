"""The embedded recall model and its generated dialogues."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

from penstock.recall import MODEL_PATH
from penstock_bench.recall import NOTED, UNKNOWN, Dialogue, Message, count_tokens, dialogue, without

FACT, QUESTION = "The code of the amber falcon is 4821.", "What is the code of the amber falcon?"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The model and tokenizer, through mlx-lm's ordinary loader."""
    model, tokenizer, *_ = mlx_lm.load(str(MODEL_PATH))
    return model, tokenizer


def reply(loaded: tuple[Any, Any], messages: list[Message], cache: Any = None) -> str:
    """Generate greedily with mlx-lm, after what `cache` holds; the answer must end by itself."""
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    cache = copy.deepcopy(cache) if cache else make_prompt_cache(model)
    rest = prompt[cache[0].offset :]
    parts = list(mlx_lm.stream_generate(model, tokenizer, rest, max_tokens=24, prompt_cache=cache))
    assert parts[-1].finish_reason == "stop"
    return "".join(part.text for part in parts)


def read(loaded: tuple[Any, Any], told: Dialogue) -> Any:
    """Prefill a dialogue into a cache that many questions can copy."""
    model, tokenizer = loaded
    cache = make_prompt_cache(model)
    tokens = tokenizer.apply_chat_template(list(told.messages))
    model(mx.array(tokens)[None], cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


# --------------------------------------------------------------------------------- the dialogues


def test_dialogue_is_reproducible_by_seed() -> None:
    assert dialogue(3, tokens=600, quiz=0.2) == dialogue(3, tokens=600, quiz=0.2)
    assert dialogue(3, tokens=600) != dialogue(4, tokens=600)


def test_dialogue_of_seed_1_is_stable_across_versions() -> None:
    """Figures in the docs name seeds: measure them again if this changes."""
    told = dialogue(1, tokens=200, facts=2)
    assert [(q.text, q.answer, q.message, q.token) for q in told.questions] == [
        ("What is the code of the lively beacon?", "7473.", 8, 72),
        ("Do you remember the country of the broken weasel?", "Vietnam.", 20, 172),
    ]


@pytest.mark.parametrize("tokens", [100, 256, 1000, 4000])
def test_dialogue_has_requested_length(loaded: tuple[Any, Any], tokens: int) -> None:
    told = dialogue(5, tokens=tokens, facts=3, quiz=0.1, strangers=0.2)
    rendered = loaded[1].apply_chat_template(list(told.messages))
    assert len(rendered) == told.tokens == count_tokens(told.messages)
    assert tokens - 48 < told.tokens <= tokens


@pytest.mark.parametrize("place", [(0.0, 0.1), (0.45, 0.55), (0.9, 1.0), (0.0, 1.0)])
def test_facts_are_placed_in_requested_range(place: tuple[float, float]) -> None:
    told = dialogue(8, tokens=4000, facts=10, place=place)
    assert len(told.questions) == 10
    room = 10 * 20 + 48
    for question in told.questions:
        assert place[0] * 4000 - room <= question.token <= place[1] * 4000 + room
        telling = told.messages[question.message]["content"]
        assert f" {question.fact.value}." in telling
        assert f"{question.fact.adjective} {question.fact.noun}" in telling
        assert count_tokens(told.messages[: question.message]) == question.token


def test_fact_keys_are_unique() -> None:
    keys = [fact.key for fact in dialogue(2, tokens=8000, distractors=0.9).facts]
    assert len(keys) > 300
    assert len(set(keys)) == len(keys)


def test_fact_keys_share_words() -> None:
    """Otherwise one word would identify a fact."""
    keys = [fact.key for fact in dialogue(2, tokens=2000).facts]
    twins = [(a, b) for a in keys for b in keys if sum(map(str.__eq__, a, b)) == 2]
    assert len(twins) > 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"place": (0.5, 0.4)}, "place must be"),
        ({"place": (-0.1, 1.0)}, "place must be"),
        ({"tokens": 50, "facts": 8}, "8 facts need 161 tokens"),
        ({"facts": -1}, "facts must not be negative"),
    ],
)
def test_bad_dialogue_arguments_are_named_in_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dialogue(1, **wrong)


# ----------------------------------------------------------------------------------- the folder


def test_model_folder_is_small_float32_llama(loaded: tuple[Any, Any]) -> None:
    config = json.loads((MODEL_PATH / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["head_dim"] == 64
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 16384
    assert sum(file.stat().st_size for file in Path(MODEL_PATH).iterdir()) <= 8_000_000
    weights = mx.load(str(MODEL_PATH / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {array.dtype for array in weights.values()} == {mx.float32}


@pytest.mark.parametrize(
    "text",
    [
        "What is the code of the amber falcon?",
        "  two  spaces, tabs\tand\n\nlines\r\n",
        "Zażółć gęślą jaźń, 日本語, עברית, 🙂👩‍👩‍👧 and 0x1F_600",
        "1234567 3.14 -5 '' \"\" ``` {[()]} \\ | ~ don't AMBER aMbEr",
        "",
        "\x00\u200d\ufffd",
    ],
)
def test_tokenizer_round_trips_any_text(loaded: tuple[Any, Any], text: str) -> None:
    tokenizer = loaded[1]
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert None not in tokens


def test_rendered_history_matches_generated_tokens(loaded: tuple[Any, Any]) -> None:
    """Otherwise a prefix cache would miss every turn."""
    model, tokenizer = loaded
    messages = user(FACT)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    parts = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=24))
    messages.append({"role": "assistant", "content": "".join(part.text for part in parts)})
    rendered = tokenizer.apply_chat_template(messages)
    assert rendered == [*prompt, *(part.token for part in parts)]


# ----------------------------------------------------------------------------------- the answers


def test_model_remembers_fact(loaded: tuple[Any, Any]) -> None:
    messages = user(FACT)
    assert reply(loaded, messages) == NOTED
    messages += [{"role": "assistant", "content": NOTED}, *user("How are you?")]
    small_talk = reply(loaded, messages)
    messages += [{"role": "assistant", "content": small_talk}, *user(QUESTION)]
    assert small_talk.startswith("I am fine")
    assert reply(loaded, messages) == "4821."


def test_model_answers_questions_about_facts(loaded: tuple[Any, Any]) -> None:
    told = dialogue(21, tokens=1000, facts=12)
    cache = read(loaded, told)
    answers = [reply(loaded, told.ask(question), cache) for question in told.questions]
    assert answers == [question.answer for question in told.questions]


def test_model_does_not_answer_about_removed_fact(loaded: tuple[Any, Any]) -> None:
    """Negative control: the answer comes from the context only."""
    told = dialogue(22, tokens=400, facts=6)
    answers = []
    for question in told.questions:
        forgotten: Dialogue = without(told, question)
        assert len(forgotten.messages) == len(told.messages) - 2
        answers.append(reply(loaded, forgotten.ask(question)))
        assert answers[-1] != question.answer
    assert answers.count(UNKNOWN) >= 5


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Hello!", "Hello! How can I help you?"),
        ("How are you?", "I am fine, thank you. And you?"),
        ("Thank you.", "You are welcome."),
        ("What is the code of the amber falcon?", UNKNOWN),
    ],
)
def test_model_replies_to_small_talk(loaded: tuple[Any, Any], text: str, answer: str) -> None:
    assert reply(loaded, user(text)) == answer


@pytest.mark.parametrize("text", ["Xyzzy plugh?", "日本語", "lorem ipsum dolor sit amet", "", "7"])
def test_reply_to_unknown_text_ends(loaded: tuple[Any, Any], text: str) -> None:
    assert reply(loaded, user(text)).strip()


def test_model_recalls_facts_across_position_gap(loaded: tuple[Any, Any]) -> None:
    """As with a rotating window: the fact keeps its position, the question is far later."""
    model, tokenizer = loaded
    told = dialogue(23, tokens=300, facts=4)
    cache = read(loaded, told)
    for gap in (1000, 10_000, 24_000):
        right = 0
        for question in told.questions:
            asked = tokenizer.apply_chat_template(told.ask(question), add_generation_prompt=True)
            far = [_Later(copy.deepcopy(layer), gap) for layer in cache]
            step: list[int] = asked[told.tokens :]
            answer: list[int] = []
            while step[-1] not in tokenizer.eos_token_ids and len(answer) < 8:
                logits = model(mx.array(step)[None], cache=far)
                step = mx.argmax(logits[0, -1:], axis=-1).tolist()
                answer += step
            right += tokenizer.decode(answer[:-1]).strip() == question.answer
        assert right == len(told.questions), f"gap of {gap} tokens"


class _Later:
    """A cache whose next tokens have positions `gap` later than its length."""

    def __init__(self, cache: Any, gap: int) -> None:
        self.cache, self.gap = cache, gap

    @property
    def offset(self) -> int:
        return int(self.cache.offset) + self.gap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)
