"""Reading of models together with drafters that read their hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from penstock.memory.heads import BlockDrafterSpec, DrafterSpec
from penstock.models.block_drafter import with_block_drafter
from penstock.models.eagle import with_eagle
from penstock.models.mlx_lm import ChangedReader, head_cache, kv_cache, read_weights, rope_of


def drafted_reader(folder: Path, spec: DrafterSpec) -> ChangedReader:
    """Return the reader of models together with the drafter in a folder."""
    return ChangedReader(
        lambda model_class: drafted_class(model_class, spec, lambda: read_weights(folder)),
        lambda model: None,
    )


def drafted_class(
    model_class: type[nn.Module], spec: DrafterSpec, read: Callable[[], Mapping[str, mx.array]]
) -> type[nn.Module]:
    """Return a subclass of mlx-lm's model class with a drafter.

    Args:
        read: reads the weights of the drafter under their published names. The class does not keep
            them.
    """
    sizes = spec.sizes
    rope = rope_of(sizes.head_dim, sizes.rope_theta, sizes.rope_scaling, sizes.max_positions)
    if isinstance(spec, BlockDrafterSpec):
        return with_block_drafter(model_class, kv_cache, spec, rope, read)
    return with_eagle(model_class, kv_cache, head_cache, spec, rope, read)
