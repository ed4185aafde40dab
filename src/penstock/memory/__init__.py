"""Memory of a model and its KV caches, computed only from the model's config.

    KV bytes per token  =  layers x KV heads x (key dim + value dim) x bytes per number
    KV bytes held       =  sequences x (columns x KV bytes per token + recurrent state)

No arrays or weights are read. One GB is 10^9 bytes and one GiB is 2^30.
"""

from penstock.memory.arithmetic import (
    GROUP_SIZES,
    KV_BITS,
    Fit,
    bytes_of_batch,
    bytes_of_window,
    bytes_per_token,
    default_limit_bytes,
    default_threshold,
    group_size_for,
    layer_bytes_per_token,
    vector_bytes,
    what_fits,
)
from penstock.memory.machine import MachineMemory, read_machine_memory
from penstock.memory.reading import packed_weight_bytes, read_model_spec
from penstock.memory.sizes import format_bytes, parse_bytes, round_up
from penstock.memory.spec import DTYPE_BYTES, LayerKind, LayerSpec, ModelSpec, divided, layer_groups

__all__ = [
    "DTYPE_BYTES",
    "GROUP_SIZES",
    "KV_BITS",
    "Fit",
    "LayerKind",
    "LayerSpec",
    "MachineMemory",
    "ModelSpec",
    "bytes_of_batch",
    "bytes_of_window",
    "bytes_per_token",
    "default_limit_bytes",
    "default_threshold",
    "divided",
    "format_bytes",
    "group_size_for",
    "layer_bytes_per_token",
    "layer_groups",
    "packed_weight_bytes",
    "parse_bytes",
    "read_machine_memory",
    "read_model_spec",
    "round_up",
    "vector_bytes",
    "what_fits",
]
