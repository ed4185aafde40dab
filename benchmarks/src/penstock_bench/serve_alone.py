"""Engine without a server.

    python -m penstock_bench.serve_alone FOLDER JSON

The JSON has codec settings.

Each line of standard input is a batch, `{"prompts": [[token, ...], ...], "max_tokens": n}`. Each
line of standard output has the seconds of a batch. Exits at the end of input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from penstock.engine.engine import Engine
from penstock.engine.request import Request
from penstock.models.loading import load


def main(folder: str, codec_settings: dict[str, Any]) -> None:
    """Run batches until the end of input."""
    with Engine(*load(folder), **codec_settings) as engine:
        run(engine, [[1, 2, 3]], 4)  # the first step of all pays for what the others find
        for line in sys.stdin:
            batch = json.loads(line)
            print(json.dumps(run(engine, batch["prompts"], batch["max_tokens"])), flush=True)


def run(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    """Submit all prompts and wait for the answers; return `seconds` and `tokens`."""
    began = time.perf_counter()
    handles = [
        engine.submit(Request(prompt=tuple(prompt), max_tokens=max_tokens)) for prompt in prompts
    ]
    answers = [choice for handle in handles for choice in handle.result()]
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": sum(len(choice.tokens) for choice in answers)}


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
