"""Commands in this process."""

from run_command import call  # noqa: F401 - a fixture
