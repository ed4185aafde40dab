"""A run goes on after a worker process of pytest-xdist crashed.

pytest-xdist 3.8 deals out all files of a crashed worker again, finished ones included. A new worker
that gets a finished file waits for ever: it reports no test, so nothing more is dealt to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Return the scheduler of `--dist loadfile`; pytest-xdist makes all others."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class UnfinishedFileScheduling(LoadFileScheduling):
        """Deals out what a crashed worker left, without the test that crashed."""

        def remove_node(self, node: WorkerController) -> str | None:
            """Remove a worker; return the test that it was running, or None."""
            files = self.assigned_work.pop(node)
            left = [
                (path, name) for path in files for name, done in files[path].items() if not done
            ]
            if not left:
                return None
            path, crashed = left[0]
            files[path][crashed] = True  # it is reported as failed
            self.workqueue.update({path: files[path] for path, _ in left[1:]})
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return UnfinishedFileScheduling(config, log)
