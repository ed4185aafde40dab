"""Group of processes started by `mlx.launch`, all of which end when one ends."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from penstock import __version__
from penstock.config import EngineSettings, setting_of
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock.engine.ranks.process_group import RankGroup

LAUNCHED = ("MLX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LAUNCHERS = ("mlx.launch", "mlx._distributed_utils.launch")
"""Substrings that identify MLX's launcher in a command line."""
PRINT_SECONDS = 0.5
"""Seconds that the launcher gets to print the last output of its ranks."""


@contextmanager
def joined() -> Iterator[RankGroup | None]:
    """Join this process's group, and yield it; yield None if the process was started alone."""
    if not any(name in os.environ for name in LAUNCHED) or _is_single():
        yield None
        return
    _end_with_launcher()
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
    if not ranks.leads:  # ends with rank 0, which finishes open answers first
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Watch(ranks, _end):
        yield ranks


def check_same(ranks: RankGroup, model: dict[str, Any], limits: dict[str, Any]) -> None:
    """Raise SettingError if versions, models or non-local settings differ between ranks."""
    ranks.check_equal("penstock and mlx-lm", [__version__, version("mlx-lm")])
    ranks.check_equal("the model's config.json", model)
    shared = {
        name: value
        for name, value in limits.items()
        if not setting_of(EngineSettings, name).is_local
    }
    ranks.check_equal("all settings but memory limits and folders", shared)


def _is_single() -> bool:
    """Return whether `mlx.launch` started one process; MLX fails on its empty host file."""
    file = os.environ.get("MLX_HOSTFILE")
    return bool(file) and Path(file or "").is_file() and not Path(file or "").read_text().strip()


def _end(why: str) -> None:
    print(f"penstock: the group has ended: {why}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    with suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        if any(name in word for word in parent.cmdline() for name in LAUNCHERS):
            time.sleep(PRINT_SECONDS)
            parent.terminate()
    os._exit(1)


def _end_with_launcher() -> None:
    """Send SIGTERM to this process when `mlx.launch` exits, which closes its standard input."""
    if "MLX_RANK" not in os.environ or not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def watch() -> None:
        poll = select.poll()
        poll.register(0, 0)  # no events requested: wakes only when the other end is closed
        poll.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="penstock-launcher", daemon=True).start()
