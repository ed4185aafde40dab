"""The snapshot stream and the page's files over HTTP."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import httpx
import pytest
from live_snapshots import watching
from patience import SOON
from servers import Running, serving, slow_shutdown, wait_until

from penstock.server import live
from penstock.server.live import page_files
from penstock_bench.recall import Dialogue

PAGE = files("penstock.server") / "page"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def chat(url: str, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"model": "recall", "messages": messages, "max_tokens": 16, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def test_snapshot_matches_engine(server: Running, told: Dialogue) -> None:
    usage = chat(server.url, told.ask(told.questions[0]))["usage"]
    with watching(server.url) as snapshots:
        first = next(snapshots)
    stats = server.service.engine.stats()
    assert first["stats"]["by_kind"] == stats.by_kind
    assert first["stats"]["limit_bytes"] == stats.limit_bytes
    assert first["model"] == "recall"
    assert first["max_batch_size"] == 8
    assert first["tree"]["count"] == stats.nodes
    assert first["history"]["at_seconds"][-1] == first["at_seconds"]
    (request,) = first["requests"][-1:]
    assert request["label"] == "/v1/chat/completions"
    assert request["prompt_tokens"] == usage["prompt_tokens"]
    assert request["explanation"]["reason"]


def test_snapshots_every_half_second_with_tree_on_change(server: Running, told: Dialogue) -> None:
    with watching(server.url) as snapshots:
        nodes = next(snapshots)["tree"]["count"]
        began = time.monotonic()
        later = [next(snapshots) for _ in range(4)]
        assert 1.5 <= time.monotonic() - began < SOON
        assert [snapshot["tree"] for snapshot in later] == [None] * 4
        assert all(snapshot["history"] is None for snapshot in later)
        chat(server.url, [{"role": "user", "content": "The code of the tiny owl is 17. " * 20}])
        trees = [tree for _ in range(4) if (tree := next(snapshots)["tree"]) is not None]
    assert trees[-1]["count"] > nodes


def test_snapshots_contain_no_prompt_text(server: Running) -> None:
    chat(
        server.url, [{"role": "user", "content": "The owner of the velvet walrus is Ottilie. " * 9}]
    )
    chat(
        server.url, [{"role": "user", "content": "The owner of the velvet walrus is Yvonne. " * 9}]
    )
    with httpx.stream("GET", f"{server.url}/v1/live", timeout=SOON) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                break
    assert "diverges_at" in line
    for word in ("walrus", "Ottilie", "Yvonne"):
        assert word not in line


def test_snapshot_measures_speed(server: Running) -> None:
    body = {
        "model": "recall",
        "prompt": [5, 6, 7],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    with watching(server.url) as snapshots:
        next(snapshots)
        asking = threading.Thread(
            target=lambda: httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        )
        asking.start()
        seen = [next(snapshots)["generated_per_second"] for _ in range(4)]
        asking.join()
    assert max(seen) > 0


def test_number_of_watchers_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "MOST_WATCHERS", 2)

    def refused(url: str) -> bool:
        with httpx.stream("GET", f"{url}/v1/live", timeout=SOON) as answer:
            return answer.status_code == 503

    with serving() as running:
        with watching(running.url) as one, watching(running.url) as other:
            next(one), next(other)
            assert refused(running.url)
        wait_until(lambda: not refused(running.url))


def test_engine_death_ends_stream() -> None:
    with slow_shutdown(), serving() as running, watching(running.url) as snapshots:
        next(snapshots)
        running.service.engine.close()
        began = time.monotonic()
        for _ in snapshots:
            pass
        assert time.monotonic() - began < SOON
        assert httpx.get(f"{running.url}/v1/live").status_code == 503


def test_draining_ends_stream() -> None:
    with serving() as running, watching(running.url) as snapshots:
        next(snapshots)
        began = time.monotonic()
        running.server.drain()
        for _ in snapshots:
            pass
        assert time.monotonic() - began < SOON


# ---- the files of the page


def test_page_files_are_served(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        page = http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        found = _Addresses.of(page.text)
        assert "page/app.js" in found
        modules = set(found)
        for name in found:
            answer = http.get(f"/{name}")
            if name in ("docs", "metrics", "v1/cache/stats"):
                continue
            assert answer.status_code == 200, name
            assert answer.headers["x-content-type-options"] == "nosniff"
            if name.endswith(".js"):
                imports = re.findall(r'from "\./([\w/]+(?:\.esm)?\.js)"', answer.text)
                modules.update(f"page/{module}" for module in imports)
        for name in modules - set(found):
            assert http.get(f"/{name}").status_code == 200, name


def test_every_page_file_is_used_or_a_license() -> None:
    names = set(page_files())
    text = "".join(entry.content.decode() for entry in page_files().values())
    unused = {name for name in names if name.rpartition("/")[2] not in text}
    assert unused <= {"index.html"}
    for folder in ("uplot", "marked"):
        assert "Permission is hereby granted" in (PAGE / folder / "LICENSE").read_text()


def test_page_allows_no_foreign_content(server: Running) -> None:
    page = httpx.get(server.url)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy
    for name, entry in page_files().items():
        if name.startswith(("uplot/", "marked/")):
            continue
        text = entry.content.decode()
        hosts = set(re.findall(r"https?://([\w.]+)", text)) - {"www.w3.org"}
        assert not hosts, f"{name} names {hosts}"
        assert "innerHTML" not in text and "eval(" not in text, name
        assert not re.search(r"\s(style|on\w+)=[\"']", text), f"{name} has inline code or style"


def test_page_files_support_etags(server: Running) -> None:
    first = httpx.get(f"{server.url}/page/app.js")
    again = httpx.get(f"{server.url}/page/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/nothing.js",
        "/page/../live.py",
        "/page/%2e%2e/live.py",
        "/page/..%2flive.py",
        "/page/%2fetc%2fpasswd",
        "/page/uplot/LICENSE",
    ],
)
def test_no_other_files_are_served(server: Running, path: str) -> None:
    answer = httpx.get(f"{server.url}{path}")
    assert answer.status_code in (401, 404)
    assert "import" not in answer.text


class _Addresses(HTMLParser):
    """Collects what a page refers to on its own server."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def of(cls, text: str) -> list[str]:
        parser = cls()
        parser.feed(text)
        return parser.found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and value and not value.startswith("#"):
                self.found.append(value)
