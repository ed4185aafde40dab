"""Models in files of other forms than mlx-lm's folders: the seam to the plug-ins that read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config import WeightsDtype
from penstock.extensions import extensions

if TYPE_CHECKING:
    from penstock.models.mlx_lm import Loaded

GROUP = "penstock.model_files"
"""Entry points of functions that return a path's `ModelFile`, or None if it is of another form."""


class ModelFile(Protocol):
    """A model in a file. Nothing but `load` needs MLX, or reads more than the header."""

    @property
    def config(self) -> dict[str, Any]:
        """The model's `config.json`, as mlx-lm takes it."""

    def bytes_by_kind(self, *, wide: bool) -> Mapping[str, int]:
        """Sum the bytes of weights as `memory.read_model_spec` takes them; `wide` is float32."""

    def packed_bytes(self) -> int:
        """Return the bytes of the weights where codes are multiplied as they lie."""

    def codes_errors(self) -> dict[str, float]:
        """Return the relative error of codes that MLX has no counterpart of, by their form."""

    def load(self, weights_dtype: WeightsDtype, limit_bytes: int | None) -> Loaded:
        """Load the model; see `loading.load_all`."""


def open_model_file(path: str | Path) -> ModelFile | None:
    """Return a model's file with its header read; None for folders and names, or ModelError."""
    opened = (open_file(Path(path).expanduser()) for open_file in extensions(GROUP))
    return next((file for file in opened if file is not None), None)
