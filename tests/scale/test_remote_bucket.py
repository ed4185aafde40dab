"""A bucket as remote store: the real client against a small S3 server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("obstore")

from penstock.plugins.remote import Objects, open_objects

SOON = 10.0
DATE = "Sat, 01 Jan 2000 00:00:00 GMT"


class Bucket(ThreadingHTTPServer):
    """Values by path; denies requests or hangs if configured."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.values: dict[str, bytes] = {}
        self.go = threading.Event()
        self.go.set()
        self.denies = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, raw: bytes = b"", told: str | None = None) -> None:
        self.send_response(status)
        given = {"Content-Length": str(len(raw)), "ETag": '"1"', "Last-Modified": DATE}
        if told is not None:
            given["Content-Range"] = told
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def found(self) -> bytes | None:
        self.server.go.wait(SOON)
        return self.server.values.get(self.path)

    def do_HEAD(self) -> None:
        raw = self.found()
        if raw is None:
            self.answer(404)
        else:
            self.answer(200, raw)

    def do_GET(self) -> None:
        raw = self.found()
        if raw is None:
            self.answer(404)
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        if first >= len(raw):
            self.answer(416)
            return
        part = raw[first : last + 1]
        told = f"bytes {first}-{first + len(part) - 1}/{len(raw)}"
        self.answer(206, part, told)

    def do_PUT(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.denies:
            self.answer(403)
            return
        self.server.values[self.path] = raw
        self.answer(200)

    def do_POST(self) -> None:
        """Remove the listed objects."""
        raw = self.rfile.read(int(self.headers["Content-Length"])).decode()
        where = self.path.partition("?")[0]
        keys = re.findall("<Key>(.*?)</Key>", raw)
        for key in keys:
            self.server.values.pop(f"{where}/{key}", None)
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    server = Bucket()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name, value in {
        "AWS_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "open-sesame",
    }.items():
        monkeypatch.setenv(name, value)
    yield server
    server.go.set()
    server.shutdown()
    thread.join(SOON)
    server.server_close()


def opened(seconds: float = SOON) -> Objects:
    return open_objects(
        "s3://bucket/folder", ttl_seconds=60, timeout_seconds=seconds, put_seconds=seconds
    )


def test_object_can_be_put_read_and_removed(bucket: Bucket) -> None:
    objects, raw = opened(), bytes(range(256)) * 40
    assert objects.has(["a/b", "c"]) == [False, False]
    assert objects.get("a/b", 0, 10) is None
    assert objects.put("a/b", raw)
    assert list(bucket.values) == ["/bucket/folder/a/b"]
    assert objects.has(["a/b", "c"]) == [True, False]
    for at, nbytes in ((0, 100), (10_000, 4_000), (0, len(raw)), (5, 1)):
        found = objects.get("a/b", at, nbytes)
        assert found is not None
        assert (found.nbytes, bytes(found.raw)) == (len(raw), raw[at : at + nbytes])
    behind = objects.get("a/b", len(raw), 100)
    assert behind is not None and (behind.nbytes, len(behind.raw)) == (len(raw), 0)
    objects.remove(["a/b", "c"])
    assert not bucket.values


def test_hanging_bucket_times_out(bucket: Bucket) -> None:
    objects = opened(0.3)
    objects.put("a", b"1")
    bucket.go.clear()
    for act in (lambda: objects.has(["a"]), lambda: objects.get("a", 0, 10)):
        began = time.monotonic()
        with pytest.raises(OSError) as caught:
            act()
        assert time.monotonic() - began < 3.0
        assert "\n" not in str(caught.value) and "sesame" not in str(caught.value)


def test_read_only_bucket_can_be_read(bucket: Bucket) -> None:
    objects = opened()
    objects.put("a", b"12")
    bucket.denies = True
    assert not objects.put("b", b"1")
    found = objects.get("a", 0, 10)
    assert found is not None and bytes(found.raw) == b"12"


def test_empty_object_is_distinct_from_missing(bucket: Bucket) -> None:
    objects = opened()
    bucket.values["/bucket/folder/a"] = b""
    found = objects.get("a", 0, 10)
    assert found is not None and (found.nbytes, len(found.raw)) == (0, 0)


def test_unreachable_bucket_error_names_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"AWS_ENDPOINT": "http://127.0.0.1:1", "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
        opened(1.0).has(["a"])
