"""A server shared by tests of commands, and commands run in this process."""

from run_command import call  # noqa: F401 - a fixture
from servers import recall_server, told  # noqa: F401 - fixtures
