"""`Engine.generate` and `Engine.chat`, and their errors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import penstock
from penstock.errors import PenstockError
from penstock.models.mlx_lm import encode, render
from penstock.recall import MODEL_PATH

TELL = "The code of the amber falcon is 4821."
ASK = "What is the code of the amber falcon?"
TALK = [
    {"role": "user", "content": TELL},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": ASK},
]


@pytest.fixture(scope="module")
def engine() -> Iterator[penstock.Engine]:
    """An engine with the embedded model."""
    with penstock.Engine(*penstock.load(MODEL_PATH), memory_limit="200MB") as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return penstock.load(MODEL_PATH)[1]


def test_chat_gives_same_text_whole_and_streamed(engine: penstock.Engine) -> None:
    assert engine.chat(TELL) == "Noted."
    assert engine.chat(TALK) == "4821."
    answer = engine.chat(TALK, stream=True)
    pieces = list(answer)
    assert "".join(pieces) == "4821."
    assert len(pieces) > 1
    assert answer.finish is not None and answer.finish.reason == "stop"


def test_generate_matches_request_with_equal_settings(
    engine: penstock.Engine, tokenizer: Any
) -> None:
    sampling = penstock.Sampling(temperature=50.0, seed=7, top_k=200)
    tokens = tuple(encode(tokenizer, TELL))
    request = penstock.Request(
        prompt=tokens, max_tokens=12, sampling=sampling, goes_on=True, ignore_eos=True
    )
    (choice,) = engine.submit(request).result(60)
    given = {"max_tokens": 12, "temperature": 50.0, "seed": 7, "top_k": 200, "ignore_eos": True}
    assert engine.generate(TELL, **given) == choice.text
    assert engine.generate(TELL, **given | {"seed": 8}) != choice.text


def test_generate_accepts_stop_strings_and_template_arguments(
    engine: penstock.Engine, tokenizer: Any
) -> None:
    assert engine.chat(TALK, stop="2") == engine.chat(TALK, stop=["2", "x"]) == "48"
    assert engine.chat(TALK, max_tokens=1) == "48"
    own = "{{ messages[-1].content }}"
    answer = engine.chat(ASK, template_args={"chat_template": own}, stream=True)
    assert list(answer.handle.request.prompt) == render(
        tokenizer, [{"role": "user", "content": ASK}], chat_template=own
    )
    answer.close()


def left_early(engine: penstock.Engine, leave: Callable[[Any], None]) -> None:
    answer = engine.generate(TELL, stream=True, ignore_eos=True, max_tokens=4_000)
    next(answer)
    handle = answer.handle
    leave(answer)
    del answer
    gc.collect()
    for event in handle:
        last = event
    assert last.reason == "cancelled"  # type: ignore[union-attr]


@pytest.mark.parametrize("leave", [lambda answer: answer.close(), lambda _: None])
def test_abandoned_stream_cancels_answer(
    engine: penstock.Engine, leave: Callable[[Any], None]
) -> None:
    left_early(engine, leave)


WRONG: dict[str, tuple[Callable[[penstock.Engine], Any], str]] = {
    "text in a request": (lambda _: penstock.Request(prompt="hello"), "engine.generate(text)"),
    "a wrong name": (lambda e: e.generate("x", temprature=1), "did you mean temperature?"),
    "several answers": (lambda e: e.generate("x", n=3), "engine.submit"),
    "a number to stop at": (lambda e: e.generate("x", stop=3), "stop 3"),
    "tokens": (lambda e: e.generate([1, 2]), "engine.submit(Request(prompt=...))"),
    "no text": (lambda e: e.generate(""), "the prompt is empty"),
    "text submitted": (lambda e: e.submit("hello"), "engine.generate and engine.chat"),
    "a wrong role": (lambda e: e.chat([{"role": "usr", "content": "x"}]), "mean 'user'?"),
    "an unknown role": (lambda e: e.chat([{"role": "a", "content": "x"}]), "one of system, dev"),
    "no content": (lambda e: e.chat([{"role": "user"}]), "has no content"),
    "texts": (lambda e: e.chat(["x"]), "a message is a dict"),
    "no message": (lambda e: e.chat([]), "messages is empty"),
    "a long answer": (lambda e: e.generate("x", max_tokens=4_000_000), "max_tokens 4,000,000"),
    "a long answer submitted": (
        lambda e: e.submit(penstock.Request(prompt=(1,), max_tokens=4_000_000)),
        "or set it to Request.ENDLESS",
    ),
    "no end": (lambda _: penstock.Request(prompt=(1,), max_tokens=2**40), "max_tokens"),
    "a name for caches": (lambda _: penstock.make_kv_cache("smollm2"), "load('smollm2')"),
    "what load returns": (lambda _: penstock.make_kv_cache((1, 2)), "takes apart"),
    "a name for an engine": (lambda _: penstock.Engine("smollm2"), "load('smollm2')"),
    "a name for the seam": (lambda _: penstock.attach("smollm2"), "load('smollm2')"),
    "no model": (lambda _: penstock.Engine(None), "penstock.load"),
    "a number to load": (lambda _: penstock.load(3), "a .gguf file or a name, not a int"),
    "a size of text": (lambda _: penstock.make_kv_cache(object(), "x"), "must be an integer"),
    "a size below 1": (lambda _: penstock.make_kv_cache(object(), 0), "at least 1"),
    "text explained": (lambda e: e.explain("hello"), "one row of integers"),
    "a wrong setting": (lambda _: penstock.Engine(object(), max_kvsize=3), "mean max_kv_size?"),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_arguments_give_one_line_error_with_remedy(
    engine: penstock.Engine, what: str
) -> None:
    call, remedy = WRONG[what]
    with pytest.raises(PenstockError) as raised:
        call(engine)
    assert isinstance(raised.value, ValueError) or what == "a number to load"
    assert remedy in str(raised.value)
    assert "\n" not in str(raised.value)


def test_max_tokens_may_equal_context_length(engine: penstock.Engine) -> None:
    """The engine's memory may end before; `open`, as the server calls it, takes any number."""
    most = engine.ask(lambda view: view.context_tokens).result()
    assert most is not None
    prompt = tuple(range(1, 9))
    limits = (most, penstock.Request.ENDLESS)
    submitted = [engine.submit(penstock.Request(prompt=prompt, max_tokens=n)) for n in limits]
    opened = engine.open(penstock.Request(prompt=prompt, max_tokens=4_000_000))
    engine.enqueue([opened])
    for handle in (*submitted, opened):
        (choice,) = handle.result()
        assert choice.finish is not None and choice.finish.reason in ("stop", "length")


def test_text_calls_require_tokenizer() -> None:
    model, _ = penstock.load(MODEL_PATH)
    with penstock.Engine(model, memory_limit="200MB") as engine:
        for call in (engine.generate, engine.chat):
            with pytest.raises(penstock.SettingError, match="has no tokenizer"):
                call("x")
