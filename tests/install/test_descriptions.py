"""Deployment files for containers, Kubernetes and Homebrew: validators accept them, flags exist."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from penstock.cli.background_service import ServiceRun, launchd_agent
from penstock.cli.commands import app
from penstock.config import ServerSettings

PACKAGING = Path(__file__).parents[2] / "packaging"
FORMULA = PACKAGING / "homebrew" / "penstock.rb"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((PACKAGING / name).read_text()))


def checked(tools: Path, *command: str | Path) -> None:
    program, *words = command
    done = subprocess.run([tools / program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_accepts_containerfile(tools: Path) -> None:
    checked(tools, "hadolint", PACKAGING / "Containerfile")


def test_kubernetes_schema_accepts_example(tools: Path) -> None:
    checked(tools, "kubernetes-validate", "--strict", PACKAGING / "kubernetes.yaml")


def test_serve_commands_in_deployment_files_parse() -> None:
    """The flags are those of `penstock serve`, with `${NAME:-value}` replaced by its value."""
    deployment = documents("kubernetes.yaml")[0]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (compose,) = documents("compose.yaml")
    commands = [container["args"], compose["services"]["penstock"]["command"]]
    for words in commands:
        values = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in words]
        assert values[0] == "serve"
        serve: Any = get_command(app)
        serve.commands["serve"].make_context("serve", values[1:])


def test_pod_grace_period_exceeds_drain_timeout() -> None:
    pod = documents("kubernetes.yaml")[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    drain = int(container["args"][container["args"].index("--drain-timeout") + 1])
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain + sleep
    (compose,) = documents("compose.yaml")
    grace = compose["services"]["penstock"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > ServerSettings().drain_timeout_seconds


def test_kubernetes_probes_use_existing_routes() -> None:
    (container,) = documents("kubernetes.yaml")[0]["spec"]["template"]["spec"]["containers"]
    paths = {probe: container[probe]["httpGet"]["path"] for probe in container if "Probe" in probe}
    assert paths == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }


def test_homebrew_formula_follows_cookbook() -> None:
    """In the order of `brew style`, with a service that restarts after a crash, and a test."""
    text = FORMULA.read_text()
    order = ["desc", "homepage", "url", "sha256", "license", "depends_on", "def install"]
    order += ["service do", "test do"]
    places = [text.index(f"\n  {word}") for word in order]
    assert places == sorted(places)
    (described,) = re.findall(r'desc "(.*)"', text)
    assert len(described) < 80 and not described.startswith(("A ", "An ", "The "))
    assert not described.endswith(".")


def test_homebrew_service_restarts_and_stops_as_penstock_service_does() -> None:
    """launchd counts a signal alone as a crash: a server whose engine died exits with 1."""
    agent = plistlib.loads(launchd_agent(ServiceRun(["penstock", "serve"], Path("/")), Path("log")))
    text = FORMULA.read_text()
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert "\n    keep_alive successful_exit: false\n" in text
    assert f"\n    stop_timeout {agent['ExitTimeOut']}\n" in text
    assert agent["ExitTimeOut"] > ServerSettings().drain_timeout_seconds


@pytest.mark.skipif(shutil.which("ruby") is None, reason="no ruby here")
def test_homebrew_formula_is_valid_ruby() -> None:
    subprocess.run(["ruby", "-c", FORMULA], check=True, capture_output=True)
