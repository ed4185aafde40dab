"""Calls as JSON between marks, the form of most families."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import AnswerText, Reading
from penstock.server.parsing.events import Events
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.shapes import CallShape


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """Format of calls that are JSON between marks: an object, or a list of objects."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    lists: tuple[str, ...] = ()
    """Openings that end with a list's bracket."""
    bare: str = ""
    shape: CallShape | None = None

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        """Read the calls behind a mark, and the mark that closes them, if it is there."""
        if opening in self.lists:
            yield from json_text.listed(source, out)
        else:
            yield from json_text.calls(source, out, closings=self.closings)
