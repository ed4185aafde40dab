"""Requests sent by every client, and the report of their outcome.

A script imports what it needs from here and ends with `report(...)`, which runs its steps and
writes one line of JSON for each.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

URL = os.environ["CLIENTS_URL"]
"""Server of the embedded model."""
SCRIPTED_URL = os.environ["CLIENTS_SCRIPTED_URL"]
"""Server of a model that follows a script: it calls `look_up`, and then says `SAID`."""
KEY, MODEL = "made-up", "recall"

CODE = "4821"
QUESTION = f"The code of the amber falcon is {CODE}. What is the code of the amber falcon?"
TASK = "What is the code of the falcon? (task 1)"
SAID = "The code of the falcon is 4821."
DESCRIPTION = "Return the code of a thing."
PARAMETERS = {
    "type": "object",
    "properties": {"thing": {"type": "string", "enum": ["falcon", "dolphin"]}},
    "required": ["thing"],
    "additionalProperties": False,
}
"""Schema of the tool `look_up`."""


class Animal(BaseModel):
    """An animal that was seen."""

    name: Literal["falcon", "dolphin"]
    wild: bool
    size: Literal["small", "large"]


def look_up(thing: str) -> str:
    """Return the code of a thing.

    Args:
        thing: the thing.
    """
    assert thing == "falcon", f"asked for {thing!r}"
    CALLED.append(thing)
    return CODE


CALLED: list[str] = []
"""Arguments with which `look_up` was called in this step."""


def was_called() -> None:
    """Check that the tool was called exactly once."""
    assert CALLED == ["falcon"], f"look_up was called with {CALLED}"


def user(text: str) -> dict[str, Any]:
    """Return a user's message."""
    return {"role": "user", "content": text}


def report(**steps: Callable[[], None]) -> None:
    """Run the steps and print each outcome; errors go to standard error."""
    for name, step in steps.items():
        CALLED.clear()
        error = None
        try:
            step()
        except Exception as raised:  # noqa: BLE001 - whatever a client raises is its outcome
            error = f"{type(raised).__name__}: {raised}"
            traceback.print_exc()
        print(json.dumps({"step": name, "error": error}), flush=True)
    sys.exit(0)
