"""Run real chat templates through the probe: which parsers they need, and how they behave.

    python tests/peers/real_templates.py FOLDER...

A folder is searched for files that end with `.jinja`. None of them is part of this project. Exit
code 0: whatever a template does with later system messages, what `fit` makes of a conversation is
rendered with every message in its place, where the template renders it without them. 1: not so.
2: there are fewer than 40 templates. Calls that a template writes into history are read back equal,
or are text (`real_calls.py`). Conversations of three turns show what history does to the tokens of
earlier turns (`real_histories.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load
from real_calls import round_trips
from real_histories import Outcome, histories
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from penstock.cli.agent_report import AgentReport
from penstock.models.template_renderer import TemplateRenderer
from penstock.server.history import fit
from penstock.server.templates import LATER, LATER_SYSTEMS, TemplateTraits, talk_of

RENDERER = TemplateRenderer()
LEAST = 40
MARKS = ("<think>", "</think>")


def tokenizer(template: str, folder: Path) -> Any:
    """Make a tokenizer of a handful of tokens that has this template, loaded as mlx-lm does."""
    vocabulary = {token: number for number, token in enumerate(("<unk>", "<s>", "</s>"))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.add_tokens([mark for mark in MARKS if mark in template])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return load(folder)


def places(made: Any, talk: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[int]:
    """Return where texts are rendered; raises the template's errors."""
    rendered = made.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    return [rendered.find(text) for text in texts]


def misplaced(made: Any) -> dict[str, str]:
    """List conversations with later system messages that are not rendered in place.

    Those that the template does not render without the later message are none of them.
    """
    traits, wrong = TemplateTraits.of(made, RENDERER), {}
    for what, texts in LATER_SYSTEMS:
        without = [text for text in texts if text != LATER]
        try:
            control = places(made, fit(traits, talk_of(*without)).messages, without)
        except Exception as error:  # noqa: BLE001 - a template raises anything
            wrong[what] = f"cannot be rendered at all: {error}"
            continue
        if min(control) < 0:  # as by those that take nothing but lists of parts, for images
            wrong[what] = f"cannot be rendered at all: texts at {control}"
            continue
        first_moves = control != sorted(control)  # to the last turn, as Mistral Nemo's does
        wanted = texts[1:] if first_moves else texts
        try:
            seen = places(made, fit(traits, talk_of(*texts)).messages, wanted)
        except Exception as error:  # noqa: BLE001 - as above
            wrong[what] = f"raises {error}"
            continue
        if min(seen) < 0 or seen != sorted(seen):
            wrong[what] = f"is rendered at {seen}"
    return wrong


def outcome(text: str) -> str:
    """Return an outcome without template-specific details."""
    return "raises" if text.startswith("raises") else re.sub(r"message \d+", "a message", text)


def run(files: list[Path]) -> dict[str, Any]:
    """Probe templates; return the table, its counts, and what `fit` does not repair."""
    table, wrong, turns, calls = {}, {}, {}, {}
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            text = file.read_text(encoding="utf-8")
            made = tokenizer(text, Path(folder))
            turns[file.stem] = histories(text, Path(folder))
            calls[file.stem] = round_trips(made)
        table[file.stem] = AgentReport.of(made).as_json()
        if faults := misplaced(made):
            wrong[file.stem] = faults
    counts: dict[str, Counter[str]] = {}
    for report in table.values():
        for what in ("tool_parser", "reasoning_parser", "later_system"):
            counts.setdefault(what, Counter())[report[what]] += 1
        for what, text in report["template"].items():
            counts.setdefault(what, Counter())[outcome(text)] += 1
    for name, outcomes in turns.items():
        for what, found in outcomes.items():
            counts.setdefault(f"three turns: {what}", Counter())[kind_of(found)] += 1
            table[name].setdefault("histories", {})[what] = told(found)
    return {
        "templates": len(files),
        "counts": counts,
        "table": table,
        "not_rendered": wrong,
        "calls": calls,
    }


def kind_of(found: Outcome | str) -> str:
    """Return the outcome of a conversation without template-specific details."""
    if isinstance(found, str):
        return "not held"
    if found.silent:
        return "something in front of an answer changes"
    return "an answer is rewritten, as explain says" if found.said else "new tokens alone"


def reasons(table: Mapping[str, Any]) -> list[str]:
    """Return why conversations failed, or recompute more than their new tokens."""
    lines = list[str]()
    for name, report in table.items():
        for what, found in report["histories"].items():
            if isinstance(found, str):
                lines.append(f"{name}: {what} of three turns {found}")
                continue
            why = [*found["said"], *(f"no reason is known at {turn}" for turn in found["silent"])]
            lines += [f"{name}: {what} of three turns: {why[0]}"] if why else []
    return lines


def told(found: Outcome | str) -> Any:
    """Return the outcome of a conversation as JSON."""
    return found if isinstance(found, str) else asdict(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    args = parser.parse_args()
    files = sorted(file for folder in args.folders for file in folder.rglob("*.jinja"))
    if len(files) < LEAST:
        print(f"{len(files)} templates; at least {LEAST} are wanted", file=sys.stderr)
        return 2
    result = run(files)
    faults = [
        f"{name}: {what} {fault}"
        for name, talks in result["not_rendered"].items()
        for what, fault in talks.items()
    ]
    moved = [fault for fault in faults if "cannot be rendered at all" not in fault]
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
        return 1 if moved else 0
    print(f"{result['templates']} chat templates")
    for what, counted in result["counts"].items():
        print(f"  {what:33}" + ", ".join(f"{text} {n}" for text, n in counted.most_common()))
    for fault in [*faults, *reasons(result["table"])]:
        print(fault)
    read: Counter[str] = sum(result["calls"].values(), Counter())
    misread = [
        f"{name}: {what}"
        for name, outcomes in result["calls"].items()
        for what in outcomes
        if what.startswith("WRONG")
    ]
    drawn = {what: count for what, count in read.items() if not what.startswith("WRONG")}
    print(f"calls: {', '.join(f'{what} {count}' for what, count in drawn.items())}")
    for fault in misread:
        print(fault)
    moved = [*moved, *misread]
    print("not ok" if moved else "ok: each message is in its place, each call is read as written")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
