"""Run coding agents against our server, two turns each, and print what of them was cached.

    python tests/agents/run_agents.py FOLDER      (make test-agents)

The programs are installed from npm into FOLDER. Server and program then run in a network namespace
with loopback alone, the program with an empty home, an environment of its own and a made-up key.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

PORT = 8089
URL = f"http://127.0.0.1:{PORT}"
LEAST_SHARE = 0.9
"""Of the second turn's prompt, that must have been cached."""
PACKAGES = ("@anthropic-ai/claude-code", "@openai/codex", "opencode-ai")
SCRIPTS = ("@anthropic-ai/claude-code/install.cjs", "opencode-ai/postinstall.mjs")
"""What the packages run when they are installed, where npm does not."""
CODEX_CONFIG = f"""model = "recall"
model_provider = "penstock"
[model_providers.penstock]
name = "penstock"
base_url = "{URL}/v1"
wire_api = "responses"
env_key = "PENSTOCK_KEY"
"""
OPENCODE_CONFIG = json.dumps(
    {
        "provider": {
            "penstock": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{URL}/v1", "apiKey": "made-up"},
                "models": {"recall": {"limit": {"context": 100_000, "output": 512}}},
            }
        }
    }
)
FILES = {
    "codex": (".codex/config.toml", CODEX_CONFIG),
    "opencode": (".config/opencode/opencode.json", OPENCODE_CONFIG),
}
ENVIRONMENT = {
    "claude": {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": "made-up"},
    "codex": {"PENSTOCK_KEY": "made-up"},
    "opencode": {},
}
CODEX = ("exec", "--skip-git-repo-check")
TURNS = {
    "claude": (("-p", "--model", "recall", "Hi"), ("-p", "--model", "recall", "--continue", "So?")),
    "codex": ((*CODEX, "Hi"), (*CODEX, "resume", "--last", "So?")),
    "opencode": (
        ("run", "-m", "penstock/recall", "Hi"),
        ("run", "-c", "-m", "penstock/recall", "So?"),
    ),
}


def main() -> int:
    """Install, enter the namespace, run; the exit code says whether all turns were cached."""
    for needed in ("node", "npm", "unshare", "ip"):
        if shutil.which(needed) is None:
            print(f"there is no {needed}; install Node 20 with npm, util-linux and iproute2")
            return 2
    folder = Path(sys.argv[1]).resolve()
    if "--inside" not in sys.argv:
        _install(folder)
        command = [sys.executable, __file__, str(folder), "--inside"]
        return subprocess.run(
            ["unshare", "--net", "--map-root-user", *command], check=False
        ).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print(f"{'agent':<10}{'turn':>5}{'prompt tokens':>15}{'cached':>10}{'share':>8}")
    shares = [_run(agent, folder) for agent in TURNS]
    return 0 if min(shares) >= LEAST_SHARE else 1


def _install(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), *PACKAGES]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for script in SCRIPTS:
        path = folder / "node_modules" / script
        subprocess.run(["node", path.name], cwd=path.parent, check=True, stdout=subprocess.DEVNULL)


def _run(agent: str, folder: Path) -> float:
    """Run an agent's turns on a fresh server; return the cached share of the last one."""
    serve = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "--port",
        str(PORT),
        "--memory-limit",
        "2GB",
    ]
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL)
    try:
        _wait(server)
        with tempfile.TemporaryDirectory() as home:
            for number, turn in enumerate(TURNS[agent], 1):
                _turn(agent, folder, Path(home), turn)
                prompt, cached = _largest(number)
                share = cached / prompt
                print(f"{agent:<10}{number:>5}{prompt:>15,}{cached:>10,}{share:>8.1%}", flush=True)
        return share
    finally:
        server.terminate()
        server.wait(30)


def _wait(server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{URL}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def _turn(agent: str, folder: Path, home: Path, arguments: tuple[str, ...]) -> None:
    work = home / "work"
    work.mkdir(exist_ok=True)
    if agent in FILES:
        name, text = FILES[agent]
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], **ENVIRONMENT[agent]}
    subprocess.run(
        [str(folder / "node_modules" / ".bin" / agent), *arguments],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=300,
        check=True,
    )


def _largest(turn: int) -> tuple[int, int]:
    """Return the prompt and cached tokens of a turn: titles and the like are shorter."""
    with httpx.stream("GET", f"{URL}/v1/live") as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                recent = json.loads(line.removeprefix("data: "))["requests"]
                break
    longest = sorted(recent, key=lambda one: one["prompt_tokens"])[-turn:]
    newest = max(longest, key=lambda one: one["started"])
    return newest["prompt_tokens"], newest["cached_tokens"]


if __name__ == "__main__":
    sys.exit(main())
