"""Run clients of other projects once each against the server, and print tables of the results.

    python tests/clients/run_clients.py FOLDER [CLIENT...]      (make test-clients)

Each Python client has an environment of its own in FOLDER, so that each is the newest there is;
those of npm share one. What cannot be installed is skipped with a line. Two servers answer: one of
the embedded model, and one of a model that follows a script: it calls a tool, and goes on with the
result. Where the system allows it, all runs in a network namespace with loopback alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "agents"))

from comply import FORMATS, PACKAGE, complied  # noqa: E402
from newest_node import npm_install, use_node  # noqa: E402
from scripted_model import call, write_model  # noqa: E402

STEPS = ("chat", "stream", "tools", "streamed_tools", "demanded", "structured", "decisions")
SCRIPT = {
    0: [call("get_weather", location="San Francisco")],  # of llm-comply, which names no task
    1: [call("look_up", thing="falcon"), "The code of the falcon is 4821."],
}
SECONDS = 600
"""Limit of one client's run."""
NPM = (
    *("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic"),
    *("@langchain/openai", "@langchain/core", "ollama", "zod"),
)
NAMESPACE = ("unshare", "--net", "--map-root-user")
REFERENCES = {
    "openai-harmony": ("PENSTOCK_HARMONY", "test_openai_harmony.py", ("openai-harmony", "litellm")),
    "lm-eval": ("PENSTOCK_LM_EVAL", "test_lm_eval.py", ("lm-eval[api]",)),
}
"""Programs that tests compare with: the variable with their Python, the test, the packages."""
VOCABULARY = "lib/python*/site-packages/litellm/litellm_core_utils/tokenizers"
"""Folder of litellm with the vocabulary that openai-harmony would fetch, under the same name."""
INSTALLED = ".installed"
"""File in a client's folder: it is whole."""


@dataclass(frozen=True)
class Client:
    """A program that talks to the server."""

    name: str
    """First word: the package whose version is shown."""
    script: str
    argument: str = ""
    packages: tuple[str, ...] = ()
    """Packages of PyPI that it needs; without any it is one of npm's."""

    @property
    def package(self) -> str:
        return self.name.split()[0]

    @property
    def folder(self) -> str:
        """Name of the client's environment."""
        return self.package if self.packages else "npm"


_SLIM = ("pydantic-ai-slim[openai,anthropic]",)
_LIKE, _LLAMA = "llama-index-llms-openai-like", "llama-index-llms-ollama"
CLIENTS = (
    Client("openai chat", "openai_chat.py", "", ("openai",)),
    Client("openai responses", "openai_responses.py", "", ("openai",)),
    Client("anthropic", "anthropic_messages.py", "", ("anthropic",)),
    Client("litellm chat", "litellm_client.py", "openai", ("litellm", "mcp")),
    Client("litellm messages", "litellm_client.py", "anthropic", ("litellm", "mcp")),
    Client("ollama", "ollama_client.py", "", ("ollama",)),
    Client("instructor", "instructor_client.py", "", ("instructor", "anthropic")),
    Client("pydantic-ai-slim chat", "pydantic_ai_client.py", "chat", _SLIM),
    Client("pydantic-ai-slim responses", "pydantic_ai_client.py", "responses", _SLIM),
    Client("pydantic-ai-slim messages", "pydantic_ai_client.py", "messages", _SLIM),
    Client("langchain-openai chat", "langchain_client.py", "chat", ("langchain-openai",)),
    Client("langchain-openai responses", "langchain_client.py", "responses", ("langchain-openai",)),
    Client("langchain-anthropic", "langchain_client.py", "messages", ("langchain-anthropic",)),
    Client("langchain-ollama", "langchain_client.py", "ollama", ("langchain-ollama",)),
    Client(_LIKE, "llama_index_client.py", "openai", (_LIKE,)),
    Client(_LLAMA, "llama_index_client.py", "ollama", (_LLAMA,)),
    Client("@ai-sdk/openai-compatible", "ai_sdk.mjs", "compatible"),
    Client("@ai-sdk/openai responses", "ai_sdk.mjs", "openai"),
    Client("@ai-sdk/anthropic", "ai_sdk.mjs", "anthropic"),
    Client("@langchain/openai chat", "langchain.mjs", "chat"),
    Client("@langchain/openai responses", "langchain.mjs", "responses"),
    Client("ollama (npm)", "ollama.mjs"),
)


def main() -> int:
    """Install the clients, enter the namespace and run; the exit code is 0 if all passed."""
    folder, *words = (word for word in sys.argv[1:] if word != "--inside")
    chosen = [one for one in CLIENTS if not words or any(word in one.name for word in words)]
    root = Path(folder).resolve()
    with_comply = not words or PACKAGE in words
    references = [name for name in REFERENCES if not words or name in words]
    if "--inside" not in sys.argv:
        _install(root, chosen, references, with_comply)
        command = [sys.executable, *sys.argv, "--inside"]
        alone = shutil.which("unshare") and shutil.which("ip")
        if alone and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0:
            return subprocess.run([*NAMESPACE, *command], check=False).returncode
        print("there is no network namespace here: the clients could reach other machines")
        return subprocess.run(command, check=False).returncode
    if shutil.which("ip"):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
    return _run(root, chosen, references, with_comply)


# ---- installing


def _install(root: Path, clients: list[Client], references: list[str], with_comply: bool) -> None:
    wanted = {one.folder: one.packages for one in clients}
    wanted |= {name: REFERENCES[name][2] for name in references}
    if with_comply:
        wanted[PACKAGE] = (PACKAGE,)
    for name, packages in wanted.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INSTALLED).unlink(missing_ok=True)
        error = _install_python(folder, packages) if packages else _install_npm(folder)
        if error is None:
            (folder / INSTALLED).touch()
        else:
            print(f"{name} is skipped: {error}", flush=True)


def _install_python(folder: Path, packages: tuple[str, ...]) -> str | None:
    """Install packages in a separate environment; return the error if that failed."""
    if not (folder / "bin" / "python").exists():
        venv.create(folder, symlinks=True)
    return _error_of(
        *(sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"),
        *("--quiet", "--disable-pip-version-check", "--upgrade", *packages),
    )


def _install_npm(folder: Path) -> str | None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        return "there is no node with npm"
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
    try:
        use_node(folder.parent)
        npm_install(folder, *(f"{package}@latest" for package in NPM))
    except subprocess.CalledProcessError as error:
        return _last_line(error.stderr)
    return None


def _error_of(*command: str) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return _last_line(done.stderr)


def _last_line(said: str | None) -> str:
    return ((said or "").strip() or "it failed without a word").splitlines()[-1]


# ---- running


def _run(root: Path, clients: list[Client], references: list[str], with_comply: bool) -> int:
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        home = Path(temporary)
        (home / "scripted").mkdir()
        write_model(home / "scripted", SCRIPT)
        url = servers.enter_context(_server("--tool-parser", "hermes"))
        scripted = servers.enter_context(_server(str(home / "scripted")))
        environment = {
            **{"HOME": temporary, "PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            **{"CLIENTS_URL": url, "CLIENTS_SCRIPTED_URL": scripted},
            **{"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"},
        }
        columns = "".join(f"{step:>16}" for step in STEPS)
        print(f"{'client':<32}{'version':<12}{columns}", flush=True)
        for client in clients:
            folder = root / client.folder
            if (folder / INSTALLED).exists():
                wrong += _row(client, folder, environment)
        if with_comply and (root / PACKAGE / INSTALLED).exists():
            for form in FORMATS:
                wrong += complied(root / PACKAGE, scripted, form)
        for name in references:
            if (root / name / INSTALLED).exists():
                wrong += _compared(name, root / name, environment)
    print("\n".join(wrong) or "all passed")
    return 1 if wrong else 0


def _compared(name: str, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Run the comparison test with a program, print its end, and return the failures."""
    variable, test, _ = REFERENCES[name]
    more = {variable: str(folder / "bin" / "python")}
    for vocabulary in folder.glob(VOCABULARY):
        more["TIKTOKEN_RS_CACHE_DIR"] = str(vocabulary)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", str(HERE.parent / "server" / test)],
        env={**os.environ, **environment, **more},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    passed = done.returncode == 0 and "1 passed" in done.stdout
    mark = "passed" if passed else "failed"
    print(f"{name:<32}{_version_in(folder, name):<12}{mark:>16}", flush=True)
    return [] if passed else [f"{name}: {(done.stdout + done.stderr).strip()[-1_000:]}"]


def _row(client: Client, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Run a client, print its row, and return the failures."""
    if client.packages:
        command = [str(folder / "bin" / "python"), str(HERE / "python" / client.script)]
    else:
        command = ["node", str(folder / client.script)]
    outcomes, end = _outcomes([*command, *filter(None, [client.argument])], environment)
    marks = ["-" if s not in outcomes else "failed" if outcomes[s] else "passed" for s in STEPS]
    cells = "".join(f"{mark:>16}" for mark in marks)
    print(f"{client.name:<32}{_version(client, folder):<12}{cells}", flush=True)
    wrong = [f"{client.name}: {step}: {error}" for step, error in outcomes.items() if error]
    return wrong if end is None else [*wrong, f"{client.name}: {end}"]


def _outcomes(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, str | None], str | None]:
    """Run a client; return the error of each step, and why it stopped early."""
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"no end after {SECONDS} s"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"step"')]
    end = f"ended with {process.returncode}: {err.strip()[-500:]}" if process.returncode else None
    if not lines and end is None:
        end = "it ran no step"
    return {line["step"]: line["error"] for line in lines}, end


def _version(client: Client, folder: Path) -> str:
    if not client.packages:
        whole = folder / "node_modules" / client.package / "package.json"
        return str(json.loads(whole.read_text())["version"])
    return _version_in(folder, client.package)


def _version_in(folder: Path, package: str) -> str:
    stem = package.replace("-", "_")
    (info,) = folder.glob(f"lib/python*/site-packages/{stem}-*.dist-info")
    return info.name.removeprefix(f"{stem}-").removesuffix(".dist-info")


@contextmanager
def _server(*arguments: str) -> Iterator[str]:
    """Start a server on a free port; yield its URL once it answers."""
    command = [sys.executable, "-m", "penstock", "serve", *arguments]
    options = ["--port", "0", "--memory-limit", "500MB", "--max-tokens", "512"]
    server = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        yield found[0]
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    sys.exit(main())
