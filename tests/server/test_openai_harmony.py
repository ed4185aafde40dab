"""Harmony is parsed as `openai-harmony` does: channel, recipient and content.

The library is looked for in this environment, or behind PENSTOCK_HARMONY, the Python of another
one. Its vocabulary lies in TIKTOKEN_ENCODINGS_BASE or TIKTOKEN_RS_CACHE_DIR, or is fetched once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from parsed_answers import halves, parse, read
from written_answers import NAMES, form_of

PYTHON = os.environ.get("PENSTOCK_HARMONY") or (
    sys.executable if find_spec("openai_harmony") else ""
)
SCRIPT = Path(__file__).parents[1] / "support" / "harmony_reference.py"
ANSWERS = 200
Said = tuple[str, str, list[tuple[str, Any]]]
"""Reasoning, text and calls of an answer."""


def said_by(messages: list[list[str]]) -> Said | None:
    """Return the client's view of messages; None if a call is incomplete."""
    reasoning, said, calls = "", "", list[tuple[str, Any]]()
    for channel, recipient, content in messages:
        name = recipient.removeprefix("functions.")
        if name in NAMES:
            try:
                calls.append((name, json.loads(content)))
            except ValueError:
                return None
        elif channel == "analysis":
            reasoning += content
        else:
            said += content
    return reasoning, said, calls


def heard_in(pieces: list[str]) -> Said:
    heard = read(parse(pieces, form_of("harmony")))
    return heard.reasoning, heard.said, heard.calls


@pytest.mark.skipif(not PYTHON, reason="openai-harmony is not installed; see PENSTOCK_HARMONY")
def test_harmony_parsing_matches_openai_harmony() -> None:
    """Whole, cut at any byte, and ended after any token."""
    done = subprocess.run(
        [PYTHON, str(SCRIPT), str(ANSWERS)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    called, ended = 0, 0
    for answer in map(json.loads, done.stdout.splitlines()):
        text, expected = answer["text"], said_by(answer["messages"])
        assert heard_in([text]) == expected, text
        for cut in range(1, len(text.encode())):
            assert heard_in(halves(text, cut)) == expected, (text, cut)
        for end in filter(None, answer["ends"]):
            if (short := said_by(end[1])) is not None:
                assert heard_in([end[0]]) == short, end[0]
                ended += 1
        called += len(expected[2]) if expected is not None else 0
    assert called > ANSWERS // 2 and ended > ANSWERS, "the answers have calls, and many ends"
