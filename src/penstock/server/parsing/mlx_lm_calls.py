"""Families whose calls mlx-lm reads: between its marks, each text as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.server.parsing.answer_text import AnswerText, Reading, until
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.json_text import arguments_text
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.shapes import CallShape, json_shape

_PROBE = {"name": "probe", "arguments": {"n": 1}}


@dataclass(frozen=True, slots=True)
class MlxLmCalls:
    """Format of a parser of mlx-lm."""

    parse: Callable[[str, Any], Any]
    start: str
    end: str
    """Mark behind each call; models without one write the next start, or nothing."""
    bare: str = ""

    @property
    def openings(self) -> tuple[str, ...]:
        """Its one mark."""
        return (self.start,)

    @property
    def shape(self) -> CallShape | None:
        """Its marks around JSON, if its parser reads that between them."""
        if not self.end:
            return None
        try:
            read = self.parse(json.dumps(_PROBE), None)
        # A boundary: a parser of another way of writing may raise anything.
        except Exception:  # noqa: BLE001
            return None
        return json_shape(self.start, self.end) if read == _PROBE else None

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        """Read the calls between a start and its end."""
        text: list[str] = []
        if self.end:
            yield from until(source, (self.end,), text.append)
        else:
            yield from until(source, (self.start,), text.append, take=False)
        try:
            parsed = self.parse("".join(text), list(tools))
            calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        # A boundary: the text is the model's, and the parsers are mlx-lm's, one a family.
        except Exception as error:
            raise BrokenCall("mlx-lm reads no call") from error
        for name, id, arguments in calls:
            out.start(name, id)
            out.arguments(arguments)
            out.end()


def _call(parsed: Any) -> tuple[str, str | None, str]:
    name, id = parsed["name"], parsed.get("id")
    if not isinstance(name, str) or not name:
        raise BrokenCall("a call without a name")
    return name, str(id) if id else None, arguments_text(parsed.get("arguments"))
