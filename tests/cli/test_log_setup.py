"""Logs of a server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOGGING = """
import logging
from penstock.cli.log_setup import set_up_logs
from penstock.config import NOTICES, ServerSettings
set_up_logs(ServerSettings(log_format="{log_format}"))
from huggingface_hub.utils.logging import get_logger
get_logger("huggingface_hub.utils").warning("retrying")
get_logger("penstock").warning("served")
logging.getLogger("penstock").setLevel(logging.INFO)  # as while a model is loaded
logging.getLogger(NOTICES).info("reloaded")
logging.getLogger("penstock.models").info("reading")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_retries_of_downloads_are_not_logged(log_format: str) -> None:
    """The library would print them as text, whatever the format."""
    settings = {name: value for name, value in os.environ.items() if name != "HF_HUB_VERBOSITY"}
    code = LOGGING.format(log_format=log_format)
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True
    )
    assert "served" in done.stderr
    assert "retrying" not in done.stderr


def test_notices_are_shown_without_other_information() -> None:
    code = LOGGING.format(log_format="text")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["penstock: served", "penstock: reloaded"]
