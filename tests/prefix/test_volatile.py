"""Text that changes between prompts is classified; other differences are not."""

from __future__ import annotations

import pytest

from penstock.prefix.volatile import name_volatile


@pytest.mark.parametrize(
    ("held", "given", "kind"),
    [
        ("Date: 2026-11-22.", "Date: 2026-12-01.", "date"),
        ("It is Sunday, November 22, 2026 now", "It is Monday, November 23, 2026 now", "date"),
        ("on 9 Nov 2026, ", "on 10 Nov 2026, ", "date"),
        ("At 2026-11-22T10:00:01Z:", "At 2026-11-22T10:00:09Z:", "date"),
        ("at 10:41 the", "at 9:05 the", "time"),
        ("stamp 1795400000 x", "stamp 1795400017 x", "time"),
        ("Request 41 of", "Request 42 of", "counter"),
        ("Turn 9.", "Turn 10.", "counter"),
        ("cch=a81f0; rest", "cch=b77e1; rest", "random id"),
        (
            "id 3f2a9c41-0b1d-4e5f-8a9b-0c1d2e3f4a5b",
            "id 9f2a9c41-0b1d-4e5f-8a9b-0c1d2e3f4a5c",
            "random id",
        ),
        ("You have 31,250 tokens left.", "You have 30,990 tokens left.", "remaining tokens"),
        ("Tokens remaining: 900", "Tokens remaining: 850", "remaining tokens"),
    ],
)
def test_changing_value_is_classified(held: str, given: str, kind: str) -> None:
    named = name_volatile(held, given)
    assert named is not None and named.kind == kind
    assert named.held in held and named.given in given and named.held != named.given


@pytest.mark.parametrize(
    ("held", "given"),
    [
        ("a cat sat", "a dog sat"),
        ("same", "same"),
        ("in 1999 he", "in Rome he"),
        ("", "2026-11-22"),
    ],
)
def test_other_differences_are_not_classified(held: str, given: str) -> None:
    assert name_volatile(held, given) is None


def test_value_that_is_prefix_of_other_is_classified() -> None:
    """One text ends where the other continues."""
    assert name_volatile("token 1", "token 12345") == ("counter", "1", "12345")
    assert name_volatile("on 2026-11-22", "on 2026-11-2") == ("date", "2026-11-22", "2026-11-2")
