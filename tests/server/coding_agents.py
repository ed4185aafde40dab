"""Requests in the shapes that Claude Code and Codex send, with texts of our own."""

from __future__ import annotations

from typing import Any

EPHEMERAL = {"type": "ephemeral"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.9.{0}; cc_entrypoint=cli; cch={0};"
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "context-management-2025-06-27,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "x-api-key": "made-up",
    "x-app": "cli",
}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def schema(**properties: Any) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


CLAUDE_TOOLS: list[dict[str, Any]] = [
    {
        "name": "Bash",
        "description": "Runs a command.",
        "input_schema": schema(command={"type": "string"}),
    },
    {
        "name": "Read",
        "description": "Reads a file.",
        "input_schema": schema(file_path={"type": "string"}),
        "eager_input_streaming": True,
    },
    {
        "name": "WebFetch",
        "type": "custom",
        "description": "Fetches a page.",
        "input_schema": schema(url={"type": "string", "format": "uri"}),
        "defer_loading": True,
    },
]
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def claude_code(turns: list[dict[str, Any]], *, cch: str = "00000", **more: Any) -> dict[str, Any]:
    """Return a request of Claude Code's main loop; `cch` is what changes in its first line."""
    return {
        "model": "recall",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            text(BILLING.format(cch)),
            text("You are a coding agent.", cache_control=EPHEMERAL),
            text("Help with software. " * 40, cache_control={**EPHEMERAL, "scope": "global"}),
        ],
        "messages": turns,
        "tools": CLAUDE_TOOLS,
        "metadata": {"user_id": '{"device_id":"0","session_id":"1"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "container": None,
        "mcp_servers": [],
        "never_seen_before": {"a": [1]},
        **more,
    }


CLAUDE_FIRST: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            text("<system-reminder>\nToday is Monday.\n</system-reminder>"),
            text("Look at notes.txt.", cache_control=EPHEMERAL),
        ],
    },
    {"role": "system", "content": "Agents that there are: Explore, Plan."},
]
CLAUDE_SECOND: list[dict[str, Any]] = [
    CLAUDE_FIRST[0],
    CLAUDE_FIRST[1],
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "A file.", "signature": ""},
            {"type": "redacted_thinking", "data": "c2VjcmV0"},
            text("I read it."),
            {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "notes.txt"}},
            {"type": "tool_use", "id": "t2", "name": "Read", "input": {"file_path": "a.png"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "4821", "is_error": None},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "content": [
                    text("A picture:"),
                    IMAGE,
                    {"type": "tool_reference", "tool_name": "Read"},
                ],
                "cache_control": EPHEMERAL,
            },
        ],
    },
    {"role": "system", "content": "notes.txt has changed."},
]
CLAUDE_TITLE: dict[str, Any] = {
    "model": "recall",
    "max_tokens": 32_000,
    "stream": True,
    "system": [text(BILLING.format("3d3")), text("Write a title.")],
    "messages": [{"role": "user", "content": [text("<session>\nHello.\n</session>")]}],
    "metadata": {"user_id": "{}"},
    "output_config": {
        "effort": "high",
        "format": {"type": "json_schema", "schema": schema(title={"enum": ["One", "Two"]})},
    },
}
