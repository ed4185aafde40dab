"""The source that MLX passes to a GPU's compiler, and compilers that need no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from lockstep import FOLDER

from penstock.plugins.kernels.attend import KernelCall

CUDA_TYPES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float"}
CUDA_TYPES |= {mx.uint32: "uint32_t", mx.int32: "int32_t"}
CUDA_START = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/cstdint>
#include <cooperative_groups.h>

"""
"""MLX's own has the same includes and functions that no kernel here uses."""


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """Capture the process's standard output in a list, including that of MLX's C++."""
    sys.stdout.flush()
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            lines.append(file.read())


def metal_text(call: KernelCall) -> str:
    """Return the Metal source that MLX writes, by an export that needs no Metal."""
    kernel = mx.fast.metal_kernel(
        name=call.text.name,
        input_names=list(call.text.inputs),
        output_names=list(call.text.outputs),
        source=call.text.source,
        header=call.text.header,
    )

    def compute(*inputs: mx.array) -> Sequence[mx.array]:
        x, y, z = call.threadgroups
        outputs: Sequence[mx.array] = kernel(
            inputs=list(inputs),
            template=list(call.template),
            grid=(x * call.threads, y, z),
            threadgroup=(call.threads, 1, 1),
            output_shapes=list(call.shapes),
            output_dtypes=list(call.dtypes),
            verbose=True,
        )
        return outputs

    with tempfile.TemporaryDirectory() as folder, printed() as lines:
        mx.export_function(f"{folder}/kernel.mlxfn", compute, *call.inputs)
    return lines[0].split("```")[1]


def cuda_text(call: KernelCall) -> str:
    """Return the CUDA source that MLX writes (`build_kernel` in its custom_kernel.cpp)."""
    inputs = [
        f"    const {CUDA_TYPES[array.dtype]}* {name}"
        for name, array in zip(call.text.inputs, call.inputs, strict=True)
    ]
    outputs = [
        f"    {CUDA_TYPES[dtype]}* {name}"
        for name, dtype in zip(call.text.outputs, call.dtypes, strict=True)
    ]
    constants = [
        f"  using {name} = {CUDA_TYPES[value]};"
        if isinstance(value, mx.Dtype)
        else f"  constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"
        for name, value in call.template
    ]
    return (
        f"{CUDA_START}{call.text.header}namespace mlx::core::cu {{\n\n"
        "namespace cg = cooperative_groups;\n\n__global__ void kernel(\n"
        + ",\n".join([*inputs, *outputs])
        + ") {\n"
        + "\n".join(constants)
        + f"\n\n{call.text.source}\n}}\n\n}} // namespace mlx::core::cu\n"
    )


def shimmed(texts: Sequence[str]) -> str:
    """Return Metal sources as one file for a C++ compiler, without attributes."""
    found = []
    for number, text in enumerate(texts):
        plain = re.sub(r"\[\[[^\]]*\]\]", "", text)
        plain = re.sub(
            r"\ntemplate\s+decltype\((.*)\)\s+(\S+<.*>);", r"\ntemplate decltype(\1) \2;", plain
        )
        # A variable of a C++ function is in no address space unless it is static.
        plain = plain.replace("(type, name, n) threadgroup", "(type, name, n) static threadgroup")
        undefined = "".join(f"#undef {name}\n" for name in re.findall(r"#define (\w+)", plain))
        found.append(f"namespace n{number} {{\n{plain}\n}}\n{undefined}")
    return f'#include "{FOLDER / "metal_shim.h"}"\n' + "".join(found)


def gnu_errors(text: str) -> str:
    """Return g++'s errors for a shimmed source."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    command = [compiler, "-std=c++17", "-fsyntax-only", "-w", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr


def clang_errors(text: str) -> list[str] | None:
    """Return clang's errors for a shimmed source; None without libclang."""
    try:
        from clang import cindex
    except ImportError:
        return None
    index = cindex.Index.create()
    arguments = ["-x", "c++", "-std=c++17", "-w", "-ferror-limit=0", "-Wno-everything"]
    unit: Any = index.parse("texts.cpp", arguments, unsaved_files=[("texts.cpp", text)])
    return [str(one) for one in unit.diagnostics if one.severity >= cindex.Diagnostic.Error]


def zig() -> str | None:
    """Return the compiler of the wheel ziglang, a clang with SPIR-V; None if not installed."""
    spec = importlib.util.find_spec("ziglang")
    places = [] if spec is None else (spec.submodule_search_locations or [])
    return next((str(Path(place) / "zig") for place in places), None)


def spirv(text: str) -> bytes:
    """Compile a shimmed text to SPIR-V; raises AssertionError with the compiler's words."""
    command = [str(zig()), "clang", "--target=spirv64", "-x", "c++", "-std=c++17", "-w", "-O2"]
    inlined = ("-mllvm", "-inline-threshold=1000000")  # as GPUs have it
    extensions = ("-mllvm", "-spirv-ext=+SPV_KHR_bfloat16")
    done = subprocess.run(
        [*command, *inlined, *extensions, "-c", "-o", "-", "-"],
        input=text.encode(),
        capture_output=True,
    )
    if done.returncode:
        raise AssertionError(done.stderr.decode()[:4000])
    return done.stdout


def spirv_operations(code: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each operation's number and its words."""
    words = memoryview(code).cast("I")
    at = 5  # behind the header
    while at < len(words):
        count = words[at] >> 16
        yield words[at] & 0xFFFF, tuple(words[at + 1 : at + count])
        at += count


def spirv_faults(code: bytes) -> str | None:
    """Return the Khronos validator's errors for a module; None if it is not installed."""
    places = (Path(folder) / "cmeel.prefix" / "bin" / "spirv-val" for folder in sys.path)
    validator = next((place for place in places if place.exists()), None)
    if validator is None:
        return None
    done = subprocess.run([validator, "-"], input=code, capture_output=True)
    assert done.returncode or not done.stderr
    return (done.stdout + done.stderr).decode() if done.returncode else ""


@cache
def nvrtc() -> tuple[Any, list[str]] | None:
    """Return NVIDIA's run-time compiler and where its headers are; None if it is not installed."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ImportError:
        return None
    for place in [] if spec is None else (spec.submodule_search_locations or []):
        for library in Path(place).glob("*/lib/libnvrtc.so.*"):
            root = library.parent.parent
            headers = [root / "include", root / "include" / "cccl", root / "cccl"]
            for builtins in root.glob("lib/libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library)), [f"-I{one}" for one in headers if one.exists()]
    return None


def ptx(text: str, architecture: str) -> str:
    """Compile CUDA text to PTX; raises AssertionError with the compiler's words."""
    return _compiled(text, architecture, "PTX").rstrip(b"\0").decode()


def registers(text: str, architecture: str) -> int:
    """Return the registers per thread of the single kernel in a CUDA source."""
    code = _compiled(text, architecture, "CUBIN")
    count = code.index(b"\x04\x2f\x08\x00") + 8  # EIATTR_REGCOUNT: a symbol and a number
    return int.from_bytes(code[count : count + 4], "little")


def _compiled(text: str, architecture: str, form: str) -> bytes:
    found = nvrtc()
    assert found is not None
    library, headers = found
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    own = ctypes.byref(program)
    assert not library.nvrtcCreateProgram(own, text.encode(), b"kernel.cu", 0, None, None)
    flags = [f"--gpu-architecture={architecture}", "--device-as-default-execution-space", *headers]
    options = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
    failed = library.nvrtcCompileProgram(program, len(flags), options)
    wanted = "ProgramLog" if failed else form
    getattr(library, f"nvrtcGet{wanted}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{wanted}")(program, data)
    library.nvrtcDestroyProgram(own)
    if failed:
        raise AssertionError(data.value.decode())
    return data.raw
