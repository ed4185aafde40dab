"""Interface of plug-ins that load models from other formats than mlx-lm's folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config import WeightsDtype
from penstock.extensions import extensions

if TYPE_CHECKING:
    from penstock.models.mlx_lm import Loaded
    from penstock.models.widening import Widening

GROUP = "penstock.model_files"
"""Entry-point group of functions that open a path as a `ModelFile`, or return None."""


class ModelFile(Protocol):
    """A model in a file; only `load` needs MLX and reads more than the header."""

    @property
    def config(self) -> dict[str, Any]: ...

    def bytes_by_kind(self, *, float32: bool) -> Mapping[str, int]:
        """Return the bytes of the weights by kind, for `memory.read_model_spec`."""

    def packed_bytes(self) -> int | None:
        """Return the bytes of packed weights; None if there are no quantized weights."""

    def codes_errors(self) -> dict[str, float]:
        """Return the largest relative error of requantized tensors, for each format MLX lacks."""

    def widening(self, weights_dtype: WeightsDtype, limit_bytes: int | None) -> Widening:
        """Return how the weights would be converted, without reading them."""

    def load(self, weights_dtype: WeightsDtype, limit_bytes: int | None) -> Loaded: ...


def open_model_file(path: str | Path) -> ModelFile | None:
    """Open a model file by the plug-in for its format, reading only the header.

    Returns:
        The file; None if no plug-in recognizes the path, such as a folder or a model's name.

    Raises:
        ModelError: the recognized file cannot be read, is damaged or unsupported.
    """
    opened = (open_file(Path(path).expanduser()) for open_file in extensions(GROUP))
    return next((file for file in opened if file is not None), None)
