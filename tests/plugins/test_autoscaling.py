"""The autoscaling policy, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.plugins.ray.autoscaling import CLAIMED, MOST_CLAIMED, desired, policy


@pytest.mark.parametrize(
    ("requests", "target", "claimed", "wanted"),
    [
        (0, 4.0, [], 1),
        (4, 4.0, [0.1], 1),
        (4.1, 4.0, [0.1], 2),
        (40, 4.0, [0.5] * 3, 10),
        (1, 4.0, [MOST_CLAIMED], 1),
        (1, 4.0, [MOST_CLAIMED + 0.01], 2),
        (1, 4.0, [1.0, 1.0, 1.0], 4),
        (0, 4.0, [0.0, 0.0, 0.0], 1),  # what is held and could be evicted keeps no replica alive
    ],
)
def test_desired_replicas_are_maximum_of_load_and_memory(
    requests: float, target: float, claimed: list[float], wanted: int
) -> None:
    assert desired(requests, target, claimed) == wanted


@pytest.mark.parametrize("metrics", [None, {}, {CLAIMED: {"a": 0.9, "b": 0.9}}])
def test_autoscaling_policy_reads_ray_context(metrics: object) -> None:
    context = SimpleNamespace(
        aggregated_metrics=metrics,
        config=SimpleNamespace(target_ongoing_requests=4.0),
        total_num_requests=3,
    )
    assert policy(context) == (3 if metrics else 1, {})
