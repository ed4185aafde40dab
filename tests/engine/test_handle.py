"""Answers while their events arrive: text, tokens, finish."""

from __future__ import annotations

import tracemalloc

from penstock.engine.handle import Choice, Handle
from penstock.engine.request import Event, Finish, Request, Token, Usage

LONG = 4_000_000
END = Finish(0, "stop", " end\r\n", None, Usage(1, 0, 3))


def test_answer_text_joins_text_of_events() -> None:
    handle = Handle(Request(prompt=(1,), max_tokens=4), lambda _: None)
    (choice,) = handle.choices
    events: list[Event] = [Token(0, 5, "a\r"), Token(0, 6, ""), Token(0, 7, "é\n", -0.5), END]
    for event in events:
        handle.post(event)
        assert handle.events() == [event]
    assert (choice.text, choice.tokens) == ("a\ré\n end\r\n", [5, 6, 7])
    assert (choice.logprobs, choice.finish, handle.done) == ([events[2]], END, True)


def test_cost_per_token_is_independent_of_answer_length() -> None:
    """Copying the answer for each token would be quadratic."""
    choice = Choice()
    choice.take(Token(0, 1, "a" * LONG))
    tracemalloc.start()
    try:
        copies = sum(_peak(choice) > LONG // 2 for _ in range(50))
        assert copies <= 2, "the buffer grows by parts of its size"
        whole, _ = tracemalloc.get_traced_memory()
        text = choice.text  # the negative control: asking for it is a copy
        assert tracemalloc.get_traced_memory()[1] - whole >= LONG
    finally:
        tracemalloc.stop()
    assert len(text) == LONG + 50


def _peak(choice: Choice) -> int:
    """Return the peak bytes of appending one more token."""
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    choice.take(Token(0, 1, "b"))
    return tracemalloc.get_traced_memory()[1] - before
