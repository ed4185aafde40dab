"""`penstock bench decide` in a short form."""

from __future__ import annotations

from penstock.recall import MODEL_PATH
from penstock_bench.decide import DecideLoad, measure


def test_questions_are_asked_by_both_interfaces() -> None:
    """In the embedded model's words Yes and No are several tokens, so that none is compared."""
    rounds: list[int] = []
    load = DecideLoad(str(MODEL_PATH), questions=6, chats=4, state_tokens=60, rounds=2)
    report = measure(load, lambda _, number, __: rounds.append(number))
    assert rounds == [0, 1]
    assert report.raw["rounds"]["compared"] == 0
    assert all(len(report.raw["rounds"][side]) == 2 for side in ("decided", "asked"))
    assert report.ratio["questions_per_second"] == (
        report.penstock["questions_per_second"] / report.rival_figures["questions_per_second"]
    )
