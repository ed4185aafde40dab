"""Settings that a response was made with, in the form that `/v1/responses` gives them back.

Every field is there, as clients check it: those that a request left out have the value used.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.request import Sampling
from penstock.server.problems import Problem
from penstock.server.response_forms import ResponsesRequest

FUNCTION = {"description": None, "parameters": None, "strict": None}
"""Fields of a function that clients may leave out."""


def settings_object(body: ResponsesRequest, sampling: Sampling) -> dict[str, Any]:
    """Return the settings of a request, with those that it did not say."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": body.store is not False,
        "background": False,
        "service_tier": "default",
        "truncation": "disabled",
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": sampling.top_logprobs,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": {"format": _format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {**FUNCTION, **tool} if tool.get("type") == "function" else tool
            for tool in body.tools or ()
        ],
    }


def response_error(problem: Problem) -> dict[str, Any]:
    """Return the error of a failed response."""
    return {"code": problem.code or "server_error", "message": problem.message}


def _format(body: ResponsesRequest) -> dict[str, Any]:
    """Return the form of the answer's text."""
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_unset=True)
