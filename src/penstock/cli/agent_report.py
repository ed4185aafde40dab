"""Report on how well a model suits coding agents: its parsers and chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.models.template_renderer import TemplateRenderer
from penstock.server.parsing.formats import answer_format
from penstock.server.templates import TemplateTraits, TraitRow


@dataclass(frozen=True, slots=True)
class AgentReport:
    tool_parser: str
    reasoning_parser: str
    later_system: str
    """Form in which system messages after the first turn are rendered: `system` or
    `system-reminder`."""
    rows: tuple[TraitRow, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> AgentReport:
        form = answer_format(tokenizer)
        with TemplateRenderer() as renderer:
            traits = TemplateTraits.of(tokenizer, renderer)
        later = "system" if traits.later_system else "system-reminder"
        return cls(form.call_name, form.reasoning_name, later, traits.rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "tool_parser": self.tool_parser,
            "reasoning_parser": self.reasoning_parser,
            "later_system": self.later_system,
            "template": {row.what: row.outcome for row in self.rows},
        }

    def add_to(self, rows: list[tuple[str, str]]) -> None:
        rows.append(("calls", f"read by the parser {self.tool_parser}"))
        rows.append(("reasoning", f"read by the parser {self.reasoning_parser}"))
        rows.append(("later system", f"reaches the model as {self.later_system}"))
        rows.append(("template", ""))
        for row in self.rows:
            rows.append((f"  {row.what}", row.outcome))
