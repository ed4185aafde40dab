"""Report on a model for coding agents: its parsers and its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.server.parsing import answer_format
from penstock.server.templates import TemplateTraits, TraitRow


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Parsers of a model's answers, and effects of its chat template on conversations."""

    tool_parser: str
    reasoning_parser: str
    later_system: str
    """Form in which a later system message reaches the model: `system`, or `system-reminder`."""
    rows: tuple[TraitRow, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> AgentReport:
        """Probe mlx-lm's wrapper of a model's tokenizer."""
        form, traits = answer_format(tokenizer), TemplateTraits.of(tokenizer)
        later = "system" if traits.later_system else "system-reminder"
        return cls(form.call_name, form.reasoning_name, later, traits.rows)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return {
            "tool_parser": self.tool_parser,
            "reasoning_parser": self.reasoning_parser,
            "later_system": self.later_system,
            "template": {row.what: row.outcome for row in self.rows},
        }

    def add_to(self, table: Table) -> None:
        """Add the report to a table of two columns."""
        table.add_row("calls", f"read by the parser {self.tool_parser}")
        table.add_row("reasoning", f"read by the parser {self.reasoning_parser}")
        table.add_row("later system", f"reaches the model as {self.later_system}")
        table.add_row("template", "")
        for row in self.rows:
            table.add_row(f"  {row.what}", Text(row.outcome))
