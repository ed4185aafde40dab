"""The kernels as C++17, compiled on demand, and run in process or in a sanitized program."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from penstock.plugins.kernels.attend import KernelCall

FOLDER = Path(__file__).parent.parent / "kernels"
COMPILER = shutil.which("g++") or shutil.which("clang++")
TYPES = {mx.float16: "half_t", mx.bfloat16: "bfloat16_t", mx.float32: "float"}
INPUT_TYPES = {**TYPES, mx.uint32: "uint32_t", mx.int32: "int"}
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

Variant = tuple[Any, ...]
Change = Sequence[tuple[str, str]]
"""Replacements in the text of the kernels."""


def variant(call: KernelCall) -> Variant:
    """Return the properties that determine the C++ of a call."""
    kinds = tuple(INPUT_TYPES[array.dtype] for array in call.inputs)
    outputs = tuple(INPUT_TYPES[dtype] for dtype in call.dtypes)
    return call.text, call.template, kinds, outputs


def source(variants: Sequence[Variant], changes: Sequence[Change] = ((),)) -> str:
    """Return one file of all variants, with each of the changes of the kernels' own text."""
    spaces = [
        _space(f"v{i * len(variants) + j}", one, change)
        for i, change in enumerate(changes)
        for j, one in enumerate(variants)
    ]
    cases = "".join(f"      case {i}: v{i}::call(b); break;\n" for i in range(len(spaces)))
    return f"""#include "{FOLDER / "lockstep.h"}"
{"".join(spaces)}
extern "C" int run(int variant, void** b, int gx, int gy, int gz, int turned) {{
  races = 0;
  loaded_once.clear();
  backwards = turned;
  for (group_z = 0; group_z < gz; ++group_z)
    for (group_y = 0; group_y < gy; ++group_y)
      for (group_x = 0; group_x < gx; ++group_x) switch (variant) {{
{cases}      default: return -1;
      }}
  return races;
}}
"""


def _space(name: str, one: Variant, change: Change) -> str:
    kernel, template, inputs, outputs = one
    lines = [
        f"using {name} = {TYPES[value]};"
        if isinstance(value, mx.Dtype)
        else f"constexpr int {name} = {int(value)};"
        for name, value in template
    ]
    kinds = [f"const {kind}*" for kind in inputs] + [f"{kind}*" for kind in outputs]
    names = [*kernel.inputs, *kernel.outputs]
    wanted = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=True))
    given = ", ".join(f"({kind})b[{i}]" for i, kind in enumerate(kinds))
    text = (
        f"namespace {name} {{\n{kernel.header}\n{chr(10).join(lines)}\n"
        f"static void kernel({wanted}) {{\n{kernel.source}}}\n"
    )
    for old, new in change:
        text = text.replace(old, new)
    return f"{text}static void call(void** b) {{ kernel({given}); }}\n}}\n"


def as_bytes(array: mx.array) -> bytes:
    """Return an array's bytes, in order."""
    array = mx.contiguous(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def from_bytes(data: bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return an array of bytes."""
    kinds = {mx.float16: np.float16, mx.bfloat16: np.uint16, mx.float32: np.float32}
    array = mx.array(np.frombuffer(data, kinds[dtype]).reshape(shape))
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


def compiled(code: str, flags: Iterable[str], output: Path) -> None:
    """Compile a file; raise with the compiler's output if that fails."""
    path = output.with_suffix(".cpp")
    path.write_text(code)
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", *flags, str(path), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr[:6000]}")


def _sizes(call: KernelCall) -> list[int]:
    """Return the bytes of each result."""
    return [int(np.prod(s)) * d.size for s, d in zip(call.shapes, call.dtypes, strict=True)]


@dataclass
class Lockstep:
    """Calls kernels as C++ in this process, each variant compiled when it is first called."""

    target: str = "lockstep"
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="penstock-kernels-")))
    libraries: dict[Variant, Any] = field(default_factory=dict)
    calls: int = 0

    def __call__(self, call: KernelCall) -> list[mx.array]:
        self.calls += 1
        key = variant(call)
        if key not in self.libraries:
            code = source([key])
            path = self.folder / f"{hashlib.sha256(code.encode()).hexdigest()[:16]}.so"
            if not path.exists():
                compiled(code, ("-O0", "-shared", "-fPIC"), path)
            self.libraries[key] = ctypes.CDLL(str(path))
        inputs = [ctypes.create_string_buffer(as_bytes(a), a.nbytes) for a in call.inputs]
        sizes = _sizes(call)
        outputs = [ctypes.create_string_buffer(size) for size in sizes]
        pointers = [ctypes.cast(b, ctypes.c_void_p) for b in (*inputs, *outputs)]
        table = (ctypes.c_void_p * len(pointers))(*pointers)
        races = self.libraries[key].run(0, table, *call.threadgroups, 0)
        assert races == 0, races
        return [
            from_bytes(out.raw, shape, dtype)
            for out, shape, dtype in zip(outputs, call.shapes, call.dtypes, strict=True)
        ]


@dataclass
class Recorder:
    """Records calls and returns zeros, so that all called variants are compiled at once."""

    target: str = "lockstep"
    variants: dict[Variant, None] = field(default_factory=dict)
    nbytes: int = 0
    """Bytes of all results."""

    def __call__(self, call: KernelCall) -> list[mx.array]:
        self.variants[variant(call)] = None
        self.nbytes += sum(_sizes(call))
        return [mx.zeros(s, d) for s, d in zip(call.shapes, call.dtypes, strict=True)]


@dataclass
class Program:
    """A sanitized program of many variants that reads jobs and writes results."""

    path: Path
    variants: list[Variant]
    change: int = 0
    """Which of the changes is run."""
    backwards: bool = False
    races: int = 0
    target: str = "lockstep"
    _process: subprocess.Popen[bytes] | None = None

    @classmethod
    def build(
        cls,
        path: Path,
        variants: Sequence[Variant],
        changes: Sequence[Change] = ((),),
        flags: Sequence[str] = ("-O0", *SANITIZERS),
    ) -> Program:
        code = source(variants, changes) + f'#include "{FOLDER / "main.h"}"\n'
        compiled(code, flags, path)
        return cls(path, list(variants))

    def __call__(self, call: KernelCall) -> list[mx.array]:
        if self._process is None:
            self._process = subprocess.Popen(
                [self.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        sizes = _sizes(call)
        counts = (len(call.inputs), len(sizes))
        place = self.change * len(self.variants) + self.variants.index(variant(call))
        head = (place, *call.threadgroups, int(self.backwards), *counts)
        data = [as_bytes(array) for array in call.inputs]
        sent = [struct.pack("<7i", *head)]
        sent += [struct.pack("<i", len(one)) + one for one in data]
        sent += [struct.pack("<i", size) for size in sizes]
        try:
            process.stdin.write(b"".join(sent))
            process.stdin.flush()
            (races,) = struct.unpack("<i", process.stdout.read(4))
        except (struct.error, BrokenPipeError):
            assert process.stderr is not None
            report = process.stderr.read().decode()[:4000]
            self.close()
            raise AssertionError(report) from None
        self.races += races
        return [
            from_bytes(process.stdout.read(size), shape, dtype)
            for size, shape, dtype in zip(sizes, call.shapes, call.dtypes, strict=True)
        ]

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None
