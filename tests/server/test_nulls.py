"""A null field equals a missing one, for every optional field of the official clients."""

from __future__ import annotations

import collections.abc
import json
import types
from collections.abc import Iterator
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from parrot import parrot
from pydantic import BaseModel, ValidationError
from typing_extensions import is_typeddict

from penstock.server.anthropic.anthropic_forms import CountRequest, MessagesRequest
from penstock.server.hints import hint_of
from penstock.server.openai.openai_forms import ChatRequest, CompletionRequest
from penstock.server.openai.response_forms import ResponsesRequest
from penstock.server.prompts import Prompts

DEPTH = 5
"""Depth at which types that hold themselves end."""
USER = [{"role": "user", "content": "Hello!"}]
KINDS: list[tuple[Any, type[BaseModel], str, dict[str, Any]]] = [
    (chat.CompletionCreateParamsBase, ChatRequest, "/v1/chat/completions", {"messages": USER}),
    (completions.CompletionCreateParamsBase, CompletionRequest, "/v1/completions", {"prompt": "a"}),
    (responses.ResponseCreateParamsBase, ResponsesRequest, "/v1/responses", {"input": "Hello!"}),
    (
        message_create_params.MessageCreateParamsBase,
        MessagesRequest,
        "/v1/messages",
        {"model": "any", "max_tokens": 1, "messages": USER},
    ),
    (
        message_count_tokens_params.MessageCountTokensParams,
        CountRequest,
        "/v1/messages/count_tokens",
        {"model": "any", "messages": USER},
    ),
]


def examples(wanted: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of values of a type: with null in each optional field, and without them."""
    origin = get_origin(wanted)
    if origin in (Required, NotRequired) or getattr(wanted, "__metadata__", None):
        yield from examples(get_args(wanted)[0], depth)
    elif origin in (Union, types.UnionType):
        for one in get_args(wanted):
            yield from examples(one, depth)
    elif origin is Literal:
        yield get_args(wanted)[0], get_args(wanted)[0]
    elif is_typeddict(wanted):
        yield from objects(wanted, depth)
    elif origin in (list, tuple, collections.abc.Iterable, collections.abc.Sequence) or getattr(
        wanted, "_is_protocol", False
    ):
        for nulls, bare in examples(get_args(wanted)[0] if get_args(wanted) else str, depth + 1):
            yield [nulls], [bare]
    elif wanted in (str, int, float, bool):
        yield wanted(1), wanted(1)


def objects(wanted: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of objects of a typed dictionary, one for each example of each required field."""
    if depth > DEPTH:
        return
    hints = get_type_hints(wanted, include_extras=True)
    needed = [name for name, hint in hints.items() if get_origin(hint) is Required]
    optional = [name for name in hints if name not in needed]
    fields = {name: [*examples(hints[name], depth + 1)] or [(None, None)] for name in needed}
    nulls = dict.fromkeys(optional)
    first = {name: pairs[0] for name, pairs in fields.items()}
    variants = [first]
    variants += [{**first, name: pair} for name, pairs in fields.items() for pair in pairs[1:]]
    variants += [
        {**first, name: pair}
        for name in optional
        for pair in examples(hints[name], depth + 1)
        if pair[0] != pair[1]
    ]
    for variant in variants:
        yield (
            {**nulls, **{name: pair[0] for name, pair in variant.items()}},
            {name: pair[1] for name, pair in variant.items()},
        )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    """Prompts of a template that renders tools and calls."""
    return Prompts(parrot(tmp_path_factory.mktemp("parrot"), "Hello")[1])


def read(form: type[BaseModel], body: dict[str, Any]) -> Any:
    """Return the parsed body; None if it is refused."""
    try:
        return without_nulls(form.model_validate_json(json.dumps(body)).model_dump())
    except ValidationError:
        return None


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("params", "form", "path", "base"), KINDS, ids=[k[2] for k in KINDS])
def test_null_field_equals_missing_field(
    prompts: Prompts, params: Any, form: Any, path: str, base: dict[str, Any]
) -> None:
    hints = get_type_hints(params, include_extras=False)
    all_nulls = {**dict.fromkeys(hints), **base}
    assert read(form, all_nulls) == read(form, base) is not None
    assert hint_of(path, json.dumps(all_nulls).encode(), prompts) == (
        hint_of(path, json.dumps(base).encode(), prompts)
    )
    compared = 0
    for name, hint in hints.items():
        for nulls, bare in examples(hint):
            with_nulls, without = {**base, name: nulls}, {**base, name: bare}
            assert read(form, with_nulls) == read(form, without), (name, nulls)
            seen, wanted = (
                hint_of(path, json.dumps(body).encode(), prompts) for body in (with_nulls, without)
            )
            assert seen == wanted, (name, nulls)
            compared += with_nulls != without and read(form, without) is not None
    print(path, compared)
    assert compared >= LEAST_NESTED.get(path, 0)


LEAST_NESTED: dict[str, int] = {
    "/v1/chat/completions": 10,
    "/v1/responses": 20,
    "/v1/messages": 20,
    "/v1/messages/count_tokens": 20,
}
"""Examples with nested nulls that are read, at least: fewer would show that none are looked at."""
