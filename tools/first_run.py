"""Start the server on the embedded model, show what talks to it, and let it run.

    python tools/first_run.py [--once]

`make run` calls this: each example is printed and then run as printed. At a terminal the server
goes on until Ctrl-C; without one, or with --once, it is stopped at the end.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
WRITTEN = "http://127.0.0.1:8080"
"""Where the examples look for the server."""
PORTS = (8080, 0)
"""The first that is free; 0 is any."""
START_SECONDS = 60.0
STOP_SECONDS = 60.0


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
    while time.monotonic() < until:
        if server.poll() is not None:
            sys.exit(server.returncode or 1)
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:  # not there yet, or busy with the model: URLError and timeouts are these
            time.sleep(0.1)
    sys.exit("the server did not start")


def example(name: str, url: str) -> str:
    """Return an example's text with the server's URL in it."""
    return (ROOT / "examples" / name).read_text().replace(WRITTEN, url)


def show(title: str, text: str) -> None:
    """Print what is run next."""
    print(f"\n--- {title}\n", flush=True)
    print(text.rstrip(), flush=True)
    print("\n--- answers\n", flush=True)


def talk(url: str) -> None:
    """Show and run each example: curl, the official Python client, and our own chat."""
    command = example("chat.sh", url)
    show("curl", command)
    run(["sh", "-c", command], quiet=True)
    print()
    snippet = example("openai_client.py", url)
    show("Python, with the openai package (pip install openai)", snippet)
    run([sys.executable, "-c", snippet])
    ours = f"penstock chat --url {url} --echo < examples/memory.txt"
    show("the same model by penstock's own client", ours)
    with (ROOT / "examples" / "memory.txt").open() as said:
        run([sys.executable, "-m", "penstock", "chat", "--url", url, "--echo"], said)


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


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description="Start the server and talk to it.")
    parser.add_argument("--once", action="store_true", help="stop the server at the end")
    once = parser.parse_args().once or not sys.stdin.isatty()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        if name != "PENSTOCK_BLAS":  # the examples are written for the defaults
            del os.environ[name]
    server = subprocess.Popen([sys.executable, "-m", "penstock", "serve", "--port", str(port)])
    try:
        wait_until_ready(server, url)
        talk(url)
        if not once:
            print(f"\nThe server goes on at {url}, with a page to look at. Ctrl-C ends it.")
            server.wait()
    except KeyboardInterrupt:
        print()
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        code = server.wait(STOP_SECONDS)
    return 1 if failures else code


if __name__ == "__main__":
    sys.exit(main())
