"""Entry point of the plug-in: opens GGUF files as models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import WeightsDtype
from penstock.plugins.gguf import architectures, loaded_bytes
from penstock.plugins.gguf.header import Header, is_gguf, read_header

if TYPE_CHECKING:
    from penstock.models.mlx_lm import Loaded
    from penstock.models.widening import Widening


class GGUFFile:
    """A GGUF file; see `ModelFile`. Raises ModelError for unsupported files."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path, self._header = path, header

    @property
    def config(self) -> dict[str, Any]:
        return {**architectures.config(self._header), "_name_or_path": self._header.name}

    def bytes_by_kind(self, *, float32: bool) -> Mapping[str, int]:
        return loaded_bytes.bytes_by_kind(self._header, float32=float32)

    def packed_bytes(self) -> int | None:
        return loaded_bytes.packed_bytes(self._header)

    def codes_errors(self) -> dict[str, float]:
        # Imports MLX, which a plan does not need.
        from penstock.plugins.gguf.weights import nearest_errors

        return nearest_errors(self._header)

    def widening(self, weights_dtype: WeightsDtype, limit_bytes: int | None) -> Widening:
        from penstock.models.weight_packer import can_pack
        from penstock.models.widening import Widening

        header = self._header
        architectures.config(header)  # raises ModelError for invalid files
        native, float32_bytes = loaded_bytes.native_bytes(header), loaded_bytes.wide_bytes(header)
        packed = self.packed_bytes()
        if packed is not None and not can_pack():
            packed = None
        return Widening(weights_dtype, native, float32_bytes, limit_bytes, packed)

    def load(self, weights_dtype: WeightsDtype, limit_bytes: int | None) -> Loaded:
        from penstock.models.mlx_lm import load_written
        from penstock.plugins.gguf.tokenizer import write_without_merges
        from penstock.plugins.gguf.weights import tensors, write_config

        header, widening = self._header, self.widening(weights_dtype, limit_bytes)
        widening.check_limit(header.name)
        is_wide = widening.widens
        dtype = loaded_bytes.activation_dtype(header)
        if is_wide or widening.packs:
            dtype = "float32"
        return load_written(
            lambda folder: write_config(header, folder, float32=is_wide, dtype=dtype),
            lambda folder: write_without_merges(header, folder),
            tensors(header, float32=is_wide, dtype=dtype, half_scales=widening.packs),
            widening,
            path=self._path,
            name=header.name,
        )


def open_gguf(path: Path) -> GGUFFile | None:
    """Open a GGUF file and read its header; None if the path is not a GGUF file."""
    return GGUFFile(path, read_header(path)) if is_gguf(path) else None
