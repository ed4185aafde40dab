"""Ejected replicas, and requests that are retried elsewhere."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from penstock.plugins.ray import environment
from penstock.plugins.ray.environment import prepare_environment
from penstock.plugins.ray.fleet_state import FleetState


@pytest.fixture
def calls() -> list[tuple[str, bool]]:
    return []


@pytest.fixture
def state(calls: list[tuple[str, bool]]) -> FleetState:
    """Return a state with two replicas, an attempt on each, and an unassigned attempt."""
    state = FleetState()
    state.there({"a": "", "b": ""})
    for name in ("at a", "at b", "nowhere"):

        def abandoned(name: str, replaced: bool) -> None:
            calls.append((name, replaced))

        state.begin(name, partial(abandoned, name))
    state.routed("at a", "a", 4, 3)
    state.routed("at b", "b", 4, 0)
    return state


def test_attempts_on_ejected_replica_are_abandoned(
    state: FleetState, calls: list[tuple[str, bool]]
) -> None:
    state.eject("a")
    assert calls == [("at a", False), ("nowhere", False)]
    assert state.is_ejected("a") and not state.is_ejected("b")
    assert (state.replicas, state.ejected, state.ejections) == (2, 1, 1)
    state.eject("a")
    assert len(calls) == 2 and state.ejections == 1


def test_recovered_replica_is_readmitted(state: FleetState) -> None:
    state.eject("a")
    state.readmit("a")
    assert state.ejected == 0
    state.eject("a")
    assert (state.ejected, state.ejections) == (1, 2)


def test_attempts_are_notified_once_replica_is_replaced(
    state: FleetState, calls: list[tuple[str, bool]]
) -> None:
    state.eject("a")
    calls.clear()
    state.there({"a": "", "b": ""})
    assert calls == []
    state.there({"b": "", "c": ""})
    assert calls == [("at a", True)]
    assert state.ejected == 0 and state.replicas == 2
    # One that goes without having been ejected drains: its answers go on.
    state.there({"c": ""})
    assert calls == [("at a", True)]


def test_finished_attempt_is_not_notified(state: FleetState, calls: list[tuple[str, bool]]) -> None:
    assert state.waiting == 1
    assert state.end("at a") == "a"
    assert state.end("nowhere") is None
    state.eject("a")
    assert calls == [] and state.waiting == 0
    assert (state.routed_requests, state.routed_blocks, state.known_blocks) == (2, 8, 3)


@pytest.mark.parametrize(
    ("address", "token", "given", "mode"),
    [
        ("127.0.0.1:6379", True, None, "token"),
        ("127.0.0.1:6379", False, None, None),
        (None, True, None, None),
        ("127.0.0.1:6379", True, "disabled", "disabled"),
    ],
)
def test_auth_token_is_passed_to_running_ray(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    address: str | None,
    token: bool,
    given: str | None,
    mode: str | None,
) -> None:
    file = tmp_path / "auth_token"
    if token:
        file.touch()
    variables = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": given}
    others = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED")
    started = (
        "RAY_raylet_start_wait_time_s",
        "RAY_worker_register_timeout_seconds",
        "RAY_worker_niceness",
    )
    own = dict.fromkeys((*others, *started))
    for name, value in {**variables, **own}.items():
        monkeypatch.setenv(name, value or "")  # so that it is as before, after the test
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "TOKEN_FILE", file)
    prepare_environment()
    assert os.environ.get("RAY_AUTH_MODE") == mode
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert [os.environ[name] for name in started] == ["120", "600", "0"]
