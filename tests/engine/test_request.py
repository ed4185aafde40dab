"""Request validation and its error messages."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.request import Finish, Request, Sampling, Token, Usage
from penstock.errors import PenstockError, SettingError


def test_default_sampling_is_greedy_and_plain() -> None:
    request = Request(prompt=(1, 2))
    assert request.sampling.greedy
    assert request.sampling.plain
    assert request.model_dump() == {
        "prompt": (1, 2),
        "spans": (),
        "max_tokens": 512,
        "goes_on": False,
        "sampling": {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": None,
            "repetition_context": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "seed": None,
            "logprobs": False,
            "top_logprobs": 0,
        },
        "adapter": None,
        "client": "",
        "group": "",
        "stop": (),
        "stop_tokens": (),
        "keep_stop": False,
        "min_tokens": 0,
        "silent_tokens": frozenset(),
        "ignore_eos": False,
        "n": 1,
        "priority": 0,
        "timeout_seconds": None,
        "salt": "",
        "cache_prompt": True,
        "grammar": None,
        "reasoning": None,
        "prompt_logprobs": None,
        "logprobs_from": 0,
        "candidates": (),
        "embeds": False,
        "prediction": (),
        "hold_seconds": 0.0,
        "hold_tokens": None,
    }


def test_minimum_and_maximum_values_are_accepted() -> None:
    least = Request(prompt=(0,), max_tokens=1, n=1, timeout_seconds=1e-3, stop=("x",))
    assert (least.prompt, least.max_tokens) == ((0,), 1)
    assert Request(prompt=(0,), n=128, priority=-3).priority == -3
    assert Sampling(logprobs=True, top_logprobs=20).top_logprobs == 20
    with pytest.raises(SettingError, match=r"^top_logprobs 21: "):
        Sampling(logprobs=True, top_logprobs=21)


def test_lists_and_dicts_are_converted() -> None:
    request = Request(prompt=[1, 2], stop=["x"], sampling={"logit_bias": {"7": 1}})  # type: ignore
    assert (request.prompt, request.stop) == ((1, 2), ("x",))
    assert request.sampling == Sampling(logit_bias={7: 1.0})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt": []}, "prompt []: Tuple should have at least 1 item"),
        ({}, "prompt is missing"),
        ({"prompt": "text"}, "prompt 'text': a request takes tokens, not text"),
        ({"prompt": [3, -1]}, "prompt.1 -1: Input should be greater than or equal to 0"),
        ({"prompt": [1], "max_tokens": -1}, "max_tokens -1: "),
        ({"prompt": [1], "min_tokens": -1}, "min_tokens -1: "),
        ({"prompt": [1], "n": 0}, "n 0: "),
        ({"prompt": [1], "n": 129}, "n 129: "),
        ({"prompt": [1], "stop": "end"}, "stop 'end': Input should be a valid tuple"),
        ({"prompt": [1], "stop": ["a", ""]}, "stop.1 '': "),
        ({"prompt": [1], "stop_tokens": [-5]}, "stop_tokens.0 -5: "),
        ({"prompt": [1], "timeout_seconds": 0}, "timeout_seconds 0: "),
        ({"prompt": [1], "timeout_seconds": float("inf")}, "timeout_seconds inf: "),
        ({"prompt": [1], "temprature": 1}, "temprature is not a setting of a request"),
        ({"prompt": [1], "sampling": {"top_p": 7}}, "sampling.top_p 7: "),
        ({"prompt": [1], "sampling": {"top_logprobs": 2}}, "sampling.top_logprobs 2 needs "),
    ],
)
def test_invalid_request_gives_one_line_error(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError) as caught:
        Request(**values)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("name", "bad", "edge"),
    [
        ("temperature", [-0.1, float("nan"), float("inf")], [0.0, 5.0]),
        ("top_p", [0.0, 1.01, float("nan")], [1e-6, 1.0]),
        ("top_k", [-1, 1.5], [0, 10**6]),
        ("min_p", [-0.1, 1.1], [0.0, 1.0]),
        ("repetition_penalty", [0.0, -1.0, 5e-324, float("inf")], [0.5, 1.0, None]),
        ("repetition_context", [0], [1, None]),
        ("presence_penalty", [float("nan"), float("inf")], [-2.0, 2.0]),
        ("frequency_penalty", [float("nan"), 1e31], [-2.0, 2.0]),
        ("logit_bias", [{-1: 0.0}, {1: float("inf")}, {1: 1e31}], [{0: -100.0}]),
        ("seed", [-(2**63) - 1, 2**64], [-(2**63), 0, 2**64 - 1]),
        ("top_logprobs", [-1], [0]),
    ],
)
def test_sampling_values_outside_bounds_are_refused(
    name: str, bad: list[Any], edge: list[Any]
) -> None:
    for value in bad:
        with pytest.raises(SettingError, match=f"^{name}"):
            Sampling(**{name: value})
    for value in edge:
        assert getattr(Sampling(**{name: value}), name) == value


def test_error_for_long_value_is_short() -> None:
    with pytest.raises(SettingError) as caught:
        Request(prompt=dict.fromkeys(range(100_000), 1))  # type: ignore
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.5},
        {"temperature": 1e-5},
        {"logprobs": True},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
    ],
)
def test_sampling_that_changes_or_scores_logits_is_not_plain(changed: dict[str, Any]) -> None:
    assert not Sampling(**changed).plain


@pytest.mark.parametrize(
    "unchanged",
    [{"temperature": 1e-9}, {"top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"repetition_penalty": 1.0}],
)
def test_neutral_sampling_values_are_plain(unchanged: dict[str, Any]) -> None:
    """Filters never remove the likeliest token, and a temperature of 1 changes nothing."""
    assert Sampling(**unchanged).plain


def test_missing_seed_is_drawn_once_per_request() -> None:
    drawn = [Sampling(temperature=1.0).with_seed() for _ in range(8)]
    assert len({sampling.seed for sampling in drawn}) == 8
    assert drawn[0].temperature == 1.0
    assert drawn[0].with_seed() is drawn[0]
    assert Sampling(seed=0).with_seed().seed == 0


def test_settings_and_events_are_frozen() -> None:
    usage = Usage(3, 2, 1)
    for thing, name in (
        (Request(prompt=(1,)), "n"),
        (Sampling(), "seed"),
        (Token(0, 5, "x"), "text"),
        (usage, "prompt_tokens"),
        (Finish(0, "error", "", None, usage, PenstockError("why")), "reason"),
    ):
        with pytest.raises((AttributeError, ValueError)):
            setattr(thing, name, 1)
