"""Dashboard and alerts: their metrics and labels exist in `/metrics`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from patience import SOON
from prometheus_client.parser import text_string_to_metric_families
from servers import serving

PACKAGING = Path(__file__).parents[2] / "packaging"
DASHBOARD = json.loads((PACKAGING / "grafana" / "penstock.json").read_text())
(ALERTS,) = yaml.safe_load((PACKAGING / "prometheus" / "penstock.yaml").read_text())["groups"]
NAME = re.compile(r"\bpenstock_\w+")
SELECTOR = re.compile(r"(\bpenstock_\w+)\{([^}]*)\}")
ADDED = {"instance"}
"""Labels that Prometheus adds."""


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for alert in ALERTS["rules"]:
        yield alert["expr"]


def faults(expression: str, samples: dict[str, set[str]]) -> list[str]:
    """List the unknown metrics of an expression, and labels that a metric lacks."""
    expression = expression.replace("penstock_remote_", "penstock_ssd_")  # tiers have equal names
    unknown = [name for name in NAME.findall(expression) if name not in samples]
    for name, selector in SELECTOR.findall(expression):
        labels = set(re.findall(r"(\w+)=", selector)) - ADDED
        unknown += [f"{name}.{label}" for label in labels - samples.get(name, set())]
    return unknown


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the labels of every sample of a server with a disk tier, by name."""
    folder = tmp_path_factory.mktemp("blocks")
    labels: dict[str, set[str]] = {}
    with serving(engine={"ssd_cache_dir": folder}) as running:
        ask = {"prompt": "The code", "max_tokens": 2}
        httpx.post(f"{running.url}/v1/completions", json=ask, timeout=SOON).raise_for_status()
        text = httpx.get(f"{running.url}/metrics", timeout=SOON).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_dashboard_expressions_use_existing_metrics(samples: dict[str, set[str]]) -> None:
    assert len(list(expressions())) > 30
    assert {text: faults(text, samples) for text in expressions() if faults(text, samples)} == {}


def test_check_detects_unknown_metrics(samples: dict[str, set[str]]) -> None:
    assert faults('sum(penstock_answer{state="x"})', samples) == [
        "penstock_answer",
        "penstock_answer.state",
    ]
    assert faults('penstock_answers{kind="running"}', samples) == ["penstock_answers.kind"]


def test_panels_do_not_overlap_and_alerts_have_remedies() -> None:
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & places, panel["title"]
        places |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for alert in ALERTS["rules"]:
        assert alert["annotations"].keys() == {"summary", "action"}


def test_monitoring_page_lists_every_alert() -> None:
    page = (PACKAGING.parent / "docs" / "watching.md").read_text()
    assert [alert["alert"] for alert in ALERTS["rules"] if f"`{alert['alert']}`" not in page] == []
