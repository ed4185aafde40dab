"""The cache endpoints and metrics over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import Running, serving, slow_shutdown, wait_until

from penstock_bench.recall import Dialogue

KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A separate server, since the contents of its tree matter."""
    with serving() as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.delete("/v1/cache").raise_for_status()
        yield client


def chat(http: httpx.Client, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"model": "recall", "messages": messages, "max_tokens": 16, **more}
    answer = http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json()


def fork(told: Dialogue, number: int) -> list[dict[str, str]]:
    """Return a conversation with a common beginning and more than a block of its own."""
    text = f"The code of the amber falcon is 48{number}1. " * 16
    return [*told.messages, {"role": "user", "content": text}]


def get(http: httpx.Client, path: str) -> dict[str, Any]:
    answer = http.get(path)
    answer.raise_for_status()
    return answer.json()


def explain(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/cache/explain", json=body)
    answer.raise_for_status()
    return answer.json()


# ---- what is held


def test_stats_count_requests(http: httpx.Client, told: Dialogue) -> None:
    before = get(http, "/v1/cache/stats")["stats"]
    first = chat(http, told.ask(told.questions[0]))["usage"]
    second = chat(http, told.ask(told.questions[1]))["usage"]
    after = get(http, "/v1/cache/stats")
    prompts = first["prompt_tokens"] + second["prompt_tokens"]
    assert after["stats"]["prompt_tokens"] - before["prompt_tokens"] == prompts
    served = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second))
    assert served > 0
    assert after["stats"]["hit_tokens"] - before["hit_tokens"] == served
    assert sum(after["stats"]["by_kind"].values()) == after["stats"]["used_bytes"]
    assert after["tiers"]["memory"]["used_bytes"] == after["stats"]["used_bytes"]
    assert after["tiers"]["disk"]["state"] == "off"


def test_tree_matches_engine(http: httpx.Client, server: Running, told: Dialogue) -> None:
    for number in range(3):
        chat(http, fork(told, number))
    tree = get(http, "/v1/cache/tree")
    stats = server.service.engine.stats()
    assert tree["count"] == stats.nodes == len(tree["nodes"]) and tree["left_out"] == 0
    assert tree["tokens"] == stats.held_tokens
    known: dict[int, dict[str, Any]] = {}
    for node in tree["nodes"]:
        if node["parent"] is None:
            assert node["start"] == 0
        else:  # parents come before their children, and end where these begin
            assert known[node["parent"]]["end"] == node["start"]
        known[node["id"]] = node
    assert max(sum(n["parent"] == node["id"] for n in tree["nodes"]) for node in tree["nodes"]) > 1


def test_tree_includes_text_only_on_request(http: httpx.Client) -> None:
    chat(http, [{"role": "user", "content": "The code of the amber falcon is 4821. " * 20}])
    assert all(node["text"] is None for node in get(http, "/v1/cache/tree")["nodes"])
    assert "falcon" not in http.get("/v1/cache/tree").text
    assert any("amber falcon" in n["text"] for n in get(http, "/v1/cache/tree?text=1")["nodes"])


def test_clear_evicts_unpinned_nodes(http: httpx.Client, server: Running, told: Dialogue) -> None:
    chat(http, told.ask(told.questions[0]))
    held = get(http, "/v1/cache/tree")
    assert held["count"] > 0
    cleared = http.delete("/v1/cache").json()
    assert cleared["nodes"] == held["count"] and cleared["nbytes"] > 0
    assert get(http, "/v1/cache/tree")["nodes"] == []
    server.service.engine.check()
    again = chat(http, told.ask(told.questions[0]))["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == 0


def test_cache_prompt_false_caches_nothing(http: httpx.Client) -> None:
    """As llama.cpp's field, in chat and completions."""
    text = "The code of the tin walrus is 4444. " * 20
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": text}),
    ):

        def usage(path: str = path, body: dict[str, Any] = body, **more: Any) -> dict[str, Any]:
            answer = http.post(path, json={**body, "max_tokens": 4, **more})
            answer.raise_for_status()
            counted: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
            return counted

        first = usage(cache_prompt=False)
        assert first["cached_tokens"] == first.get("cache_write_tokens", 0) == 0
        assert usage()["cached_tokens"] == 0
        tokens = get(http, "/v1/cache/tree")["tokens"]
        assert usage(cache_prompt=False)["cached_tokens"] == 0
        assert get(http, "/v1/cache/tree")["tokens"] == tokens
        assert usage()["cached_tokens"] > 100


# ---- why a prompt would hit or miss


def test_explain_reports_matched_tokens(http: httpx.Client, told: Dialogue) -> None:
    messages = fork(told, 1)
    assert explain(http, messages=messages)["held_tokens"] == 0
    usage = chat(http, messages)["usage"]
    found = explain(http, messages=messages)
    assert found["prompt_tokens"] == usage["prompt_tokens"]
    assert found["held_tokens"] == usage["prompt_tokens"] // 64 * 64
    other = explain(http, messages=fork(told, 2))
    assert 0 < other["held_tokens"] <= other["diverges_at"] < other["prompt_tokens"]
    assert other["reason"]


def test_explain_respects_cache_salt(http: httpx.Client, told: Dialogue) -> None:
    messages = told.ask(told.questions[0])
    chat(http, messages, cache_salt="mine")
    assert explain(http, messages=messages, cache_salt="mine")["held_tokens"] > 0
    assert explain(http, messages=messages, cache_salt="yours")["held_tokens"] == 0
    assert explain(http, messages=messages)["held_tokens"] == 0


def test_explain_accepts_text_and_tokens(http: httpx.Client) -> None:
    text = "The code of the amber falcon is 4821. " * 20
    body = {"model": "recall", "prompt": text, "max_tokens": 1}
    http.post("/v1/completions", json=body).raise_for_status()
    assert explain(http, prompt=text)["held_tokens"] >= 64
    assert explain(http, prompt=[1, 2, 3])["held_tokens"] == 0


def test_clear_waits_for_disk_and_reports_counts(tmp_path: Path) -> None:
    """While the folder is missing, pending deletions are reported."""
    folder, away = tmp_path / "cache", tmp_path / "away"
    body = {"prompt": "cedar " * 200, "max_tokens": 1}
    with (
        serving(engine={"ssd_cache_dir": folder, "block_size": 32}) as running,
        httpx.Client(base_url=running.url, timeout=60.0) as http,
    ):
        http.post("/v1/completions", json=body)
        wait_until(lambda: list(folder.rglob("*.safetensors")))
        wait_until(lambda: running.service.engine.stats().tiers["disk"].queued_bytes == 0)
        done = http.delete("/v1/cache")
        assert done.status_code == 200 and done.json()["pending"] == {}
        assert done.json()["tier_blocks"]["disk"] > 0
        assert not list(folder.rglob("*.safetensors"))
        folder.rename(away)
        folder.write_text("a file stands where the folder was")
        http.post("/v1/completions", json=body)
        wait_until(lambda: running.service.engine.stats().tiers["disk"].off is not None)
        left = http.delete("/v1/cache")
        assert left.status_code == 202 and "off" in left.json()["pending"]["disk"]


def test_explain_reports_clear(http: httpx.Client, told: Dialogue) -> None:
    messages = told.ask(told.questions[0])
    chat(http, messages)
    http.delete("/v1/cache")
    found = explain(http, messages=messages)
    assert found["evicted_for"] == "cleared" and found["evicted_seconds_ago"] >= 0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": [{"role": "user", "content": "a"}], "prompt": "a"},
        {"messages": []},
        {"messages": "a"},
        {"prompt": [-1]},
        {"prompt": [10**30]},
        {"prompt": [10**6]},
        {"prompt": 7},
        {"prompt": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        [],
    ],
)
def test_invalid_queries_are_400(http: httpx.Client, body: Any) -> None:
    answer = http.post("/v1/cache/explain", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


# ---- metrics


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_agree_with_engine(http: httpx.Client, server: Running, told: Dialogue) -> None:
    before = samples(http.get("/metrics").text)
    usage = chat(http, told.ask(told.questions[0]))["usage"]
    wait_until(lambda: server.service.recent[-1].seconds is not None)
    memory = "penstock_memory_used_bytes", (("kind", "nodes"),)

    def agree() -> bool:
        nonlocal told_now, stats
        told_now, stats = samples(http.get("/metrics").text), server.service.engine.stats()
        return told_now[memory] == stats.by_kind["nodes"]

    told_now, stats = before, server.service.engine.stats()
    wait_until(agree)  # not at once, if something was released in between

    def value(name: str, **labels: str) -> float:
        return told_now[name, tuple(sorted(labels.items()))]

    def grew(name: str, **labels: str) -> float:
        return value(name, **labels) - before.get((name, tuple(sorted(labels.items()))), 0.0)

    assert value("penstock_engine_up") == 1
    assert value("penstock_memory_limit_bytes") == stats.limit_bytes
    assert grew("penstock_prompt_tokens_total") == usage["prompt_tokens"]
    assert grew("penstock_generated_tokens_total") >= usage["completion_tokens"]
    assert grew("penstock_time_to_first_token_seconds_count") == 1
    assert 0 <= grew("penstock_inter_token_seconds_count") < usage["completion_tokens"]
    assert grew("penstock_requests_total", path="/v1/chat/completions", finish="stop") == 1
    assert value("penstock_answers", state="running") == 0
    for name, _ in told_now:
        assert name.startswith("penstock_")


def test_inter_token_time_is_measured(http: httpx.Client, told: Dialogue) -> None:
    def measured() -> float:
        return samples(http.get("/metrics").text)["penstock_inter_token_seconds_count", ()]

    before = measured()
    asked = told.ask(told.questions[0])
    # On a busy machine all tokens of a short answer may be there when the server looks.
    wait_until(lambda: chat(http, asked) and measured() > before)


def test_metrics_support_openmetrics(http: httpx.Client) -> None:
    answer = http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_metrics_report_dead_engine() -> None:
    with slow_shutdown(), serving() as running:
        running.service.engine.close()
        answer = httpx.get(f"{running.url}/metrics")
    assert answer.status_code == 200
    assert samples(answer.text)["penstock_engine_up", ()] == 0


# ---- keys


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/cache/stats"),
        ("GET", "/v1/cache/tree"),
        ("GET", "/v1/cache/tree?text=1"),
        ("POST", "/v1/cache/explain"),
        ("DELETE", "/v1/cache"),
        ("GET", "/v1/live"),
        ("GET", "/metrics"),
    ],
)
def test_cache_routes_require_key(keyed: Running, method: str, path: str) -> None:
    with httpx.Client(base_url=keyed.url) as http:
        assert http.request(method, path).status_code == 401
        wrong = {"Authorization": "Bearer another"}
        assert http.request(method, path, headers=wrong).status_code == 401
        right = {"Authorization": f"Bearer {KEY}"}
        with http.stream(method, path, headers=right) as answer:
            assert answer.status_code in (200, 415)  # an act says that its body is JSON


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with serving(api_key=KEY) as running:
        yield running


SPILLING = ("kv_tokens", "spilled_blocks_total", "spilled_read_bytes_total")
"""Metrics of a server with `--active-kv-size`."""


def test_docs_name_every_metric(http: httpx.Client, server: Running) -> None:
    chat(http, [{"role": "user", "content": "What is the code of the amber falcon?"}])
    wait_until(lambda: server.service.recent[-1].seconds is not None)
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    named = set(re.findall(r"`(penstock_\w+?)(?:\{[\w,]*\})?`", page))
    served = {
        re.sub(r"_(bucket|sum|count|created)$", "", name) if family.type == "histogram" else name
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for name in {sample.name for sample in family.samples} or {family.name}
        if not name.endswith("_created")
    }
    spilling = {f"penstock_{name}" for name in SPILLING}  # which this server does not
    assert named == served | spilling
    assert not served & spilling
