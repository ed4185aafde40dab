"""A new kind of cold tier is one registration, and appears in all statistics."""

from __future__ import annotations

import ast
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import SOON
from rich.console import Console
from servers import serving

import penstock
from penstock import config
from penstock.cli.banner import banner
from penstock.cli.top_screen import drawn
from penstock.engine.offload.tier_kind import StoreOpener, TierContent
from penstock.engine.offload.tier_kinds import TIER_KINDS
from penstock.kv.block_spans import RECORD_TOKENS
from penstock.memory.sizes import format_bytes
from penstock.tiers.disk.disk_store import SSDStore

SOURCE = Path(penstock.__file__).parent
LIMIT_BYTES = 50_000_000


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of tier that penstock does not have: a second folder."""

    def opener(_: config.EngineSettings, content: TierContent) -> StoreOpener:
        return StoreOpener(
            lambda: SSDStore(
                tmp_path / "shelf",
                LIMIT_BYTES,
                fingerprint=content.fingerprint,
                spans=content.spans,
            ),
            "shelf",
        )

    kind = replace(
        TIER_KINDS["disk"],
        name="shelf",
        where="on the shelf",
        metrics_prefix="shelf",
        address=lambda _: "at the wall",
        opener=opener,
    )
    monkeypatch.setitem(TIER_KINDS, "shelf", kind)


def written(url: str, name: str) -> dict[str, Any]:
    """Return the server's statistics once a tier has written a block."""
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        figures: dict[str, Any] = httpx.get(f"{url}/v1/cache/stats", timeout=SOON).json()
        if figures["stats"]["tiers"][name]["counts"]["written_blocks"]:
            return figures
        time.sleep(0.05)
    raise AssertionError(f"nothing was written: {figures['stats']['tiers']}")


@pytest.mark.usefixtures("shelf")
def test_new_tier_kind_is_written_and_in_all_statistics(tmp_path: Path) -> None:
    engine = {"ssd_cache_dir": tmp_path / "folder", "ssd_cache_limit": LIMIT_BYTES}
    body = {"prompt": [7 + i % 90 for i in range(RECORD_TOKENS + 10)], "max_tokens": 2}
    with serving(engine=engine) as running:
        url = running.url
        for _ in range(2):  # a prompt that is asked for again is worth the tier
            httpx.post(f"{url}/v1/completions", json=body, timeout=SOON).raise_for_status()
        figures = written(url, "shelf")
        assert list(figures["tiers"]) == ["memory", "disk", "remote", "shelf"]
        assert figures["tiers"]["shelf"]["state"] == "on"
        assert figures["tiers"]["shelf"]["limit_bytes"] == LIMIT_BYTES
        assert figures["tiers"]["remote"]["state"] == "off"
        metrics = httpx.get(f"{url}/metrics", timeout=SOON).text
        assert "penstock_shelf_limit_bytes 5e+07" in metrics
        assert 'penstock_shelf_blocks_total{outcome="written"}' in metrics
        assert "penstock_ssd_up 1.0" in metrics, "as it was named before"
        lines = banner(running.service.engine, "model", running.service.settings, 8_000)
        assert any(line.startswith("shelf    at the wall; ") for line in lines)
        assert running.service.engine.stats().tiers["shelf"].counts.written_blocks > 0
        top = shown(url)
        assert "shelf" in top
        held = running.service.engine.stats().tiers["shelf"].held_bytes
        assert f"shelf    {format_bytes(held)} of 50.00 MB; " in top
    assert list((tmp_path / "shelf").rglob("*.safetensors"))


def shown(url: str) -> str:
    """Return the output of `penstock top`."""
    with httpx.stream("GET", f"{url}/v1/live", timeout=SOON) as answer:
        line = next(line for line in answer.iter_lines() if line.startswith("data: "))
    console = Console(width=160)
    with console.capture() as capture:
        console.print(drawn(httpx.Response(200, text=line[6:]).json(), url, 100, 40))
    return capture.get()


def names_remote(node: ast.AST) -> bool:
    """Return whether a node is the tier's name or one of its settings."""
    if isinstance(node, ast.Attribute):
        return node.attr.startswith("remote_cache")
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and (text == "remote" or text.startswith("remote_cache"))


def test_core_mentions_remote_tier_in_two_files() -> None:
    """A tier kind is a store, its settings and a line in a list."""
    naming = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if any(names_remote(node) for node in ast.walk(ast.parse(file.read_text())))
    }
    assert {name for name in naming if not name.startswith("plugins/remote/")} == {
        "config/engine_settings.py",
        "engine/offload/tier_kinds.py",
    }
