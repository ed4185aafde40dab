"""The server that tests of commands share."""

from servers import recall_server, told  # noqa: F401 - fixtures
