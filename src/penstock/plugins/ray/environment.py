"""Environment variables that Ray reads when it is imported; this module does not import it."""

from __future__ import annotations

import os
from pathlib import Path

TOKEN_FILE = Path.home() / ".ray" / "auth_token"
"""Ray's token file, which `ray.init()` creates for all Ray clusters of this user."""
START_SECONDS = "120"
REGISTER_SECONDS = "600"
"""Seconds for a replica's process to start. After Ray's default of 60, another process would be
started, which on a busy machine is just as slow, so a killed replica might never be replaced."""
NICENESS = "0"
"""Niceness of replicas. With Ray's default of 15, other programs may starve them."""


def prepare_environment() -> None:
    """Set defaults: no usage statistics, longer timeouts, normal priority, token authentication.

    With a token, Ray admits only clients that present it. Clients present it automatically to a
    cluster that they find themselves, but not to one given by `RAY_ADDRESS`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", START_SECONDS)
    os.environ.setdefault("RAY_worker_register_timeout_seconds", REGISTER_SECONDS)
    os.environ.setdefault("RAY_worker_niceness", NICENESS)
    has_token = bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys())
    if "RAY_ADDRESS" in os.environ and (has_token or TOKEN_FILE.is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
