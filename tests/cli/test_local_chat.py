"""Chat on the embedded model: only new tokens are computed, and answers stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from penstock.cli.answer_figures import AnswerFigures
from penstock.cli.local_chat import (
    LocalChat,
    figures_record,
    kv_line,
    kv_use,
    measured,
    open_engine,
)
from penstock.cli.options import local_limits
from penstock.config import SamplingSettings
from penstock.engine.engine import Engine
from penstock.errors import ModelError, SettingError
from penstock.memory import format_bytes
from penstock.models.loading import load_all
from penstock.models.mlx_lm import render
from penstock.recall import MODEL_PATH

TOLD = (
    "The code of the amber falcon is 4821.",
    "My sister has a small dog.",
    "Remember that the colour of the quiet dolphin is turquoise.",
)
ASK = "What is the code of the amber falcon?"
GREEDY = SamplingSettings(max_tokens=24)
MODEL = str(MODEL_PATH)

Talk = Callable[..., LocalChat]


@pytest.fixture
def talk() -> Iterator[Talk]:
    """Open chats, and close them at the end."""
    opened: list[LocalChat] = []

    def open_chat(system: str | None = None, **limits: Any) -> LocalChat:
        opened.append(LocalChat(open_engine(MODEL, "auto", local_limits(MODEL, limits)), system))
        return opened[-1]

    yield open_chat
    for chat in opened:
        chat.close()


def ask(chat: LocalChat, text: str) -> str:
    return "".join(chat.answer(text, GREEDY))


def figures(chat: LocalChat) -> AnswerFigures:
    assert chat.last is not None
    return chat.last


def test_chat_remembers_facts(talk: Talk) -> None:
    chat = talk()
    for text in TOLD:
        ask(chat, text)
    assert ask(chat, ASK) == "4821."
    assert ask(chat, "What is the colour of the quiet dolphin?") == "turquoise."


@pytest.mark.parametrize("codec", ["k8v4", "auto3.5x"])
def test_chat_remembers_facts_with_quantized_kv(talk: Talk, codec: str) -> None:
    plain = talk()
    coded = talk(kv_cache_quantization=codec, kv_cache_min_quantize_tokens=0)
    for chat in (plain, coded):
        for text in TOLD * 6:
            ask(chat, text)
        assert ask(chat, ASK) == "4821."
    whole, fewer = kv_use(plain.engine), kv_use(coded.engine)
    assert fewer["nbytes"] / fewer["tokens"] < 0.7 * whole["nbytes"] / whole["tokens"]


def test_answer_is_quantized_during_generation(talk: Talk) -> None:
    """The codec has to bound memory during long answers too."""
    bytes_of = []
    for limits in ({}, {"kv_cache_quantization": "4", "kv_cache_min_quantize_tokens": 0}):
        chat = talk(**limits)
        with chat.engine.generate(TOLD[0], stream=True, ignore_eos=True, max_tokens=600) as answer:
            for _ in answer:
                if len(answer.handle.choices[0].tokens) > 400:
                    break
            bytes_of.append(chat.engine.stats().by_kind["nodes"])
    whole, coded = bytes_of
    assert 0 < coded < 0.5 * whole


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"kv_cache_quantization": "4g128"}, "4g128 uses groups of 128 values"),
        ({"kv_cache_quantization": "q4"}, "'q4' is not a codec"),
        ({"max_kv_size": 64, "keep": 64}, "leaves no room in a window"),
        ({"memory_limit": 9_000_000}, r"9\.00 MB is too small"),
    ],
)
def test_incompatible_settings_are_refused(talk: Talk, limits: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        talk(**limits)


def test_turn_prefills_only_new_tokens(talk: Talk) -> None:
    chat = talk("You are a helpful assistant.")
    before = 0
    for text in TOLD:
        ask(chat, text)
        assert figures(chat).cached_tokens >= before - 1, "the end of an answer is not computed"
        assert figures(chat).prompt_tokens > before
        before = figures(chat).prompt_tokens + figures(chat).completion_tokens


def test_answers_match_fresh_engine(talk: Talk) -> None:
    chat, fresh = talk(), talk()
    for text in (*TOLD, ASK):
        said = [*chat.messages, {"role": "user", "content": text}]
        fresh.engine.clear()
        assert ask(chat, text) == fresh.engine.chat(said, max_tokens=GREEDY.max_tokens)


def test_reset_keeps_only_system_prompt(talk: Talk) -> None:
    chat = talk("Be brief.")
    ask(chat, TOLD[0])
    assert kv_use(chat.engine)["tokens"] > 0
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert kv_use(chat.engine) == {"tokens": 0, "nbytes": 0}
    assert kv_line(chat.engine) == chat.stats() == "KV 0 tokens in 0 B"
    assert ask(chat, ASK) != "4821."


def test_chat_works_with_template_that_rewrites_history() -> None:
    """The rendered history does not start with the tokens of earlier turns."""
    loaded = load_all(MODEL_PATH)
    first = "{{ '<|start|><|system|> ' + messages | length | string + '<|end|>' }}"
    text = loaded.tokenizer.chat_template.replace("{{ '<|start|>' }}", "")
    loaded.tokenizer.chat_template = first + text
    with Engine(loaded.model, loaded.tokenizer, memory_limit="200MB") as engine:
        chat = LocalChat(engine)
        for line in (*TOLD, *TOLD):
            ask(chat, line)
            assert figures(chat).cached_tokens <= 3  # only what stands before the count is shared
        assert ask(chat, ASK) == "4821."


def test_interrupted_turn_is_removed_from_history(talk: Talk) -> None:
    chat = talk()
    ask(chat, TOLD[0])
    said = list(chat.messages)
    turn = chat.answer(TOLD[1], GREEDY)
    next(turn)
    turn.close()
    assert chat.messages == said
    assert ask(chat, ASK) == "4821."


def test_window_bounds_cached_kv(talk: Talk) -> None:
    chat = talk(max_kv_size=32, keep=4)
    for text in TOLD * 4:
        ask(chat, text)
    # One window, and the blocks at its ends that are not whole.
    assert kv_use(chat.engine)["nbytes"] <= 3 * 32 * 2_048
    assert figures(chat).prompt_tokens > 100


@pytest.mark.parametrize("window", [2, 16, 33, 200])
def test_chat_works_with_small_window(talk: Talk, window: int) -> None:
    chat = talk(max_kv_size=window)
    for text in (*TOLD, "Again. " * 60):
        ask(chat, text)
        assert figures(chat).completion_tokens > 0


def test_same_seed_gives_same_answer(talk: Talk) -> None:
    chat = talk()

    def sampled(seed: int) -> str:
        sampling = SamplingSettings(max_tokens=12, temperature=100.0, seed=seed)
        return "".join(chat.answer("Hello!", sampling))

    first = sampled(1)
    chat.reset()
    assert sampled(1) == first
    chat.reset()
    assert sampled(2) != first


def test_printed_figures_match_usage(talk: Talk) -> None:
    chat, counted = talk(), AnswerFigures()
    answer = chat.engine.chat(TOLD[0], stream=True)
    assert "".join(measured(answer, counted)) == "Noted."
    assert answer.finish is not None
    usage = answer.finish.usage
    assert (counted.prompt_tokens, counted.completion_tokens) == (
        usage.prompt_tokens,
        usage.completion_tokens,
    )
    assert counted.first_seconds > 0 and counted.seconds > 0
    assert counted.prompt_tokens_per_second == usage.prompt_tokens / counted.first_seconds
    assert counted.tokens_per_second == (usage.completion_tokens - 1) / counted.seconds


def test_missing_chat_template_is_error() -> None:
    tokenizer = load_all(MODEL_PATH).tokenizer
    tokenizer.has_chat_template = False
    with pytest.raises(ModelError, match="no chat template; use penstock generate --raw"):
        render(tokenizer, [{"role": "user", "content": "Hello!"}])


def test_template_refusal_is_error() -> None:
    tokenizer = load_all(MODEL_PATH).tokenizer
    tokenizer.chat_template = "{{ raise_exception('no system prompts') }}"
    with pytest.raises(ModelError, match=r"the chat template refuses the messages: .*no system"):
        render(tokenizer, [{"role": "system", "content": "Be brief."}])


@pytest.mark.parametrize("text", ["What is the code of the quiet dolphin?", "Thank you."])
def test_draft_model_does_not_change_answers(talk: Talk, text: str) -> None:
    """Answers end inside proposals, and the next turn continues from there."""
    lines = ["The code of the quiet dolphin is 7315.", text, "The code of the red owl is 9.", text]
    plain, drafted = talk(), talk(draft_model=MODEL)
    for line in lines:
        assert ask(plain, line) == ask(drafted, line)
    assert drafted.engine.stats().drafted_tokens > 0


def test_peak_memory_includes_what_mlx_does_not_hold(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = talk()
    ask(chat, TOLD[0])
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 1_000)
    stats = chat.engine.stats()
    assert stats.used_bytes > stats.by_kind["weights"] > 1_000
    assert f"peak memory {format_bytes(stats.used_bytes)};" in chat.stats()
    record = figures_record("", "stop", figures(chat), chat.engine)
    assert record["peak_memory_bytes"] == stats.used_bytes
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 10**12)
    assert "peak memory 1.00 TB;" in chat.stats()
