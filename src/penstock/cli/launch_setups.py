"""Settings with which each coding agent uses a server.

They are environment variables, arguments, and files in a temporary folder. The user's own
configuration is neither read nor written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from shlex import quote
from urllib.parse import urlsplit

from penstock.config import LOOPBACK_HOSTS

FOLDER = "{folder}"
"""Placeholder for the temporary folder, which is created later."""
KEY_VARIABLE = "PENSTOCK_API_KEY"
MADE_UP_KEY = "none-needed"
"""API key for a server without keys, because the agents require one."""
MOST_OUTPUT = 32_000


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    """`http://host:port`, without `/v1`."""
    key: str
    model: str
    context_tokens: int

    @property
    def output_tokens(self) -> int:
        return min(MOST_OUTPUT, self.context_tokens // 2)


@dataclass(frozen=True, slots=True)
class Setup:
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Environment variables to unset, because they would select another server."""

    def in_folder(self, folder: str) -> Setup:
        return Setup(
            {name: value.replace(FOLDER, folder) for name, value in self.environment.items()},
            tuple(argument.replace(FOLDER, folder) for argument in self.arguments),
            self.files,
            self.unset,
        )


@dataclass(frozen=True, slots=True)
class Program:
    command: str
    package: str
    setup: Callable[[Endpoint], Setup]


def past_proxies(setup: Setup, target: Endpoint, environment: Mapping[str, str]) -> Setup:
    """Return a setup that bypasses the environment's proxies for a server on this machine.

    >>> at_home = Endpoint("http://127.0.0.1:8080", "none", "m", 100)
    >>> dict(past_proxies(Setup({}), at_home, {"http_proxy": "x", "no_proxy": "a"}).environment)
    {'no_proxy': 'a,127.0.0.1', 'NO_PROXY': 'a,127.0.0.1'}
    """
    host = urlsplit(target.url).hostname
    proxied = any(name.lower().endswith("_proxy") for name in environment)
    if host not in LOOPBACK_HOSTS or not proxied:
        return setup
    left_out = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = f"{left_out},{host}".removeprefix(",")
    return replace(setup, environment={**setup.environment, "no_proxy": hosts, "NO_PROXY": hosts})


def claude(target: Endpoint) -> Setup:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    window = str(target.context_tokens)
    # Claude Code raises smaller values to this size, with a warning, but not MAX_CONTEXT_TOKENS.
    long = target.context_tokens >= 100_000
    return Setup(
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key,
            **{f"ANTHROPIC_{name}": target.model for name in models},
            "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": window,
            **({"CLAUDE_CODE_AUTO_COMPACT_WINDOW": window} if long else {}),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output_tokens),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        unset=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    )


def codex(target: Endpoint) -> Setup:
    values = {
        "model": target.model,
        "model_provider": "penstock",
        "model_context_window": target.context_tokens,
        "model_providers.penstock.name": "penstock",
        "model_providers.penstock.base_url": f"{target.url}/v1",
        "model_providers.penstock.wire_api": "responses",
        "model_providers.penstock.env_key": KEY_VARIABLE,
    }
    # JSON strings and numbers are also valid TOML.
    pairs = (("-c", f"{name}={json.dumps(value)}") for name, value in values.items())
    return Setup({KEY_VARIABLE: target.key}, tuple(word for pair in pairs for word in pair))


def opencode(target: Endpoint) -> Setup:
    limit = {"context": target.context_tokens, "output": target.output_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "penstock",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: {"name": target.model, "limit": limit}},
    }
    name = f"penstock/{target.model}"
    content = {"model": name, "small_model": name, "provider": {"penstock": provider}}
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


def pi(target: Endpoint) -> Setup:
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": target.context_tokens,
        "maxTokens": target.output_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "name": "penstock",
        "baseUrl": f"{target.url}/v1",
        "api": "openai-completions",
        "apiKey": KEY_VARIABLE,
        "models": [model],
    }
    extension = (
        f'export default (pi) => pi.registerProvider("penstock", {json.dumps(provider, indent=2)});'
    )
    return Setup(
        {KEY_VARIABLE: target.key},
        ("-e", f"{FOLDER}/penstock.js", "--provider", "penstock", "--model", target.model),
        {"penstock.js": f"{extension}\n"},
    )


def qwen(target: Endpoint) -> Setup:
    model = {
        "id": target.model,
        "name": target.model,
        "envKey": KEY_VARIABLE,
        "baseUrl": f"{target.url}/v1",
        "generationConfig": {"contextWindowSize": target.context_tokens},
    }
    settings = {
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": target.model},
        "privacy": {"usageStatisticsEnabled": False},
    }
    return Setup(
        {
            KEY_VARIABLE: target.key,
            "OPENAI_API_KEY": target.key,
            "OPENAI_BASE_URL": f"{target.url}/v1",
            "OPENAI_MODEL": target.model,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{FOLDER}/settings.json",
        },
        ("--auth-type", "openai", "--model", target.model),
        {"settings.json": f"{json.dumps(settings, indent=2)}\n"},
    )


PROGRAMS = {
    program.command: program
    for program in (
        Program("claude", "@anthropic-ai/claude-code", claude),
        Program("codex", "@openai/codex", codex),
        Program("opencode", "opencode-ai", opencode),
        Program("pi", "@mariozechner/pi-coding-agent", pi),
        Program("qwen", "@qwen-code/qwen-code", qwen),
    )
}


def shell_lines(
    command: tuple[str, ...], setup: Setup, arguments: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield POSIX shell commands that do the same as `penstock launch`."""
    if setup.files:
        yield "PENSTOCK_FOLDER=$(mktemp -d)"
    for name, text in setup.files.items():
        yield f"printf %s {quote(text)} > {_shell_word(f'{FOLDER}/{name}')}"
    for name in setup.unset:
        yield f"unset {name}"
    for name, value in setup.environment.items():
        yield f"export {name}={_shell_word(value)}"
    yield " ".join(map(_shell_word, (*command, *setup.arguments, *arguments)))


def _shell_word(text: str) -> str:
    """Quote a word for a POSIX shell; the temporary folder becomes a variable.

    >>> print(_shell_word("a b"), _shell_word("{folder}/x"))
    'a b' "$PENSTOCK_FOLDER"/x
    """
    parts = [quote(part) if part else "" for part in text.split(FOLDER)]
    return '"$PENSTOCK_FOLDER"'.join(parts) or "''"
