"""Processes of a server benchmark: penstock's server, mlx-lm's, and the engine alone.

Each is started as by a user, and measured from outside.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import httpx
import psutil

from penstock import children
from penstock.blas import VARIABLE as BLAS_VARIABLE
from penstock.blas import load_blas
from penstock.errors import PenstockError, SettingError
from penstock_bench.engine_sides import LLAMA
from penstock_bench.serve_client import Reply, connected
from penstock_bench.serve_model import ServedFolder

HOST = "127.0.0.1"
START_SECONDS = 120.0
STOP_SECONDS = 30.0
SAMPLE_SECONDS = 0.05
WARM_UP_TOKENS = 4


class ServerFailed(PenstockError):
    """A server under test did not start, or has died."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command of a server, with its environment and stop signal."""

    name: str
    arguments: tuple[str, ...]
    stop_signal: signal.Signals
    environment: tuple[tuple[str, str], ...] = ()


def ours(folder: ServedFolder, port: int, memory_limit: int | None = None) -> ServerCommand:
    """Return penstock's server with its defaults, and the measured codec."""
    flags = ["--host", HOST, "--port", str(port)]
    if memory_limit is not None:
        flags += ["--memory-limit", str(memory_limit)]
    for name, value in folder.codec_settings.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return ServerCommand(
        "penstock",
        (sys.executable, "-m", "penstock", "serve", str(folder.gguf or folder.path), *flags),
        signal.SIGTERM,
    )


def rival(folder: ServedFolder, port: int) -> ServerCommand:
    """Return mlx-lm's server with its defaults, and the BLAS that penstock loads.

    Without that BLAS products would be about 30 times slower on a Linux CPU.
    """
    flags = ["--host", HOST, "--port", str(port), "--log-level", "WARNING"]
    blas = load_blas()
    preloaded = sys.platform == "linux" and blas.is_fast and ".so" in blas.name
    return ServerCommand(
        "mlx-lm",
        (sys.executable, "-m", "mlx_lm", "server", "--model", str(folder.path), *flags),
        signal.SIGINT,
        (("LD_PRELOAD", blas.name),) if preloaded else (),
    )


def llama_cpp(command: str, folder: ServedFolder, port: int) -> ServerCommand:
    """Return llama.cpp's server on the GGUF file, started by `command` with its settings.

    Raises:
        SettingError: the model is not a GGUF file.
    """
    if folder.gguf is None:
        raise SettingError("--llama-server: the model is no GGUF file")
    flags = ["--model", str(folder.gguf), "--host", HOST, "--port", str(port)]
    return ServerCommand(LLAMA, (*shlex.split(command), *flags), signal.SIGINT)


@dataclass(slots=True)
class RunningServer:
    """Running server, as seen from outside."""

    name: str
    url: str
    model: str
    """Name of the model in requests."""
    process: psutil.Process
    start_seconds: float
    idle_bytes: int = 0
    """Resident bytes after loading and one short answer."""


@contextmanager
def serving(kind: ServerCommand, port: int) -> Iterator[RunningServer]:
    """Start a server, wait for its first answer, and stop it on exit.

    Raises:
        ServerFailed: the server exited, or did not answer in time.
    """
    began = time.perf_counter()
    with _started(kind.arguments, dict(kind.environment)) as (process, log):
        url = f"http://{HOST}:{port}"
        try:
            model = _wait(process, log, url, kind)
            server = RunningServer(
                kind.name,
                url,
                model,
                psutil.Process(process.pid),
                time.perf_counter() - began,
            )
            reply = asyncio.run(_warm_up(server))
            if reply.error is not None:
                raise ServerFailed(f"{kind.name} does not answer: {reply.error}\n{_tail(log)}")
            server.start_seconds = time.perf_counter() - began
            server.idle_bytes = server.process.memory_info().rss
            yield server
            if process.poll() is not None:
                raise ServerFailed(f"{kind.name} has died under the load: {_tail(log)}")
        finally:
            stop(process, kind.stop_signal)


async def _warm_up(server: RunningServer) -> Reply:
    async with connected(server.url, server.model) as client:
        return await client.ask([{"role": "user", "content": "Hello!"}], WARM_UP_TOKENS)


@contextmanager
def _started(
    arguments: Sequence[str], environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    with TemporaryFile() as log:
        process = children.start(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**_plain_environment(), **environment},
        )
        yield process, log


def _plain_environment() -> dict[str, str]:
    """Return the environment without settings that change a server's defaults."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PENSTOCK_") or name == BLAS_VARIABLE
    }


def _wait(process: subprocess.Popen[bytes], log: IO[bytes], url: str, kind: ServerCommand) -> str:
    """Wait until the server answers, and return its name of the model."""
    until = time.monotonic() + START_SECONDS
    with httpx.Client(base_url=url, trust_env=False) as http:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise ServerFailed(f"{kind.name} ended while it started: {_tail(log)}")
            try:
                if http.get("/health").status_code == httpx.codes.OK:
                    if kind.name != "penstock":
                        return "default_model"
                    return str(http.get("/v1/models").json()["data"][0]["id"])
            except httpx.TransportError:  # not there yet, or busy with the model
                time.sleep(0.1)
    raise ServerFailed(f"{kind.name} did not start within {START_SECONDS:.0f} s: {_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-600:].strip()


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that servers are stopped."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(process: subprocess.Popen[bytes], by: signal.Signals) -> int:
    """Send a signal to a process, and kill it if it does not exit; return its exit code."""
    if process.poll() is None:
        process.send_signal(by)
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- memory


@dataclass(slots=True)
class Memory:
    """Resident bytes of a process over time."""

    samples: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the start, and bytes; 20 samples per second."""
    cpu_seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Largest sample."""
        return max(nbytes for _, nbytes in self.samples)


@contextmanager
def watched(process: psutil.Process) -> Iterator[Memory]:
    """Sample the resident bytes of a process in a thread until exit."""
    memory = Memory()
    done = threading.Event()
    began = time.perf_counter()

    def sample() -> None:
        while True:
            try:
                nbytes = process.memory_info().rss
            except psutil.NoSuchProcess:  # the client that waits for answers reports that
                return
            memory.samples.append((time.perf_counter() - began, nbytes))
            if done.wait(SAMPLE_SECONDS):
                return

    thread = threading.Thread(target=sample, name="penstock-bench-memory")
    cpu_before = cpu_seconds(process)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()
        memory.cpu_seconds = cpu_seconds(process) - cpu_before


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process; 0 if it has exited."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


# ---------------------------------------------------------------- the engine alone


class EngineProcess:
    """Engine without a server, in a separate process that waits for prompts."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.process = psutil.Process(process.pid)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, int]:
        """Generate for all prompts at once; return the seconds and the tokens."""
        answer = self._ask({"prompts": [list(p) for p in prompts], "max_tokens": max_tokens})
        return float(answer["seconds"]), int(answer["tokens"])

    def _ask(self, batch: dict[str, Any]) -> dict[str, Any]:
        into, out = self._process.stdin, self._process.stdout
        if into is None or out is None:
            raise AssertionError("the process has pipes")
        into.write(json.dumps(batch) + "\n")
        into.flush()
        line = out.readline()
        if not line:
            raise ServerFailed("the engine's process has died")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def engine_alone(folder: ServedFolder) -> Iterator[EngineProcess]:
    """Start the engine with the server's defaults in a separate process."""
    arguments = [
        sys.executable,
        "-m",
        "penstock_bench.serve_alone",
        str(folder.path),
        json.dumps(folder.codec_settings),
    ]
    with ExitStack() as stack:
        process = stack.enter_context(
            children.start(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        if process.stdin is None:
            raise AssertionError("the process has pipes")
        stack.callback(process.stdin.close)  # the end of its input ends it
        yield EngineProcess(process)


def high_water_bytes(pid: int) -> int | None:
    """Return the peak resident bytes of a process, as reported by Linux; None elsewhere."""
    status = Path(f"/proc/{pid}/status")
    if not status.is_file():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return None
