"""The snapshot stream of several models: it loads no model, and outlives each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from live_snapshots import watching
from patience import SOON
from served_pool import ONE, Address, served, spec
from servers import wait_until

from penstock.recall import MODEL_PATH
from penstock.server import live


def until(
    snapshots: Iterator[dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return the first of twenty snapshots that matches."""
    seen = [next(snapshots)]
    while not wanted(seen[-1]):
        assert len(seen) < 20, [(shown["model"], shown["models"]) for shown in seen]
        seen.append(next(snapshots))
    return seen[-1]


def states(snapshot: dict[str, Any]) -> dict[str, str]:
    return {model["name"]: model["state"] for model in snapshot["models"]}


def counted(address: Address) -> dict[str, int]:
    kinds = address.several.pool.ledger.by_class()
    return {kind.value: nbytes for kind, nbytes in kinds.items()}


@pytest.fixture
def address() -> Iterator[Address]:
    with served([spec("first", MODEL_PATH), spec("second", MODEL_PATH, pinned=True)], ONE) as both:
        yield both


def test_snapshot_without_loaded_model_shows_memory_usage(address: Address) -> None:
    with watching(address.url) as snapshots:
        first, second = next(snapshots), next(snapshots)
    assert states(second) == {"first": "away", "second": "away"}, "watching loads no model"
    assert [model["pinned"] for model in first["models"]] == [False, True]
    assert (first["model"], first["tree"], first["requests"]) == ("", None, [])
    assert first["stats"]["limit_bytes"] == ONE
    assert first["stats"]["used_bytes"] == address.several.pool.ledger.used_bytes
    assert first["stats"]["by_kind"]["prompts"] == first["stats"]["used_bytes"] > 0


def test_page_is_served_without_loading(address: Address) -> None:
    with httpx.Client(base_url=address.url, timeout=SOON) as http:
        assert http.get("/").status_code == http.get("/page/app.js").status_code == 200
    assert {model["state"] for model in address.models().values()} == {"away"}


def test_reference_is_served_without_loading(address: Address) -> None:
    with httpx.Client(base_url=address.url, timeout=SOON) as http:
        assert http.get("/docs").status_code == 200
        assert http.get("/docs/files/swagger-ui.css").status_code == 200
        document = http.get("/openapi.json").json()
        assert "/v1/models/{model_id}/load" in document["paths"]
        assert "while one is loaded" in document["info"]["description"]
        assert {model["state"] for model in address.models().values()} == {"away"}
        address.answer("second")
        assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]
    assert address.models()["first"]["state"] == "away"


def test_live_stream_continues_with_next_loaded_model(address: Address) -> None:
    with watching(address.url) as snapshots:
        assert next(snapshots)["model"] == ""
        address.answer("first")
        shown = until(snapshots, lambda shown: shown["model"] == "first")
        assert states(shown) == {"first": "loaded", "second": "away"}
        assert shown["history"] is not None and shown["tree"] is not None
        until(snapshots, lambda shown: shown["requests"])
        until(snapshots, lambda shown: shown["stats"]["by_kind"] == counted(address))
        address.answer("second")  # for which the first one goes
        shown = until(snapshots, lambda shown: shown["model"] == "second")
        assert states(shown) == {"first": "away", "second": "loaded"}
        httpx.post(f"{address.url}/v1/models/second/unload", json={}, timeout=SOON)
        shown = until(snapshots, lambda shown: states(shown)["second"] == "away")
        assert shown["model"] == "" and shown["stats"]["by_kind"] == counted(address)


def test_requested_model_is_shown_once_loaded() -> None:
    slow = threading.Event()
    specs = [spec("first", MODEL_PATH), spec("second", MODEL_PATH, slow)]
    with served(specs, 2 * ONE) as address:
        address.answer("first")
        with watching(address.url, model="second-alias") as snapshots:
            assert next(snapshots)["model"] == "first"
            asking = threading.Thread(target=address.answer, args=("second",))
            asking.start()
            shown = until(snapshots, lambda shown: states(shown)["second"] == "loading")
            assert shown["model"] == "first"
            slow.set()
            until(snapshots, lambda shown: shown["model"] == "second")
            asking.join()
        with watching(address.url, model="first") as snapshots:
            assert next(snapshots)["model"] == "first"
        unknown = httpx.get(f"{address.url}/v1/live?model=third", timeout=SOON)
        assert unknown.status_code == 404 and "first, second" in unknown.text


def test_draining_ends_live_stream(address: Address) -> None:
    address.answer("first")
    with watching(address.url) as snapshots:
        next(snapshots)
        address.several.drain(SOON)
        for _ in snapshots:
            pass
    assert httpx.get(f"{address.url}/v1/live").status_code == 503
    for path in ("health", "ready"):
        told = httpx.get(f"{address.url}/{path}").json()
        assert (told["model"], told["models"]) == ("first", ["first", "second"])


def test_watcher_limit_counts_all_models(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WATCHERS", 1)

    def refused() -> bool:
        with httpx.stream("GET", f"{address.url}/v1/live", timeout=SOON) as answer:
            return answer.status_code == 503

    with watching(address.url) as snapshots:
        next(snapshots)
        assert refused()
    wait_until(lambda: not refused())
