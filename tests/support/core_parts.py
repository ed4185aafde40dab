"""Internal parts of an engine's core that tests read, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock.engine.core import Core
from penstock.engine.schedule.scheduler import State
from penstock.kv.tails import LayerShape
from penstock.prefix.node import Match, Node

T = TypeVar("T")
M = TypeVar("M")


def evict_all(core: Core) -> None:
    """Evict all unused prefixes from memory; cold tiers are unchanged."""
    core.prefixes.clear()


def evict_unpinned(core: Core) -> bool:
    """Evict everything unused as an allocation would; return whether it sufficed."""
    return core.prefixes.make_room(core.ledger.free_bytes + core.prefixes.evictable_bytes)


def wrap_model(core: Core, wrap: Callable[[Any], M]) -> M:
    """Let the core call a wrapped model; return the wrapper."""
    wrapped = core.runner.model = wrap(core.runner.model)
    return wrapped


def cached_nodes(core: Core) -> list[Node[Any]]:
    return list(core.prefixes.tree)


def hash_prompt(core: Core, tokens: Sequence[int], salt: str = "") -> list[bytes]:
    return core.prefixes.block_hashes(tokens, salt)


def cached_match(core: Core, tokens: Sequence[int]) -> Match[Any]:
    return core.prefixes.find(tokens)


def pinned_nodes(core: Core) -> int:
    return core.prefixes.tree.pins


def shrink(core: Core, nbytes: int) -> int:
    """Evict cached bytes, the least valuable first."""
    return core.prefixes.shrink(nbytes)


def free_beside_tree(core: Core, nbytes: int) -> int:
    """Free memory outside the tree, such as windows and checkpoints; return the bytes."""
    return core.prefixes._beside.relief.relieve(nbytes)


def way_of(core: Core) -> str:
    """Return how the model's KV is read: "shared", "indexed", "latent" or "joined"."""
    return core.runner.fitness.way


def why_of(core: Core) -> str:
    """Return the reason for this way of reading."""
    return core.runner.fitness.why


def sequences_in(core: Core, state: State) -> list[Any]:
    return core.scheduler.sequences(state)


def placed_sequences(core: Core) -> list[Any]:
    """Return the sequences that have a slot."""
    return core.scheduler.placed()


def fixed_bytes_of(core: Core) -> int:
    return core.budget.fixed_bytes


def weights_bytes_of(core: Core) -> int:
    return core.budget.weights_bytes


def retention_of(core: Core, kind: type[T]) -> T | None:
    return core.stores.of(kind)


def retentions_of(core: Core, kind: type[T]) -> list[T]:
    return core.stores.all_of(kind)


def layer_shapes(core: Core) -> Sequence[LayerShape]:
    return core.runner.shapes
