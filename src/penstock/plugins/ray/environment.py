"""Environment variables that Ray reads on import; this module does not import Ray."""

from __future__ import annotations

import os
from pathlib import Path

TOKEN_FILE = Path.home() / ".ray" / "auth_token"
"""Ray's token file, created by `ray.init()` for all Ray clusters of this user."""
START_SECONDS = "120"
REGISTER_SECONDS = "600"
"""Seconds for a replica's process to start. After Ray's default of 60 a second one would be
started, which on a busy machine is as slow, and a killed replica would never come back."""
NICENESS = "0"
"""Priority of replicas. With Ray's 15 other programs starve them, and they are ejected."""


def prepare_environment() -> None:
    """Set defaults: no usage statistics, longer start, normal priority, token authentication.

    With a token, Ray only admits clients that present it. Ray presents it automatically to a
    cluster it finds itself, but not to one named by `RAY_ADDRESS`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", START_SECONDS)
    os.environ.setdefault("RAY_worker_register_timeout_seconds", REGISTER_SECONDS)
    os.environ.setdefault("RAY_worker_niceness", NICENESS)
    has_token = bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys())
    if "RAY_ADDRESS" in os.environ and (has_token or TOKEN_FILE.is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
