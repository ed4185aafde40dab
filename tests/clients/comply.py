"""`llm-comply`: schemas and rules of three APIs, checked by an external program."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

PACKAGE = "llm-comply"
FORMATS = ("openai-chat", "open-responses", "anthropic")
CANNOT = {
    **dict.fromkeys(("chat-image-input", "image-input", "anth-image-input"), "text alone is read"),
    **dict.fromkeys(("chat-error-handling", "error-handling"), "the model need not be named"),
}
"""Tests that may fail, and why."""
ANTHROPIC = ("--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01")
SECONDS = 600


def complied(folder: Path, url: str, form: str) -> list[str]:
    """Run the tests of an API, print the results, and return unexpected failures."""
    command = [
        *(str(folder / "bin" / PACKAGE), "-u", f"{url}/v1", "-k", "made-up", "-m", "recall"),
        *("--format", form, "--json", *(ANTHROPIC if form == "anthropic" else ())),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    try:
        results = json.loads(done.stdout)["results"]
    except ValueError:
        return [f"{PACKAGE} {form}: {(done.stdout + done.stderr).strip()[-500:]}"]
    wrong = []
    for result in results:
        name, status = result["id"], result["status"]
        reasons = "; ".join([*result.get("errors", ()), *result.get("warnings", ())])
        why = CANNOT.get(name, reasons) if status == "failed" else reasons
        print(f"{form:<16}{name:<32}{status:<8} {why[:300]}", flush=True)
        if status == "failed" and name not in CANNOT:
            wrong.append(f"{PACKAGE} {form}: {name}: {reasons}")
    return wrong
