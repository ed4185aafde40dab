"""Texts a second of an encoder, and of sentence-transformers in turn in the same run."""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from penstock.encoders.encoder import load_encoder
from penstock.encoders.encoder_engine import EncoderEngine
from penstock.engine.turns import Turns
from penstock.kv.numpy_arrays import Floats
from penstock.ledger import Ledger
from penstock_bench.report import Line, Notify, Report

LIMIT_BYTES = 4_000_000_000
LEAST_COSINE = 0.9999
MEAN_WORDS, SPREAD, MOST_WORDS = 3.2, 0.9, 300
"""Log-normal lengths of texts: 25 words in the middle, 110 at the 95th percentile."""
RIVAL_PROGRAM = """
import json, sys, time
import numpy as np
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device=sys.argv[2])
texts = json.loads(open(sys.argv[3]).read())
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    vectors = model.encode(texts, show_progress_bar=False)
    seconds = time.perf_counter() - began
    np.save(sys.argv[4], np.asarray(vectors, np.float32))
    print(json.dumps(seconds), flush=True)
"""


@dataclass(frozen=True, slots=True)
class EmbedLoad:
    model: str
    texts: int
    rounds: int
    rival: Path
    """Python of an environment with sentence-transformers."""
    device: str


def measure(load: EmbedLoad, notify: Notify) -> Report:
    """Embed the same texts by both sides in turn; the first round warms up and does not count."""
    encoder, texts = load_encoder(load.model), sample_texts(load.texts)
    engine = EncoderEngine(encoder, Ledger(LIMIT_BYTES), Turns())
    ours: list[float] = []
    rivals: list[float] = []
    try:
        with (
            TemporaryDirectory(prefix="penstock-") as folder,
            _rival(load, encoder.spec.folder, texts, Path(folder)) as ask,
        ):
            for number in range(load.rounds + 1):
                notify("round", number, load.rounds + 1)
                seconds, vectors, tokens = _timed(engine, texts)
                rival_seconds, rival_vectors = ask()
                if number:
                    ours.append(seconds)
                    rivals.append(rival_seconds)
    finally:
        engine.close()
    return _report(load, ours, rivals, tokens, _least_cosine(vectors, rival_vectors))


def sample_texts(count: int, seed: int = 1) -> list[str]:
    """Return passages of Python's own sources, of log-normal lengths."""
    words = " ".join(inspect.getsource(module) for module in (argparse, statistics)).split()
    drawn = random.Random(seed)
    texts = []
    for _ in range(count):
        length = min(MOST_WORDS, max(3, int(drawn.lognormvariate(MEAN_WORDS, SPREAD))))
        start = drawn.randrange(len(words) - length)
        texts.append(" ".join(words[start : start + length]))
    return texts


def _timed(engine: EncoderEngine, texts: list[str]) -> tuple[float, Floats, int]:
    began = time.perf_counter()
    tokenizer = engine.encoder.tokenizer
    rows = [tokenizer.text(text, "end", lambda: None).row for text in texts]
    vectors = engine.encode(rows).result()
    return time.perf_counter() - began, vectors, sum(map(len, rows))


@contextmanager
def _rival(load: EmbedLoad, model: Path, texts: list[str], folder: Path) -> Iterator[Any]:
    """Start the other side; yield a function that embeds the texts there."""
    (folder / "texts.json").write_text(json.dumps(texts))
    vectors = folder / "vectors.npy"
    arguments = [str(model), load.device, str(folder / "texts.json"), str(vectors)]
    with subprocess.Popen(
        [str(load.rival), "-c", RIVAL_PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        reads, writes = process.stdout, process.stdin
        if reads.readline().strip() != "ready":
            raise RuntimeError(f"{load.rival} cannot run sentence-transformers; see above")

        def ask() -> tuple[float, Floats]:
            writes.write("go\n")
            writes.flush()
            seconds = float(json.loads(reads.readline()))
            return seconds, np.load(vectors)

        try:
            yield ask
        finally:
            writes.close()


def _least_cosine(ours: Floats, theirs: Floats) -> float:
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(((ours * theirs).sum(axis=1) / norms).min())


def _report(
    load: EmbedLoad, ours: list[float], rivals: list[float], tokens: int, cosine: float
) -> Report:
    own, rival = statistics.median(ours), statistics.median(rivals)
    faster, close = own <= rival, cosine >= LEAST_COSINE
    lines = [
        Line(
            f"texts/s ({rival / own:.2f}x)",
            f"{load.texts / own:,.1f}",
            f"{load.texts / rival:,.1f}",
            "its own",
            faster,
        ),
        Line("tokens/s", f"{tokens / own:,.0f}", f"{tokens / rival:,.0f}"),
        Line("least cosine of two vectors", f"{cosine:.7f}", "", f"{LEAST_COSINE}", close),
    ]
    return Report(
        name="embed",
        claim="An encoder embeds at least as many texts a second, with the same vectors",
        rival="sentence-transformers",
        penstock={"seconds": own, "texts_per_second": load.texts / own},
        rival_figures={"seconds": rival, "texts_per_second": load.texts / rival},
        ratio={"seconds": rival / own},
        goal={"ratio": 1.0, "cosine": LEAST_COSINE},
        met=faster and close,
        lines=lines,
        raw={"penstock": ours, "rival": rivals, "tokens": tokens, "cosine": cosine},
        dtype="float32",
    )
