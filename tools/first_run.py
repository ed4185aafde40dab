"""Start the server on the embedded model, show its clients; then on a real model.

    python tools/first_run.py [--once] [--offline]

`make run` calls this: each example is printed and then run as printed. The real model comes last,
if it is in the cache or can be fetched within a minute. At a terminal the last server goes on until
Ctrl-C; without one, or with --once, it is stopped at the end. With --offline, or PENSTOCK_OFFLINE
in the environment, no download is tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from penstock.models import named

ROOT = Path(__file__).parent.parent
WRITTEN = "http://127.0.0.1:8080"
"""Where the examples look for the server."""
PORTS = (8080, 0)
"""The first that is free; 0 is any."""
START_SECONDS = 1800.0
"""Loading prints its progress; on a machine with much else to do it takes minutes."""
STOP_SECONDS = 60.0
REAL_MODEL = "smollm2"
FETCH_SECONDS = 60.0
"""Seconds after which a download of the real model is given up; 93 MB."""
KEPT_VARIABLES = ("PENSTOCK_BLAS", named.OFFLINE)
"""Settings that the servers here have from the environment; the examples are for the defaults."""


def free_port() -> int:
    """Return the first of `PORTS` that is free."""
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port is free")


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server takes requests in; exit if it does not come up."""
    until = time.monotonic() + START_SECONDS
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < until:
        if server.poll() is not None:
            sys.exit(server.returncode or 1)
        try:
            with without_proxy.open(f"{url}/ready", timeout=5):
                return
        except OSError:  # not there yet, or busy with the model: URLError and timeouts are these
            time.sleep(0.1)
    sys.exit(f"the server did not start within {START_SECONDS / 60:.0f} min")


def example(name: str, url: str) -> str:
    """Return an example's text with the server's URL in it."""
    return (ROOT / "examples" / name).read_text().replace(WRITTEN, url)


def show(title: str, text: str) -> None:
    """Print the command that is run next."""
    print(f"\n--- {title}\n", flush=True)
    print(text.rstrip(), flush=True)
    print("\n--- answers\n", flush=True)


def talk(url: str) -> None:
    """Show and run each example: curl, the official Python client, and our own chat."""
    command = example("chat.sh", url)
    show("curl", command)
    if shutil.which("curl") is None:
        print("(not run: curl is not installed)")
    else:
        run(["sh", "-c", command], quiet=True)
        print()
    snippet = example("openai_client.py", url)
    show("Python, with the openai package (pip install openai)", snippet)
    run([sys.executable, "-c", snippet])
    chat("the same model by penstock's own client", url, "memory.txt")


def chat(title: str, url: str, name: str) -> None:
    """Show and run a conversation by penstock's own client."""
    show(title, f"penstock chat --url {url} --echo < examples/{name}")
    with (ROOT / "examples" / name).open() as said:
        run([sys.executable, "-m", "penstock", "chat", "--url", url, "--echo"], said)


def real_model() -> bool:
    """Tell whether the real model is in the cache, after a download if one is allowed."""
    if named.find(REAL_MODEL) is not None:
        return True
    size = f"{named.MODELS[REAL_MODEL].size_bytes / 1e6:.0f} MB"
    if os.environ.get(named.OFFLINE):
        print(f"\n{REAL_MODEL}, a real model ({size}), is not in the cache; offline, so left out.")
        return False
    print(f"\n--- a real model: {REAL_MODEL}, {size}, fetched once\n", flush=True)
    code = f"from penstock.models import named; named.fetch({REAL_MODEL!r})"
    try:
        done = subprocess.run([sys.executable, "-c", code], timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"(not there after {FETCH_SECONDS:.0f} s: left out; penstock serve {REAL_MODEL})")
        return False
    if done.returncode:
        print(f"(it cannot be fetched: left out; penstock serve {REAL_MODEL} tries again)")
    return done.returncode == 0


def run(
    arguments: list[str], stdin: int | IO[str] = subprocess.DEVNULL, *, quiet: bool = False
) -> None:
    """Run one example; one that fails is reported and does not end the others.

    Quiet leaves standard error out, where curl draws its progress if it writes to a pipe.
    """
    errors = subprocess.DEVNULL if quiet else None
    try:
        code = subprocess.run(arguments, stdin=stdin, stderr=errors, check=False).returncode
    except FileNotFoundError as error:
        print(f"(not run: {error.filename} is not installed)")
        return
    if code:
        print(f"(it ended with exit code {code})")
        failures.append(arguments[0])


failures: list[str] = []


def serve(arguments: list[str], use: Callable[[str], bool]) -> int:
    """Start a server, use it by its URL, and stop it; return its exit code.

    Where `use` returns True, the server goes on until Ctrl-C.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "penstock", "serve", *arguments, "--port", str(port)]
    server = subprocess.Popen(command)
    try:
        wait_until_ready(server, url)
        if use(url):
            print(f"\nThe server goes on at {url}, with a page to look at. Ctrl-C ends it.")
            server.wait()
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        code = server.wait(STOP_SECONDS)
    return code


def run_all(once: bool) -> int:
    """Talk to the embedded model and to the real one; return a server's exit code."""
    has_real = False

    def embedded(url: str) -> bool:
        nonlocal has_real
        talk(url)
        has_real = real_model()
        return not (once or has_real)

    def real(url: str) -> bool:
        chat(f"{REAL_MODEL}, 135 million parameters, on this machine", url, "real.txt")
        return not once

    code = serve([], embedded)
    return serve([REAL_MODEL], real) if has_real and not code else code


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description="Start the server and talk to it.")
    parser.add_argument("--once", action="store_true", help="stop the server at the end")
    parser.add_argument("--offline", action="store_true", help="download nothing")
    flags = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        if name not in KEPT_VARIABLES:
            del os.environ[name]
    if flags.offline:
        os.environ[named.OFFLINE] = "1"
    try:
        code = run_all(flags.once or not sys.stdin.isatty())
    except KeyboardInterrupt:
        print()
        code = 0
    return 1 if failures else code


if __name__ == "__main__":
    sys.exit(main())
