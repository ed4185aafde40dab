"""The public names of `penstock`, and what importing it does not load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
import penstock.caches
import penstock.errors


def test_every_public_name_exists() -> None:
    assert {name for name in penstock.__all__ if not hasattr(penstock, name)} == set()
    assert dir(penstock) == sorted(penstock.__all__)


def test_caches_and_errors_are_public() -> None:
    assert set(penstock.caches.__all__) <= set(penstock.__all__)
    errors = {
        name
        for name, value in vars(penstock.errors).items()
        if isinstance(value, type) and issubclass(value, penstock.errors.PenstockError)
    }
    assert errors <= set(penstock.__all__)
    assert penstock.KVCache is penstock.caches.KVCache


def test_unknown_name_is_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KVCash'"):
        penstock.KVCash  # noqa: B018 - the look-up itself is what fails


def test_import_loads_neither_mlx_nor_mlx_lm() -> None:
    code = "import sys, penstock; print([n for n in ('mlx.core', 'mlx_lm') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_no_property_is_combined_with_lru_cache() -> None:
    """Python 3.14 refuses to make a dataclass with slots of it."""
    wrapped = re.compile(r"@property\n +@(?:functools\.)?(?:lru_)?cache\b")
    sources = sorted(Path(penstock.__file__).parent.rglob("*.py"))
    assert [path.name for path in sources if wrapped.search(path.read_text())] == []
    assert wrapped.search("    @property\n    @lru_cache(maxsize=16)\n")
