"""Write the text of every --help into the pages of commands, and other programs' flags beside ours.

    python tools/write_cli_docs.py

A marker is a line `<!-- help: generate -->`; the fenced block after it is replaced. An option that
an earlier block of the page shows in the same words is named, not repeated. The tables of names
stand between two markers. `tests/test_docs.py` fails where page and program differ.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
from pathlib import Path

from penstock.cli import main
from penstock.cli.foreign_names import (
    FOREIGN_FLAGS,
    FOREIGN_VALUES,
    FOREIGN_VARIABLES,
    VLLM,
    VLLM_MLX,
    ForeignFlag,
)

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "docs" / "cli.md", ROOT / "benchmarks" / "notes" / "commands.md")
NAMES_PAGE = ROOT / "docs" / "migrate.md"
NAMES = re.compile(r"(<!-- names -->\n).*?(<!-- end of names -->)", re.DOTALL)
MARKED = re.compile(r"(<!-- help:(?P<command>[^>]*)-->\n)(```text\n.*?^```\n)?", re.DOTALL | re.M)

FOREIGN_CONSTANTS = (
    ("`OLLAMA_HOST`", "Ollama", "`--host`, `--port`"),
    ("`OLLAMA_MODELS`", "Ollama", "`HF_HOME`: models come from the hub"),
    ("`OLLAMA_KEEP_ALIVE`", "Ollama", "not needed: the model stays loaded; `penstock service`"),
    ("`OLLAMA_NUM_PARALLEL`", "Ollama", "`--max-batch-size`; contexts are not divided by it"),
    ("`OLLAMA_MAX_QUEUE`", "Ollama", "`--max-queue`"),
    ("`OLLAMA_CONTEXT_LENGTH`, `num_ctx`", "Ollama", "`--max-kv-size`; by default the model's own"),
    ("`OLLAMA_KV_CACHE_TYPE`", "Ollama", "`--kv-cache-quantization 8` (for q8_0) or 4 (for q4_0)"),
    ("`OLLAMA_FLASH_ATTENTION`", "Ollama", "not needed: `--kernels auto` takes the quickest way"),
    ("`OLLAMA_ORIGINS`", "Ollama", "`--cors-origin`"),
    ("`OLLAMA_GPU_OVERHEAD`", "Ollama", "`--memory-limit`: one limit for weights and caches"),
    ("`hot_cache_only`", "oMLX", "`--hot-cache-only`"),
    ("`hot_cache_max_size`", "oMLX", "`--memory-limit`: one limit for weights and caches"),
    ("`ssd_cache_dir`", "oMLX", "`--ssd-cache-dir`"),
    ("`MAX_KV_SIZE`", "exo", "`--max-kv-size`; a constant of exo's source, 3,200 tokens"),
    ("`KEEP_KV_SIZE`", "exo", "`--keep-kv-size`; a constant of exo's source, 1,600 tokens"),
    ("`TinyKvFullCache`", "Tiny-LLM", "`penstock.KVCache`"),
    ("`BatchingKvCache`", "Tiny-LLM", "`penstock.KVCacheManager`, or the engine"),
    ("`max_active_requests`", "Tiny-LLM", "`max_batch_size`"),
    ("`max_seq_len`", "Tiny-LLM", "`max_kv_size`"),
    ("`rewind`", "Tiny-LLM", "`trim`"),
    ("`prefill_step`", "Tiny-LLM", "`prefill_chunk`"),
    ("`page_size`, page", "Tiny-LLM", "`block_size`, block"),
)
"""Names in other programs' source code, with their counterparts here."""


def help_text(command: str) -> str:
    """Return the output of `penstock COMMAND --help` on a terminal of 80 columns."""
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            main([*command.split(), "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width
    return printed.getvalue()


def entries(panel: str) -> list[str]:
    """Return the options of a panel of a help text, with their descriptions."""
    return re.findall(r"^  -.*\n(?:   .*\n)*", panel, re.MULTILINE)


def without_repeats(text: str, command: str, shown: dict[str, str]) -> str:
    """Return a help text that only names the options of `shown`, and add its others to them.

    Args:
        text: The output of `--help`.
        command: Its command.
        shown: Options of earlier commands without blanks, each with its command.
    """
    panels = []
    for panel in text.split("\n\n"):
        repeated: dict[str, list[str]] = {}
        for entry in entries(panel + "\n"):
            words = "".join(entry.split())
            name = entry.split()[0].rstrip(",")
            if name in ("--json", "-h") or shown.setdefault(words, command) == command:
                continue
            panel = (panel + "\n").replace(entry, "", 1).rstrip("\n")
            repeated.setdefault(shown[words], []).append(name)
        lines = [f"As for {first}: {', '.join(names)}" for first, names in repeated.items()]
        wrap = textwrap.TextWrapper(
            78, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
        panels.append("\n".join([panel, *map(wrap.fill, lines)]))
    return "\n\n".join(panels).rstrip("\n") + "\n"


def written(page: str) -> str:
    """Return the page with the block below each marker brought up to date."""
    shown: dict[str, str] = {}

    def block(marker: re.Match[str]) -> str:
        text = help_text(marker["command"])
        command = marker["command"].strip()
        return f"{marker[1]}```text\n{without_repeats(text, command, shown)}```\n"

    return MARKED.sub(block, page)


def flag_row(flag: ForeignFlag) -> str:
    """Return the row of a flag."""
    names = ", ".join(f"`{name}`" for name in flag.names)
    here = flag.ours.format("...")
    here = f"`{here}`" if flag.meaning == "same" else here
    taken = "yes"
    if flag.meaning == "other":
        taken = f"only {', '.join(flag.harmless)}" if flag.harmless else "no: an error"
    return f"| {names} | {', '.join(flag.programs)} | {here} | {taken} |"


def foreign_table() -> str:
    """Return the tables of other programs' flags and constants."""
    lines = [
        "| flag | of | here | taken |",
        "|---|---|---|---|",
        *(flag_row(flag) for flag in FOREIGN_FLAGS),
        *(
            f"| `{flag} {theirs}` | {VLLM}, {VLLM_MLX} | `{flag} {ours}` | yes |"
            for flag, values in FOREIGN_VALUES.items()
            for theirs, ours in values.items()
        ),
        "",
        "| name | of | here |",
        "|---|---|---|",
        *(
            f"| `{name}` | {program} | `{ours}`, taken with one line |"
            for ours, (name, program) in FOREIGN_VARIABLES.items()
        ),
        *(f"| {name} | {program} | {here} |" for name, program, here in FOREIGN_CONSTANTS),
    ]
    return "\n".join(lines) + "\n"


def with_names(page: str) -> str:
    """Return the page with the tables of other programs' names brought up to date."""
    return NAMES.sub(lambda found: f"{found[1]}\n{foreign_table()}\n{found[2]}", page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
    NAMES_PAGE.write_text(with_names(NAMES_PAGE.read_text()))
