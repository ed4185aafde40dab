"""Measure the gaps between tokens of an answer while images are encoded beside it.

    python tools/image_gaps.py [--seconds 20] [--max-stall-ms 200]

A random Qwen2-VL answers a text. Beside it come, one after another: nothing; texts of as many
tokens as an image has; images that were not seen before. The last two differ by the vision tower
alone. Needs the extra `vlm`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import penstock
from penstock.engine.request import Request

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from tiny_image_families import FAMILIES, MROPE, PATCH, TEXT
from tiny_image_models import Pair, picture

WIDTH = 512
SIDE = 32 * PATCH
"""Width and height of an image: 1,024 patches, which become 256 tokens."""
FAMILY = "qwen2_vl"
LEAST = 20
"""Minimum number of gaps."""
CONFIG = {
    **TEXT,
    **MROPE,
    "hidden_size": WIDTH,
    "num_hidden_layers": 8,
    "intermediate_size": 3 * WIDTH,
    "num_attention_heads": 8,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "vision_config": {"depth": 12, "embed_dim": 384, "hidden_size": WIDTH, "num_heads": 6},
}


@contextmanager
def beside(load: Callable[[int], None]) -> Iterator[None]:
    """Call `load` with 0, 1, ... on a thread of its own, one call after another."""
    ends = threading.Event()

    def calls() -> None:
        number = 0
        while not ends.is_set():
            load(number)
            number += 1

    thread = threading.Thread(target=calls)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def gaps_of(engine: penstock.Engine, request: Request, seconds: float) -> list[float]:
    """Return the milliseconds between the tokens of an answer."""
    handle, arrivals = engine.submit(request), list[float]()
    for _ in handle:
        arrivals.append(perf_counter())
        if len(arrivals) > LEAST and arrivals[-1] - arrivals[0] > seconds:
            break
    handle.cancel()
    return [1e3 * (after - before) for before, after in pairwise(arrivals)]


def line(name: str, gaps: list[float], beside: int) -> str:
    """Return a row: answers beside, and the gaps' median, 99th percentile and maximum."""
    p99 = statistics.quantiles(gaps, n=100)[98]
    figures = f"{statistics.median(gaps):8.1f} {p99:8.1f} {max(gaps):8.1f}"
    return f"{name:12} {beside:7} {len(gaps):7} {figures}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=20.0)
    arguments.add_argument("--max-stall-ms", type=int, default=200)
    given = arguments.parse_args()
    known = FAMILIES[FAMILY]
    files = {"preprocessor_config.json": {**known.files["preprocessor_config.json"]}}
    files["preprocessor_config.json"]["max_pixels"] = SIDE**2
    FAMILIES[FAMILY] = replace(known, config={**known.config, **CONFIG}, files=files)
    with TemporaryDirectory() as folder:
        pair = Pair.of(FAMILY, Path(folder) / "model")
    engine = penstock.Engine(
        pair.loaded.model,
        pair.loaded.tokenizer,
        memory_limit="2GB",
        max_stall_ms=given.max_stall_ms,
    )
    text = pair.request("No picture here .", [], 3_000)
    with engine:
        image = pair.request("Look at this IMAGE .", [picture(0, SIDE, SIDE)], 1)
        encoded = image.spans[0].tokens
        started = perf_counter()
        engine.submit(image).result()
        first = perf_counter() - started
        print(f"an image: {encoded} tokens, its first answer in {first:.2f} s")
        print(f"{'beside':12} {'answers':>7} {'gaps':>7} {'median':>8} {'p99':>8} {'max':>8}  ms")
        counts = {"texts": 0, "images": 0}

        def ask_text(number: int) -> None:
            tokens = (number + 5, *image.prompt[1:3], *range(100, 100 + encoded))
            engine.submit(Request(prompt=tokens, max_tokens=1)).result()
            counts["texts"] += 1

        def ask_image(number: int) -> None:
            request = pair.request("Look at this IMAGE .", [picture(number + 1, SIDE, SIDE)], 1)
            engine.submit(request).result()
            counts["images"] += 1

        print(line("nothing", gaps_of(engine, text, given.seconds), 0))
        for name, load in (("texts", ask_text), ("images", ask_image)):
            with beside(load):
                gaps = gaps_of(engine, text, given.seconds)
            print(line(name, gaps, counts[name]))


if __name__ == "__main__":
    main()
