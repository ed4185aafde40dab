"""Models in file formats other than mlx-lm's folders: the interface to plug-ins that load them."""

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
"""Entry-point group of functions that return a path's `ModelFile`, or None if unsupported."""


class ModelFile(Protocol):
    """A model in a file; only `load` needs MLX and reads more than the header."""

    @property
    def config(self) -> dict[str, Any]: ...

    def bytes_by_kind(self, *, float32: bool) -> Mapping[str, int]:
        """Return weight bytes by kind for `memory.read_model_spec`, as loaded or in float32."""

    def packed_bytes(self) -> int | None:
        """Return the bytes of the weights if codes are multiplied directly; None without codes."""

    def codes_errors(self) -> dict[str, float]:
        """Return the relative error of codes without a counterpart in MLX, by format."""

    def widening(self, weights_dtype: WeightsDtype, limit_bytes: int | None) -> Widening:
        """Return the decision about the weights without reading them."""

    def load(self, weights_dtype: WeightsDtype, limit_bytes: int | None) -> Loaded: ...


def open_model_file(path: str | Path) -> ModelFile | None:
    """Open a model file and read its header; None for folders and names."""
    opened = (open_file(Path(path).expanduser()) for open_file in extensions(GROUP))
    return next((file for file in opened if file is not None), None)
