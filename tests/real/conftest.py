"""Tests on real weights; skipped if the model is not cached and cannot be downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelError
from penstock.models import named
from penstock.models.loading import load_all
from penstock.models.mlx_lm import Loaded

LICENSES = Path("/usr/share/common-licenses")


@pytest.fixture(scope="session")
def real() -> Iterator[Loaded]:
    """SmolLM2-135M-Instruct in float32."""
    try:
        named.fetch("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    yield load_all("smollm2", weights_dtype="float32")


@pytest.fixture(scope="session")
def prose() -> list[str]:
    """Real text in paragraphs of 300 characters and more: licenses and Python's own sources."""
    import argparse
    import statistics

    sources: list[Any] = [argparse, statistics]
    files = [*sorted(LICENSES.glob("GPL-*")), *(Path(str(x.__file__)) for x in sources)]
    texts = [file.read_text(errors="replace") for file in files if file.is_file()]
    pieces = [piece.strip() for text in texts for piece in text.split("\n\n")]
    return [piece for piece in pieces if len(piece) >= 300]
