"""Creation of a command's engine; errors about the memory limit name a sufficient one."""

from __future__ import annotations

import gc
from typing import Any

from penstock import memory
from penstock.engine.engine import Engine
from penstock.engine.view import EngineView
from penstock.errors import NeverFits, SettingError, StepTooLarge
from penstock.heap import give_back_freed_memory
from penstock.models.mlx_lm import Loaded

USEFUL_TOKENS = 1_024
"""Number of tokens whose KV must fit in the proposed limit."""
NO_LIMIT = 1 << 60
INDEX_SHARE = 0.03


def make_engine(loaded: Loaded, **settings: Any) -> Engine:
    """Create an engine; SettingError proposes a limit if `memory_limit` is too small."""
    try:
        return Engine(loaded.model, loaded.tokenizer, **settings)
    except StepTooLarge as error:  # the trial below would allocate that much
        raise SettingError(str(error)) from None
    except NeverFits as error:
        if settings.get("peers") is not None:  # all ranks would have to take part in a trial
            raise SettingError(str(error)) from None
        limit = memory.format_bytes(error.limit_bytes)
    # The weights are loaded, so a trial shows how much more memory is needed.
    with Engine(loaded.model, loaded.tokenizer, **{**settings, "memory_limit": NO_LIMIT}) as tried:
        parts, least = tried.ask(_needed).result()
    raise SettingError(
        f"--memory-limit of {limit} is too small: {parts} are always needed, in addition to keys "
        f"and values; raise it to {memory.round_up(least)} or more"
    )


def _needed(view: EngineView) -> tuple[str, int]:
    # FastAPI takes 0.3 s to import, and is not needed by generate and chat.
    from penstock.server.prompt_memory import LEAST_POOL_BYTES, POOL_SHARE

    by_kind, sequence = view.stats().by_kind, view.sequence_bytes(USEFUL_TOKENS)
    fixed = {kind: by_kind[kind] for kind in ("weights", "tails", "buffers", "draft")}
    fixed = {kind: size for kind, size in fixed.items() if size}
    needed = sum(fixed.values()) + sequence.per_sequence + sequence.shared
    least = min(needed + by_kind["index"], int(needed / (1 - INDEX_SHARE)))
    least = max(least + LEAST_POOL_BYTES, least * POOL_SHARE // (POOL_SHARE - 1) + 1)
    words = [f"{kind} of {memory.format_bytes(size)}" for kind, size in fixed.items()]
    return " and ".join([", ".join(words[:-1]), words[-1]]), least


def freeze_loaded() -> None:
    """Exclude existing objects from garbage collection, and return freed memory to the system."""
    gc.collect()
    gc.freeze()
    give_back_freed_memory()
