"""Environment variables of Ray, which it reads when it is imported: this file imports no Ray."""

from __future__ import annotations

import os
from pathlib import Path

TOKEN_FILE = Path.home() / ".ray" / "auth_token"
"""Ray's token file, made by `ray.init()` for every Ray of this user."""
START_SECONDS = "120"
REGISTER_SECONDS = "600"
"""Seconds that a replica's process has to begin. After Ray's 60 another is started in its place; on
a busy machine that one is as slow, and a replica that was killed never comes back."""
NICENESS = "0"
"""Priority of replicas. At Ray's 15 they starve beside other programs, and are ejected."""


def prepare_environment() -> None:
    """Set defaults: no usage reports, a longer start, normal priority, token authentication.

    With a token, `ray start` admits only clients that show it. Ray itself shows it to a Ray that it
    finds, but not to one named by `RAY_ADDRESS`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", START_SECONDS)
    os.environ.setdefault("RAY_worker_register_timeout_seconds", REGISTER_SECONDS)
    os.environ.setdefault("RAY_worker_niceness", NICENESS)
    has_token = bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys())
    if "RAY_ADDRESS" in os.environ and (has_token or TOKEN_FILE.is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
