"""Client connections: uvicorn's protocol, with limits that apply before authentication.

    open ──10 s──> head: 64 KiB, 256 fields ──30 s──> body ──> answer ──6 s──> next head, or closed

A few connections beyond `max_connections` are accepted, each only to request
`/health` or `/ready`. When these exceed their own limit, the oldest is closed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock import open_files
from penstock.config import ServerSettings
from penstock.plurals import counted
from penstock.server.problems import ServerError, response_for

logger = logging.getLogger(__name__)

FILES_ASIDE = 256
"""Open files reserved for other uses: the model, cold tiers and system probes."""
SPARE_PLACES = 64
"""Connections accepted beyond the limit, for health checks."""
SPARE_SECONDS = 2.0
"""Lifetime of a connection over the limit."""
ALWAYS = (b"/health", b"/ready")
"""Paths served on connections over the limit."""
PIPELINED = 8
"""Pipelined requests per connection above which parsing pauses."""
PIECE_BYTES = 256
"""Bytes of headers parsed at a time: at most 14 requests."""
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]*)?")
LATE_SECONDS = 1.0
"""Grace period after the body timeout, so that the application can answer in the API's format."""
LINGER_SECONDS = 2.0


class Connections:
    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.limit = room_for(settings.max_connections, open_files.limit())
        self.spare: dict[Connection, None] = {}
        if self.limit < settings.max_connections:
            logger.warning(
                "limiting connections to %d instead of --max-connections %d: this process may open "
                "%d files; raise the limit (ulimit -n)",
                self.limit,
                settings.max_connections,
                open_files.limit(),
            )

    def __call__(self, **arguments: Any) -> Connection:
        return Connection(self, **arguments)

    def opened(self, connection: Connection) -> bool:
        if len(connection.connections) <= self.limit:
            return True
        if len(self.spare) >= SPARE_PLACES:
            oldest = next(iter(self.spare))
            self.closed(oldest)
            oldest.transport.abort()
        self.spare[connection] = None
        return False

    def closed(self, connection: Connection) -> None:
        self.spare.pop(connection, None)

    def refuses(self, connection: Connection) -> bool:
        """Return whether a connection is over the limit, so that only `ALWAYS` is served.

        It becomes an ordinary connection once others have closed.
        """
        if connection in self.spare and len(connection.connections) <= self.limit:
            self.closed(connection)
        return connection in self.spare


def room_for(connections: int, files: int) -> int:
    """Return the connection limit that fits the limit on open files.

    >>> room_for(1_000, 65_536), room_for(1_000, 1_024), room_for(1_000, 256)
    (1000, 704, 64)
    """
    aside = min(FILES_ASIDE, files // 2) + SPARE_PLACES
    return max(1, min(connections, files - aside))


class Connection(HttpToolsProtocol):
    """A client connection, with a timer that runs while the server waits for the client."""

    def __init__(self, shared: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._shared = shared
        self._settings = shared.settings
        self.timeout_keep_alive = shared.settings.keep_alive_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._unused = 0
        """Bytes received since the last part forwarded to the application."""
        self._begun = False
        self._in_body = False
        self._unparsed = b""
        """Received bytes not yet parsed, since `PIPELINED` requests are pending."""
        self._watching: asyncio.TimerHandle | None = None
        """Timer that runs while sent bytes are unread by the client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        free = self._shared.opened(self)
        self._wait(self._settings.head_timeout_seconds if free else SPARE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self._watch_no_more()
        self._shared.closed(self)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # ---- timeouts

    def _wait(self, seconds: float | None) -> None:
        """Restart the timer for the client's next bytes; None stops it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        self._timer = None
        if self._begun and not self._in_body:
            if self._answering:  # the next request waits for its turn anyway
                return self._wait(self._settings.head_timeout_seconds)
            seconds = self._settings.head_timeout_seconds
            return self._refuse(408, f"the headers did not arrive within {seconds:g} s")
        return self.transport.abort()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch()
        elif self._unparsed:
            self.data_received(b"")
        elif self._in_body:
            self._wait(self._settings.keep_alive_seconds)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._watch_no_more()
        super().resume_writing()

    def _watch(self) -> None:
        """Abort the connection if the client reads nothing; streams have a shorter timeout."""
        self._watch_no_more()
        left = self.transport.get_write_buffer_size()
        seconds = 2 * self._settings.send_timeout_seconds
        self._watching = self.loop.call_later(seconds, self._look, left)

    def _look(self, before: int) -> None:
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch()

    def _watch_no_more(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    # ---- size limits

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, headers in small pieces; pause while many requests are pending."""
        data, self._unparsed = self._unparsed + data, b""
        while data and not self.transport.is_closing():
            if len(self.pipeline) >= PIPELINED and not self._in_body:
                self._unparsed = data
                self.flow.pause_reading()
                return
            size = len(data) if self._in_body else PIECE_BYTES
            piece, data = data[:size], data[size:]
            self._unused += len(piece)
            super().data_received(piece)
            if self._unused > self._settings.max_head_bytes:
                self._refuse_head()
        waiting = self._timer is not None or self.timeout_keep_alive_task is not None
        if not (waiting or self._answering or self.transport.is_closing()):
            # These bytes start no request: an empty line, or the end of a refused body.
            self._wait(self._settings.keep_alive_seconds)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True
        if self._timer is None or self.cycle is not None:
            self._wait(self._settings.head_timeout_seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self._settings.max_head_fields:
            self._refuse_head()
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._unused, self._in_body = 0, True
        self._wait(self._settings.body_timeout_seconds + LATE_SECONDS)
        spare = self._shared.refuses(self)
        if spare and self.url.partition(b"?")[0] not in ALWAYS:
            return self._refuse(503, f"{self._shared.limit} connections are open; try again later")
        hosts = [value for name, value in self.headers if name == b"host"]
        old = self.parser.get_http_version() == "1.0"  # has no Host; browsers do not use it
        if len(hosts) != 1 and not (old and not hosts):
            return self._refuse(400, f"the request has {len(hosts)} Host headers; it must have one")
        if hosts and HOST.fullmatch(hosts[0]) is None:
            return self._refuse(400, "the Host header is not a host with an optional port")
        super().on_headers_complete()
        if spare:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            self._unused = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            self._unused, self._begun, self._in_body = 0, False, False
            self._wait(None)
            super().on_message_complete()

    def _refuse_head(self) -> None:
        settings = self._settings
        self._refuse(
            431,
            f"the headers exceed {counted(settings.max_head_bytes, 'byte')} or "
            f"{settings.max_head_fields} fields",
        )

    # ---- refusing

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _unsupported_upgrade_warning(self) -> None:
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _refuse(self, status: int, why: str) -> None:
        """Send an error and close, unless a response is being sent."""
        if self.transport.is_closing():
            return
        if self._answering or self.pipeline:
            return self.transport.abort()
        path = (self.url or b"").partition(b"?")[0].decode("latin-1")
        response = response_for(path, ServerError(why, status=status))
        headers = [b"%b: %b" % header for header in response.raw_headers]
        first = f"HTTP/1.1 {status} ".encode()
        head = b"\r\n".join([first, *headers, b"connection: close", b"", b""])
        self.transport.write(head + bytes(response.body))
        self.transport.close()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        return None
