"""Download of images by URL, for `--allow-remote-images`.

A host is refused unless all of its IP addresses are public; the connection goes to the address that
was checked. Redirects, up to `REDIRECTS`, are checked in the same way.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse
from time import monotonic
from urllib.parse import SplitResult, urljoin, urlsplit

from penstock.memory.sizes import format_bytes
from penstock.models.image_reader import ImageError

FETCH_SECONDS = 10.0
"""Timeout of one image's download, redirects included."""
REDIRECTS = 3
CHUNK_BYTES = 65_536


def public_address(host: str, port: int) -> str:
    """Return the first IP address of a host; ImageError unless all of them are public."""
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ImageError(f"cannot resolve {host}: {error}") from None
    numbers = [str(address[4][0]) for address in known]
    for number in numbers:
        address = ipaddress.ip_address(number.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        if not mapped.is_global or mapped.is_multicast:
            raise ImageError(f"{host} is not a public address")
    return numbers[0]


def fetch(url: str, most_bytes: int, numbered: Callable[[str, int], str] = public_address) -> bytes:
    """Download the file at a public URL; ImageError if that fails. Blocking.

    Args:
        most_bytes: maximum size of the file.
        numbered: returns the IP address to connect to for a host and port, or raises ImageError.
    """
    until = monotonic() + FETCH_SECONDS
    for _ in range(1 + REDIRECTS):
        parts = _checked(url)
        try:
            answer = _get(parts, numbered, until, most_bytes)
        except (OSError, HTTPException, ValueError) as error:
            raise ImageError(f"{parts.hostname} cannot be read: {error}") from None
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise ImageError(f"it is redirected more than {REDIRECTS} times")


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and not parts.username
        _ = parts.port
    except ValueError:
        known = None
    if not known:
        raise ImageError("a URL must begin with https:// or http:// and name no user")
    return parts


class _Pinned(HTTPConnection):
    """Connection to a checked IP address; the host's name is used for TLS and headers."""

    def __init__(self, number: str, parts: SplitResult, seconds: float) -> None:
        assert parts.hostname is not None
        self._number, self._secure = number, parts.scheme == "https"
        port = parts.port or (443 if self._secure else 80)
        super().__init__(parts.hostname, port, timeout=seconds)

    def connect(self) -> None:
        plain = socket.create_connection((self._number, self.port), self.timeout)
        self.sock = plain
        if self._secure:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(plain, server_hostname=self.host)


def _get(
    parts: SplitResult, numbered: Callable[[str, int], str], until: float, most_bytes: int
) -> bytes | str:
    """Return the file, or the URL of a redirect."""
    assert parts.hostname is not None
    number = numbered(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    connection = _Pinned(number, parts, _left(until))
    try:
        path = parts.path or "/"
        connection.request("GET", f"{path}?{parts.query}" if parts.query else path)
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            return response.headers.get("Location", "")
        if response.status != 200:
            raise ValueError(f"it responds with status {response.status}")
        return _body(response, until, most_bytes)
    finally:
        connection.close()


def _body(response: HTTPResponse, until: float, most_bytes: int) -> bytes:
    whole = bytearray()
    while True:
        piece = response.read1(CHUNK_BYTES)
        if not piece:
            return bytes(whole)
        whole += piece
        if len(whole) > most_bytes:
            raise ValueError(f"the file is larger than {format_bytes(most_bytes)}")
        _left(until)


def _left(until: float) -> float:
    left = until - monotonic()
    if left <= 0:
        raise ValueError(f"it takes longer than {FETCH_SECONDS:.0f} s")
    return left
