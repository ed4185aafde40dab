"""Graphs for ONNX Runtime: serialized as ONNX messages, run on NumPy arrays.

Weights are passed outside of the message: a session with 32 MB of codes then takes 40 MB instead of
72. All sessions of a process share a thread pool, whose threads sleep when idle. Memory arenas are
disabled, so that a session keeps no memory of past runs.

The numbers of fields are those of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

IR_VERSION = 10
OPERATORS = (("", 21), ("com.microsoft", 1))
"""Operator sets of the graphs, with their versions."""
MICROSOFT = "com.microsoft"
EXTERNAL = 1
TYPES = {"float32": 1, "uint8": 2, "int64": 7}
"""ONNX's element types."""
INLINE_BYTES = 1024
"""Maximum size of an array that is part of a message, such as a shape."""


@cache
def runtime() -> Any:
    """Import ONNX Runtime, and start the thread pool shared by all sessions.

    Raises:
        ImportError: it is not installed.
    """
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    onnxruntime.set_global_thread_pool_sizes(cores(), 1)
    return onnxruntime


def cores() -> int:
    """Return the number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Graph:
    """Builder of a graph with nodes and weights; `session` makes it executable."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._weights: dict[str, Array] = {}
        self._count = 0
        self.row_multiple = 1
        """The number of rows must be a multiple of this; see `row_multiple`."""

    def weight(self, array: Array) -> str:
        """Add a weight array; return its name."""
        name = self._name("w")
        self._weights[name] = np.ascontiguousarray(array)
        return name

    def node(
        self, operator: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any
    ) -> Any:
        """Add an operator; return the name of its output, or a list of names."""
        names = [self._name(operator) for _ in range(outputs)]
        fields = [*(_text(1, name) for name in inputs), *(_text(2, name) for name in names)]
        fields.append(_text(4, operator))
        fields += [_message(5, _attribute(name, value)) for name, value in attributes.items()]
        if domain:
            fields.append(_text(7, domain))
        self._nodes.append(b"".join(fields))
        return names[0] if outputs == 1 else names

    def session(self, inputs: dict[str, int], outputs: dict[str, int]) -> RowSession:
        """Return an executable session; inputs and outputs are float32 rows.

        Args:
            inputs: row size of each input.
            outputs: row size of each output.
        """
        external = {k: v for k, v in self._weights.items() if v.nbytes > INLINE_BYTES}
        graph = [_message(1, node) for node in self._nodes]
        graph.append(_text(2, "rows"))
        graph += [_message(5, _tensor(name, array)) for name, array in self._weights.items()]
        graph += [_message(11, _rows(name, width)) for name, width in inputs.items()]
        graph += [_message(12, _rows(name, width)) for name, width in outputs.items()]
        model = [_number(1, IR_VERSION), _message(7, b"".join(graph))]
        model += [_message(8, _text(1, name) + _number(2, at)) for name, at in OPERATORS]
        ort = runtime()
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in external.values()]
        options.add_external_initializers(list(external), values)
        session = ort.InferenceSession(b"".join(model), options, providers=["CPUExecutionProvider"])
        weight_bytes = sum(array.nbytes for array in self._weights.values())
        self._weights.clear()
        return RowSession(session, list(inputs), list(outputs), weight_bytes, self.row_multiple)

    def _name(self, word: str) -> str:
        self._count += 1
        return f"{word}{self._count}"


class RowSession:
    """A graph that can be run on any number of rows."""

    def __init__(
        self,
        session: Any,
        inputs: list[str],
        outputs: list[str],
        weight_bytes: int,
        row_multiple: int,
    ) -> None:
        self._session = session
        self._inputs = inputs
        self._outputs = outputs
        self.weight_bytes = weight_bytes
        """Bytes of the weights."""
        self.row_multiple = row_multiple

    def run(self, *rows: Array) -> list[Array]:
        """Run the graph on rows, (n, width) float32 each; return its outputs."""
        outputs: list[Array] = self._session.run(
            self._outputs, dict(zip(self._inputs, rows, strict=True))
        )
        return outputs


# ---- ONNX's messages, in the wire format of protocol buffers


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _attribute(name: str, value: float | str | Iterable[int]) -> bytes:
    if isinstance(value, str):
        return _text(1, name) + _text(4, value) + _number(20, 3)
    if isinstance(value, float):
        return _text(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, 1)
    if isinstance(value, int):
        return _text(1, name) + _number(3, value) + _number(20, 2)
    return _text(1, name) + b"".join(_number(8, number) for number in value) + _number(20, 7)


def _tensor(name: str, array: Array) -> bytes:
    fields = [_number(1, size) for size in array.shape]
    fields += [_number(2, TYPES[array.dtype.name]), _text(8, name)]
    if array.nbytes <= INLINE_BYTES:
        return b"".join([*fields, _message(9, array.tobytes())])
    place = {"location": "beside", "offset": "0", "length": str(array.nbytes)}
    fields += [_message(13, _text(1, key) + _text(2, value)) for key, value in place.items()]
    return b"".join([*fields, _number(14, EXTERNAL)])


def _rows(name: str, width: int) -> bytes:
    """Return the type of an input or output: any number of float32 rows."""
    shape = _message(1, _text(2, "rows")) + _message(1, _number(1, width))
    kind = _number(1, TYPES["float32"]) + _message(2, shape)
    return _text(1, name) + _message(2, _message(1, kind))
