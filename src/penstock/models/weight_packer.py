"""Weights that stay in 4 and 8 bits on a CPU: the seam to the plug-in that multiplies them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import mlx.nn as nn

from penstock.errors import ModelError
from penstock.extensions import extension
from penstock.models.widening import widen

logger = logging.getLogger(__name__)


class WeightPacker(Protocol):
    """Multiplication by weights as they lie, for the modules of a loaded model."""

    def takes(self, module: nn.Module) -> bool:
        """Tell whether a module's codes can be multiplied as they lie."""

    def pack(self, model: nn.Module, *, exact: bool) -> None:
        """Replace modules with codes, one after the other; the rest of the model is in float32.

        Args:
            model: mlx-lm's.
            exact: whether activations stay in float32.
        """


def weight_packer() -> WeightPacker | None:
    """Return what the plug-in `packed` has; None where it or its library is not installed."""
    try:
        packer: WeightPacker | None = extension("packed")
    except ImportError as error:
        logger.info("weights cannot be multiplied in packed form: %s", error)
        return None
    return packer


def pack(model: nn.Module, dense: Callable[[nn.Module], nn.Module | None], *, exact: bool) -> None:
    """Turn a model into one whose codes are multiplied as they lie, and all else into float32.

    Args:
        model: loaded lazily, or evaluated.
        dense: as of `widen`, for modules with codes that cannot be multiplied as they lie.
        exact: whether activations stay in float32.

    Raises:
        ModelError: what multiplies them is not installed.
    """
    packer = weight_packer()
    if packer is None:
        raise ModelError(
            "--weights-dtype packed needs ONNX Runtime: pip install onnxruntime, or take float32"
        )
    takes = packer.takes
    widen(model, lambda module: None if takes(module) else dense(module))
    packer.pack(model, exact=exact)
