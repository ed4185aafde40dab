"""JSON calls between marks, the format of most model families."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import AnswerText, Reading
from penstock.server.parsing.events import Events
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.shapes import CallShape


@dataclass(frozen=True, slots=True)
class TaggedJson:
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    lists: tuple[str, ...] = ()
    """Openings that include a list's bracket."""
    bare: str = ""
    shape: CallShape | None = None

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        if opening in self.lists:
            yield from json_text.listed(source, out)
        else:
            yield from json_text.calls(source, out, closings=self.closings)
