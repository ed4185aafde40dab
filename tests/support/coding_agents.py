"""Requests in the formats of Claude Code and Codex, with our own texts."""

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
    """Return a request of Claude Code's main loop; `cch` varies in its first line."""
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

PATCH_GRAMMAR = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Add File: " filename LF add_line+
filename: /[a-z]{1,8}/
add_line: "+" /[a-z]{0,8}/ LF
%import common.LF
"""
CODEX_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": schema(cmd={"type": "string"}),
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Changes files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Agents below this one.",
        "tools": [
            {
                "type": "function",
                "name": "close_agent",
                "strict": False,
                "parameters": schema(target={"type": "string"}),
            }
        ],
    },
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
]


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": words} for words in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}


def codex(items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a request of Codex."""
    return {
        "model": "recall",
        "stream": True,
        "instructions": "You are a coding agent. " * 40,
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "prompt_cache_key": "01a2",
        "prompt_cache_retention": "24h",
        "client_metadata": {"turn_id": "1"},
        "text": {"verbosity": "low"},
        **more,
    }


CODEX_FIRST = [
    message("developer", "<permissions instructions>All.</permissions instructions>"),
    message("user", "<environment_context>bash</environment_context>"),
    message("user", "Look at notes.txt."),
]
CODEX_SECOND: list[dict[str, Any]] = [
    *CODEX_FIRST,
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA=="},
    message("assistant", "I look."),
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "close_agent",
        "namespace": "multi_agent_v1",
        "arguments": '{"target": "a"}',
    },
    {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "c2",
        "name": "apply_patch",
        "input": "*** Begin Patch\n",
        "status": "completed",
    },
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "c3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
    {"type": "function_call_output", "call_id": "c1", "output": "closed"},
    {
        "type": "custom_tool_call_output",
        "call_id": "c2",
        "output": [
            {"type": "input_text", "text": "no: "},
            {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
        ],
    },
    {"type": "local_shell_call_output", "id": "c3", "output": "notes.txt"},
]
