"""A process among those that `mlx.launch` has started: it joins them, and ends when one is gone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.config import EngineSettings, setting_of
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock.engine.ranks.process_group import RankGroup

LAUNCHED = ("MLX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Environment variables that the launcher of a group sets."""


@contextmanager
def joined() -> Iterator[RankGroup | None]:
    """Join the group that this process was started in; None if it was started alone.

    Raises:
        SettingError: MLX cannot connect to the others.
        RanksBroken: some of them did not come.
    """
    if not any(name in os.environ for name in LAUNCHED) or _is_single():
        yield None
        return
    import mlx.core as mx

    from penstock.engine.ranks.process_group import RankGroup
    from penstock.engine.ranks.watch import Watch

    try:
        group = mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        raise SettingError(f"MLX cannot connect to the other processes: {error}") from error
    if group.size() == 1:
        yield None
        return
    ranks = RankGroup(group)
    if not ranks.leads:  # it ends when rank 0 does, which lets open answers end first
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Watch(ranks, _end):
        yield ranks


def check_same(ranks: RankGroup, model: dict[str, Any], limits: dict[str, Any]) -> None:
    """Refuse a group whose processes would not do the same.

    Raises:
        SettingError: penstock, mlx-lm, the model or a setting differs.
    """
    ranks.check_equal("penstock and mlx-lm", [__version__, version("mlx-lm")])
    ranks.check_equal("the model's config.json", model)
    given = {
        name: value
        for name, value in limits.items()
        if not setting_of(EngineSettings, name).is_local
    }
    ranks.check_equal("all settings but memory limits and folders", given)


def _is_single() -> bool:
    """Tell whether `mlx.launch` starts one process: MLX cannot read its file then."""
    file = os.environ.get("MLX_HOSTFILE")
    return bool(file) and Path(file or "").is_file() and not Path(file or "").read_text().strip()


def _end(why: str) -> None:
    """End the process at once: its other threads may wait for ever for a lost process."""
    print(f"penstock: the group has ended: {why}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
