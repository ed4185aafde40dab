"""Weights of a file that are read module by module, into a model made from its config."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from penstock.memory.sizes import format_bytes

logger = logging.getLogger(__name__)

NOTE_SECONDS = 2.0
"""Seconds between log messages while weights are read."""
MOST_NAMES = 3
"""Names of parameters in an error."""


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A tensor of a file."""

    names: Sequence[str]
    """Names of the model's parameters that it gives: one, or codes with their scales."""
    read: Callable[[], Iterable[mx.array]]
    """Returns these parameters, evaluated."""

    def parameters(self) -> list[tuple[str, mx.array]]:
        """Read the parameters; ValueError if the tensor has no codes where names are of codes."""
        arrays = list(self.read())
        if len(arrays) != len(self.names):
            raise ValueError(f"{self.names[0]} cannot be read in codes")
        return list(zip(self.names, arrays, strict=True))


class UnreadWeights:
    """The weights of a file.

    Args:
        model: model with parameters that are not evaluated, to be replaced.
        tensors: tensors of the file; nothing is read here.
        nbytes: bytes of all parameters, for the log.

    Raises:
        ValueError: the names differ from those of the model's parameters.
    """

    def __init__(self, model: nn.Module, tensors: Iterable[UnreadTensor], nbytes: int) -> None:
        self._model = model
        parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore
        self._shapes = {name: array.shape for name, array in parameters}
        self._unread: dict[str, list[UnreadTensor]] = {}
        for tensor in tensors:
            self._unread.setdefault(_module_of(tensor.names[0]), []).append(tensor)
        names = {x for of in self._unread.values() for tensor in of for x in tensor.names}
        _check_names("has no place for", names - self._shapes.keys())
        _check_names("needs", self._shapes.keys() - names)
        self._nbytes, self._read_bytes, self._noted = nbytes, 0, time.monotonic()
        logger.info("loading %s of weights", format_bytes(nbytes))

    def read(self, module: str) -> None:
        """Read a module's parameters, unless they have been read.

        Raises:
            ValueError: a shape differs from that of the model's parameter.
        """
        for tensor in self._unread.pop(module, ()):
            parameters = tensor.parameters()
            for name, array in parameters:
                if array.shape != self._shapes[name]:
                    raise ValueError(f"{name} is {array.shape}, and not {self._shapes[name]}")
                self._read_bytes += array.nbytes
            self._model.load_weights(parameters, strict=False)
        self._note()

    def read_all(self, *, codes: bool = True) -> None:
        """Read all parameters that are left; without `codes`, of modules that have none."""
        for module in list(self._unread):
            if codes or f"{module}.scales" not in self._shapes:
                self.read(module)

    def _note(self) -> None:
        if time.monotonic() - self._noted >= NOTE_SECONDS:
            self._noted = time.monotonic()
            done = f"{format_bytes(self._read_bytes)} of {format_bytes(self._nbytes)}"
            logger.info("loading weights: %s", done)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _check_names(what: str, names: Iterable[str]) -> None:
    """Raise ValueError if there are any."""
    wrong = sorted(names)
    if wrong:
        shown = ", ".join(wrong[:MOST_NAMES])
        more = f" and {len(wrong) - MOST_NAMES:,} more" if len(wrong) > MOST_NAMES else ""
        raise ValueError(f"the model {what} {shown}{more}")
