"""Image headers and remote addresses: nothing is decoded, no private address is fetched."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.image_reader import ImageError
from penstock.server import remote_images
from penstock.server.images import MOST_PIXELS, data_of, file_of
from penstock.server.remote_images import fetch, public_address

PNG = b"\x89PNG\r\n\x1a\n" + bytes((0, 0, 0, 13)) + b"IHDR"


def png(width: int, height: int) -> bytes:
    return PNG + width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes(9)


JPEG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffc0001108003c0050030122")
WEBP = {
    "VP8 ": b"VP8 " + bytes(4) + bytes(3) + b"\x9d\x01\x2a" + bytes((80, 0, 60, 0)) + bytes(9),
    "VP8L": b"VP8L" + bytes(4) + b"\x2f" + (79 | 59 << 14).to_bytes(4, "little") + bytes(9),
    "VP8X": b"VP8X" + bytes(8) + bytes((79, 0, 0, 59, 0, 0)) + bytes(9),
}


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (png(80, 60), "PNG"),
        (JPEG, "JPEG"),
        (b"GIF89a" + bytes((80, 0, 60, 0)), "GIF"),
        *((b"RIFF" + bytes(4) + b"WEBP" + data, "WEBP") for data in WEBP.values()),
    ],
    ids=["PNG", "JPEG", "GIF", *WEBP],
)
def test_image_size_is_read_from_header(data: bytes, form: str) -> None:
    file = file_of(data)
    assert (file.format, file.width, file.height) == (form, 80, 60)


@pytest.mark.parametrize("side", [0, 6_325, 2**32 - 1])
def test_pixels_are_bounded_before_decoding(side: int) -> None:
    assert side**2 > MOST_PIXELS or not side
    with pytest.raises(ImageError, match="pixels"):
        file_of(png(side, side))


@given(
    st.binary(max_size=80), st.sampled_from([PNG, JPEG[:20], b"GIF89a", b"RIFF\0\0\0\0WEBPVP8X"])
)
def test_random_bytes_are_valid_image_or_refused(rest: bytes, head: bytes) -> None:
    try:
        file = file_of(head + rest)
    except ImageError:
        return
    assert 0 < file.width * file.height <= MOST_PIXELS


@pytest.mark.parametrize("url", ["data:image/png,abc", "data:image/png;base64", "data:;base64,~~"])
def test_other_data_urls_are_refused(url: str) -> None:
    with pytest.raises(ImageError):
        data_of(url)
    assert data_of("data:image/png;base64," + base64.b64encode(b"a").decode()) == b"a"


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "10.1.2.3", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("::1", "fe80::1", "fd00::1", "::ffff:127.0.0.1", "224.0.0.1", "2130706433", "100.64.0.1"),
    ],
)
def test_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(ImageError):
        public_address(host, 80)


@pytest.mark.parametrize("number", ["8.8.8.8", "2606:4700:4700::1111"])
def test_public_addresses_are_accepted(number: str) -> None:
    assert public_address(number, 443) == number


@pytest.mark.parametrize(
    "url", ["ftp://8.8.8.8/a", "http://me@8.8.8.8/a", "http:///a", "http://[/"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ImageError):
        fetch(url, 1_000)


class Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:1/secret")
            self.end_headers()
            return
        self.send_response(200 if self.path != "/gone" else 404)
        self.end_headers()
        self.wfile.write(b"x" * (2_000 if self.path == "/long" else 10))

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    made = HTTPServer(("127.0.0.1", 0), Pictures)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


def test_fetch_bounds_bytes_and_checks_redirects(server: str) -> None:
    """The address of this server counts as a public one."""
    port = int(server.rpartition(":")[2])

    def numbered(host: str, asked: int) -> str:
        return host if asked == port else public_address(host, asked)

    with pytest.raises(ImageError, match="not a public address"):
        fetch(f"{server}/a", 1_000)
    assert fetch(f"{server}/a?b=c", 1_000, numbered) == b"x" * 10
    with pytest.raises(ImageError, match=r"1\.00 kB"):
        fetch(f"{server}/long", 1_000, numbered)
    with pytest.raises(ImageError, match="404"):
        fetch(f"{server}/gone", 1_000, numbered)
    with pytest.raises(ImageError, match="not a public address"):
        fetch(f"{server}/away", 1_000, numbered)


def test_fetch_from_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_images, "FETCH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ImageError, match="127"):
            fetch(f"http://127.0.0.1:{port}/a", 1_000, lambda host, port: host)
