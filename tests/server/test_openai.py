"""OpenAI's client, unmodified, against a real server."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from parrot import parrot
from pydantic import BaseModel
from servers import MODEL_NAME, Running, serving, wait_until

from penstock import Request, Sampling
from penstock_bench.recall import Dialogue

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a code.",
            "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
        },
    }
]
FLAT: list[Any] = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
ROLES = ("<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>")
"""What the parrot's template writes around two messages, a token each."""
CALL = '<tool_call>{"name": "look_up", "arguments": {"thing": "falcon"}}</tool_call>'


def client(running: Running, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none needed", max_retries=0, **more)


def asynchronous(running: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def prompt_of(running: Running, messages: Any) -> tuple[int, ...]:
    return running.service.prompts.render(messages)


# ---- chat


def test_chat_completion_has_answer_and_usage(recall_server: Running, told: Dialogue) -> None:
    with client(recall_server) as api:
        for question in told.questions:
            messages: Any = told.ask(question)
            made = api.chat.completions.create(model="any", messages=messages)
            (choice,) = made.choices
            assert choice.message.content is not None
            assert choice.message.content.strip() == question.answer
            assert choice.message.role == "assistant"
            assert choice.finish_reason == "stop"
            assert made.model == MODEL_NAME
            assert made.object == "chat.completion"
            assert made.usage is not None
            assert made.usage.prompt_tokens == len(prompt_of(recall_server, messages))
            assert made.usage.total_tokens == (
                made.usage.prompt_tokens + made.usage.completion_tokens
            )


def test_streamed_chat_matches_whole(recall_server: Running, told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    with client(recall_server) as api:
        whole = api.chat.completions.create(model="any", messages=messages)
        chunks = list(
            api.chat.completions.create(
                model="any",
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    *parts, end, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == (
        whole.choices[0].message.content
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert end.choices[0].finish_reason == "stop"
    assert last.choices == []
    assert whole.usage is not None and last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(part.usage is None for part in [*parts, end])
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_has_usage_only_on_request(recall_server: Running, told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    with client(recall_server) as api:
        chunks = list(api.chat.completions.create(model="any", messages=messages, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_async_client_gets_whole_and_streamed_chat(recall_server: Running, told: Dialogue) -> None:
    """Many at once, whole and streamed."""

    async def ask(api: openai.AsyncOpenAI, question: Any, stream: bool) -> str:
        messages: Any = told.ask(question)
        if not stream:
            made = await api.chat.completions.create(model="any", messages=messages)
            return made.choices[0].message.content or ""
        chunks = await api.chat.completions.create(model="any", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_of_them() -> list[str]:
        async with asynchronous(recall_server) as api:
            asked = [
                ask(api, question, stream)
                for stream in (True, False)
                for question in told.questions
            ]
            return await asyncio.gather(*asked)

    answers = [answer.strip() for answer in asyncio.run(all_of_them())]
    assert answers == [question.answer for question in told.questions] * 2


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "seed": 5}),
    ({"temperature": 2.0, "top_p": 0.5, "seed": 1}, {"temperature": 2.0, "top_p": 0.5, "seed": 1}),
    ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
    ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
    ({"logit_bias": {"300": 100}}, {"logit_bias": {300: 100}}),
    (
        {"temperature": 1.5, "seed": 2, "extra_body": {"top_k": 3, "min_p": 0.1}},
        {"temperature": 1.5, "seed": 2, "top_k": 3, "min_p": 0.1},
    ),
    ({"extra_body": {"repetition_penalty": 1.5}}, {"repetition_penalty": 1.5}),
]


@pytest.mark.parametrize(("asked", "meant"), WAYS, ids=lambda way: ",".join(way))
def test_sampling_matches_engine(
    recall_server: Running, told: Dialogue, asked: dict[str, Any], meant: dict[str, Any]
) -> None:
    messages: Any = told.ask(told.questions[0])
    with client(recall_server) as api:
        made = api.chat.completions.create(model="a", messages=messages, max_tokens=12, **asked)
    request = Request(
        prompt=prompt_of(recall_server, messages), max_tokens=12, sampling=Sampling(**meant)
    )
    (expected,) = recall_server.service.engine.submit(request).result(30)
    assert made.choices[0].message.content == expected.text


def test_several_choices_are_returned_and_streamed(recall_server: Running, told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    how: dict[str, Any] = {"n": 3, "temperature": 3.0, "seed": 3, "max_tokens": 8}
    with client(recall_server) as api:
        made = api.chat.completions.create(model="any", messages=messages, **how)
        streamed: dict[int, str] = {}
        reasons: dict[int, str] = {}
        for chunk in api.chat.completions.create(
            model="any", messages=messages, stream=True, **how
        ):
            (choice,) = chunk.choices
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    texts = {choice.index: choice.message.content for choice in made.choices}
    assert len(set(texts.values())) == 3, "hot answers differ"
    assert streamed == texts
    assert reasons == {choice.index: choice.finish_reason for choice in made.choices}
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(prompt_of(recall_server, messages)), "read once"


def test_stop_string_and_max_tokens_set_finish_reason(
    recall_server: Running, told: Dialogue
) -> None:
    question = told.questions[0]
    messages: Any = told.ask(question)
    with client(recall_server) as api:
        whole = api.chat.completions.create(model="any", messages=messages)
        text = whole.choices[0].message.content or ""
        cut = api.chat.completions.create(model="any", messages=messages, stop=[text[2:]])
        assert cut.choices[0].message.content == text[:2]
        assert cut.choices[0].finish_reason == "stop"
        for limit in ({"max_tokens": 1}, {"max_completion_tokens": 1}):
            short = api.chat.completions.create(model="any", messages=messages, **limit)  # type: ignore[call-overload]
            assert short.choices[0].finish_reason == "length"
            assert short.usage.completion_tokens == 1


def test_logprobs_match_engine(recall_server: Running, told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    how: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    with client(recall_server) as api:
        made = api.chat.completions.create(model="any", messages=messages, **how)
        streamed = [
            token
            for chunk in api.chat.completions.create(
                model="any", messages=messages, stream=True, **how
            )
            for choice in chunk.choices
            if choice.logprobs is not None
            for token in choice.logprobs.content or []
        ]
    (choice,) = made.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    said = "".join(token.token for token in choice.logprobs.content)
    assert said.strip() == (choice.message.content or "").strip()
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob, "a greedy token is the likeliest"
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.0 + 1e-5
        assert token.bytes == list(token.token.encode())
    assert [t.token for t in streamed] == [t.token for t in choice.logprobs.content]


# ---- what is served from the cache


@pytest.fixture
def fresh() -> Iterator[Running]:
    with serving() as running:
        yield running


def cached(made: Any) -> int:
    return int(made.usage.prompt_tokens_details.cached_tokens)


def test_cached_tokens_match_hit_tokens_of_engine(fresh: Running, told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    with client(fresh) as api:
        first = api.chat.completions.create(model="any", messages=messages)
        assert cached(first) == 0
        before = fresh.service.engine.stats()
        second = api.chat.completions.create(model="any", messages=messages)
        after = fresh.service.engine.stats()
    assert cached(second) == after.hit_tokens - before.hit_tokens > 0
    assert second.usage is not None
    computed = after.prefilled_tokens - before.prefilled_tokens
    assert cached(second) + computed in (second.usage.prompt_tokens - 1, second.usage.prompt_tokens)


def test_prediction_is_proposed_and_counted(told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    engine = {"speculative_tokens": 8}
    with serving(engine=engine) as running, client(running) as api:
        create = functools.partial(api.chat.completions.create, model="any", temperature=0)
        plain = create(messages=messages)
        running.service.engine.clear()
        text = plain.choices[0].message.content
        # Its words have their space in front, which an answer's first one is written without.
        parts: Any = [{"type": "text", "text": part} for part in (f" {text[:2]}", text[2:])]
        predicted = create(messages=messages, prediction={"type": "content", "content": parts})
        running.service.engine.clear()
        wrong = create(messages=messages, prediction={"type": "content", "content": "Not at all"})
        with pytest.raises(openai.BadRequestError, match="prediction"):
            create(messages=messages, prediction={"type": "other", "content": "a"})
    accepted = []
    for answer in (plain, predicted, wrong):
        assert answer.choices[0].message.content == text
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens is not None
        assert details.rejected_prediction_tokens is not None
        accepted.append((details.accepted_prediction_tokens, details.rejected_prediction_tokens))
    assert accepted[1][0] > accepted[0][0]
    assert accepted[2][0] == accepted[0][0]
    assert accepted[2][1] > 0


def test_choices_of_one_request_are_not_cache_hits(fresh: Running, told: Dialogue) -> None:
    """The second choice's prefix was just computed by the first."""
    messages: Any = told.ask(told.questions[0])
    with client(fresh) as api:
        made = api.chat.completions.create(model="any", messages=messages, n=2)
    assert cached(made) == 0


def test_other_cache_salt_gets_no_hits(fresh: Running, told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    with client(fresh) as api:
        for salt, hit in (("a", False), ("b", False), ("a", True), (None, False)):
            body = {"cache_salt": salt} if salt else {}
            made = api.chat.completions.create(model="any", messages=messages, extra_body=body)
            assert bool(cached(made)) is hit


def test_prompt_cache_key_puts_hold_on_prompt(fresh: Running, told: Dialogue) -> None:
    plain, keyed = (told.ask(question) for question in told.questions[:2])
    with client(fresh) as api:
        api.chat.completions.create(model="any", messages=plain)  # type: ignore[arg-type]
        assert held_seconds(fresh) == 0.0
        api.chat.completions.create(model="any", messages=keyed, prompt_cache_key="agent")  # type: ignore[arg-type]
        assert 0.0 < held_seconds(fresh) <= fresh.service.settings.hold_seconds


def held_seconds(running: Running) -> float:
    views = running.service.engine.ask(lambda view: view.tree()).result()
    return max(view.held_seconds for view in views)


# ---- tools, reasoning, schemas


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that writes text and calls a tool twice."""
    model, tokenizer = parrot(
        tmp_path_factory.mktemp("calling"), "I look it up. ", CALL, " And again: ", CALL + " "
    )
    with serving(model, tokenizer, engine={"memory_limit": "400MB"}) as running:
        yield running


def test_tool_calls_are_returned_and_streamed(calling: Running) -> None:
    messages: Any = [{"role": "user", "content": "look"}]
    with client(calling) as api:
        made = api.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        chunks = list(
            api.chat.completions.create(model="any", messages=messages, tools=TOOLS, stream=True)
        )
    (choice,) = made.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look it up.  And again:  "
    assert choice.message.tool_calls is not None
    told = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]  # type: ignore[union-attr]
    assert told == [("look_up", '{"thing": "falcon"}')] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2

    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert [(c.function.name, c.function.arguments) for c in calls if c.function] == told
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_call_is_text_if_request_has_no_tools(calling: Running, more: dict[str, Any]) -> None:
    messages: Any = [{"role": "user", "content": "look"}]
    with client(calling) as api:
        made = api.chat.completions.create(model="any", messages=messages, **more)
    assert CALL in (made.choices[0].message.content or "")
    assert made.choices[0].message.tool_calls is None
    assert made.choices[0].finish_reason == "stop"


def test_tool_result_is_rendered_into_prompt(calling: Running) -> None:
    with client(calling) as api:
        messages: Any = [{"role": "user", "content": "look"}]
        made = api.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        message = made.choices[0].message
        assert message.tool_calls
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "4821"}
            for call in message.tool_calls
        ]
        messages += [message, *results]
        again = api.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    assert again.usage is not None and made.usage is not None
    assert again.usage.prompt_tokens > made.usage.prompt_tokens


ONE_CALL = ["look_up"]


def test_parallel_tool_calls_false_returns_one_call(calling: Running) -> None:
    """The model calls twice; only the first call is returned."""
    messages: Any = [{"role": "user", "content": "look"}]
    with client(calling) as api:
        ask: Any = functools.partial(
            api.chat.completions.create, model="any", messages=messages, tools=TOOLS
        )
        for parallel, calls in ((True, ONE_CALL * 2), (False, ONE_CALL)):
            made = ask(parallel_tool_calls=parallel).choices[0]
            assert [call.function.name for call in made.message.tool_calls] == calls
            assert made.finish_reason == "tool_calls"
            deltas = [
                chunk.choices[0].delta for chunk in ask(parallel_tool_calls=parallel, stream=True)
            ]
            told = [call.function.name for delta in deltas for call in delta.tool_calls or []]
            assert told == calls
        respond: Any = functools.partial(
            api.responses.create, model="any", input="look", tools=FLAT
        )
        for more, calls in (({}, ONE_CALL * 2), ({"parallel_tool_calls": False}, ONE_CALL)):
            *_, last = respond(**more, stream=True)
            for response in (respond(**more), last.response):
                names = [item.name for item in response.output if item.type == "function_call"]
                assert names == calls
                assert response.parallel_tool_calls is (len(calls) > 1)


def test_anthropic_disable_parallel_tool_use_returns_one_call(calling: Running) -> None:
    tool: Any = {"name": "look_up", "input_schema": {"type": "object"}}
    with anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0) as api:
        for alone in (False, True):
            asked: Any = {
                "model": "any",
                "max_tokens": 32,
                "messages": [{"role": "user", "content": "look"}],
                "tools": [tool],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": alone},
            }
            with api.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
            both: list[Any] = [api.messages.create(**asked), streamed]
            for message in both:
                names = [block.name for block in message.content if block.type == "tool_use"]
                assert names == (ONE_CALL if alone else ONE_CALL * 2)
                assert message.stop_reason == "tool_use"


def test_developer_role_is_rendered_as_system(calling: Running) -> None:
    """The template has no developer role."""
    with client(calling) as api:
        for role in ("system", "developer"):
            messages: Any = [
                {"role": role, "content": "Be brief."},
                {"role": "user", "content": "look"},
            ]
            made = api.chat.completions.create(model="any", messages=messages)
            response = api.responses.create(model="any", input=messages)
            assert made.usage is not None and response.usage is not None
            expected = len(ROLES) + len("Be brief.look")
            assert made.usage.prompt_tokens == response.usage.input_tokens == expected


STRICT: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"thing": {"enum": ["falcon", "otter"]}},
                "required": ["thing"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look_up", "forget")
]


def test_forced_tool_choice_gives_tool_call(tmp_path: Path) -> None:
    """The model by itself would say something else."""
    messages: Any = [{"role": "user", "content": "look"}]
    flat = [{"type": "function", **tool["function"]} for tool in STRICT]
    named: Any = {"type": "function", "function": {"name": "forget"}}
    with serving(*parrot(tmp_path, "Hello")) as running, client(running) as api:
        ask: Any = functools.partial(
            api.chat.completions.create, model="any", messages=messages, tools=STRICT
        )
        assert ask().choices[0].message.content == "Hello"
        for choice, names in (("required", {"look_up", "forget"}), (named, {"forget"})):
            made = ask(tool_choice=choice).choices[0]
            (call,) = made.message.tool_calls
            assert call.function.name in names
            assert json.loads(call.function.arguments)["thing"] in ("falcon", "otter")
            assert made.finish_reason == "tool_calls"
        respond: Any = functools.partial(
            api.responses.create, model="any", input="look", tools=flat
        )
        (item,) = respond(tool_choice={"type": "function", "name": "forget"}).output
        assert (item.type, item.name) == ("function_call", "forget")
        for wrong in ({"type": "function", "function": {"name": "stocks"}}, {"type": "other"}):
            with pytest.raises(openai.BadRequestError) as refused:
                ask(tool_choice=wrong)
            assert refused.value.param == "tool_choice"


def test_reasoning_is_separated(tmp_path: Path) -> None:
    model, tokenizer = parrot(
        tmp_path, "<think>", "I wonder. ", "</think>", "It is so.", marks=("<think>", "</think>")
    )
    messages: Any = [{"role": "user", "content": "so?"}]
    limits = {"memory_limit": "400MB"}
    with serving(model, tokenizer, engine=limits) as running, client(running) as api:
        made = api.chat.completions.create(model="any", messages=messages)
        chunks = api.chat.completions.create(model="any", messages=messages, stream=True)
        deltas = [chunk.choices[0].delta for chunk in chunks]
    message = made.choices[0].message
    assert message.content == "It is so."
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "I wonder. "
    assert "".join(delta.content or "" for delta in deltas) == "It is so."
    thought = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(thought) == "I wonder. "


class Answer(BaseModel):
    code: int
    sure: bool


def test_answer_follows_schema(recall_server: Running, told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    with client(recall_server) as api:
        made = api.chat.completions.parse(model="any", messages=messages, response_format=Answer)
        plain = api.chat.completions.create(
            model="any", messages=messages, response_format={"type": "text"}
        )
    assert isinstance(made.choices[0].message.parsed, Answer)
    assert (plain.choices[0].message.content or "").strip() == told.questions[0].answer


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
            None,
        ),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "poem"}, "response_format.type"),
    ],
)
def test_invalid_schema_is_refused(recall_server: Running, wanted: Any, param: str) -> None:
    with client(recall_server) as api, pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "a"}], response_format=wanted
        )
    assert refused.value.param == param


# ---- completions


def test_completion_of_tokens_matches_chat_answer(recall_server: Running, told: Dialogue) -> None:
    messages = told.ask(told.questions[0])
    tokens = list(prompt_of(recall_server, messages))
    with client(recall_server) as api:
        made = api.completions.create(model="any", prompt=tokens, max_tokens=20)
        assert made.choices[0].text.strip() == told.questions[0].answer
        assert made.choices[0].finish_reason == "stop"
        assert made.object == "text_completion"
        chunks = list(
            api.completions.create(
                model="any",
                prompt=tokens,
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == made.choices[0].text
    assert made.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == made.usage.completion_tokens


def test_completions_of_several_prompts_keep_order(recall_server: Running, told: Dialogue) -> None:
    prompts = [
        list(prompt_of(recall_server, told.ask(question))) for question in told.questions[:2]
    ]
    with client(recall_server) as api:
        made = api.completions.create(model="any", prompt=prompts, n=2, max_tokens=20)
        texts: dict[int, str] = {}
        for chunk in api.completions.create(
            model="any", prompt=prompts, n=2, max_tokens=20, stream=True
        ):
            (choice,) = chunk.choices
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    wanted = [question.answer for question in told.questions[:2] for _ in range(2)]
    assert [choice.text.strip() for choice in made.choices] == wanted
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert texts == {choice.index: choice.text for choice in made.choices}
    assert made.usage is not None
    assert made.usage.prompt_tokens == sum(len(prompt) for prompt in prompts)


def test_completion_has_echo_and_logprobs(recall_server: Running) -> None:
    text = "The code of the amber falcon is"
    with client(recall_server) as api:
        echoed = api.completions.create(model="any", prompt=text, max_tokens=3, echo=True)
        made = api.completions.create(model="any", prompt=text, max_tokens=3, logprobs=2)
        parts = [
            chunk.choices[0].logprobs
            for chunk in api.completions.create(
                model="any", prompt=text, max_tokens=3, logprobs=2, stream=True
            )
        ]
    assert echoed.choices[0].text == text + made.choices[0].text
    found = made.choices[0].logprobs
    assert found is not None and found.tokens is not None
    assert "".join(found.tokens) == made.choices[0].text
    assert found.text_offset is not None and found.text_offset[0] == 0
    assert [len(top) for top in found.top_logprobs or []] == [2] * len(found.tokens)
    assert [t for part in parts if part for t in part.tokens or []] == found.tokens


@pytest.mark.parametrize("stream", [False, True])
def test_completion_text_continues_prompt(
    recall_server: Running, told: Dialogue, stream: bool
) -> None:
    """Including the leading space; offsets and log-probabilities refer to it."""
    tokenizer = recall_server.service.tokenizer
    bias = {str(tokenizer.encode(" amber", add_special_tokens=False)[0]): 100}
    how: dict[str, Any] = {"max_tokens": 3, "logprobs": 1, "logit_bias": bias, "stream": stream}
    with client(recall_server) as api:
        made = api.completions.create(model="any", prompt="the code amber", **how)
        choices = [chunk.choices[0] for chunk in (made if stream else [made])]
    text = "".join(choice.text for choice in choices)
    assert text == " amber amber amber"
    tokens = [token for c in choices if c.logprobs for token in c.logprobs.tokens or []]
    offsets = [at for c in choices if c.logprobs for at in c.logprobs.text_offset or []]
    assert tokens == [" amber"] * 3 and offsets == [0, 6, 12]


@pytest.mark.parametrize(
    ("field", "value"), [("suffix", "the end"), ("best_of", 3), ("prompt", []), ("prompt", "")]
)
def test_unsupported_completions_fields_are_refused(
    recall_server: Running, field: str, value: Any
) -> None:
    with client(recall_server) as api, pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(**{"model": "any", "prompt": "a", field: value})
    assert refused.value.param == field


PROMPTS_OF_NO_FORM = [7, 1.5, True, {}, [None], [1, "a"], ["a", 1], [1.5], [[1], 2], [["a"]]]


def refusal(server: Running, path: str, prompt: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 1, "echo": True}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "prompt"
    return str(error["message"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/cache/explain"])
@pytest.mark.parametrize("token", [-1, 3_025, 2**31, -(2**70)])
def test_token_outside_vocabulary_is_named_in_error(
    recall_server: Running, path: str, token: int
) -> None:
    prompts: list[Any] = [[token], [1, token, -2]]
    if path == "/v1/completions":
        prompts.append([[1], [2, token]])
    for prompt in prompts:
        said = refusal(recall_server, path, prompt)
        assert (
            said == f"prompt: token {token} does not exist; the model has 3,025 tokens, 0 to 3024"
        )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/cache/explain"])
@pytest.mark.parametrize("prompt", PROMPTS_OF_NO_FORM, ids=str)
def test_invalid_prompt_type_names_valid_ones(
    recall_server: Running, path: str, prompt: Any
) -> None:
    said = refusal(recall_server, path, prompt)
    assert said == "prompt: a prompt is a text or a list of token numbers"


# ---- responses


def test_response_has_text_status_and_usage(recall_server: Running, told: Dialogue) -> None:
    question = told.questions[0]
    items: Any = told.ask(question)
    with client(recall_server) as api:
        made = api.responses.create(model="any", input=items)
        assert made.output_text.strip() == question.answer
        assert made.status == "completed"
        assert made.usage is not None
        assert made.usage.input_tokens == len(prompt_of(recall_server, items))
        short = api.responses.create(model="any", input=items, max_output_tokens=1)
        assert short.status == "incomplete"
        assert short.incomplete_details is not None
        assert short.incomplete_details.reason == "max_output_tokens"
        plain = api.responses.create(
            model="any", instructions=items[0]["content"], input="Hello!", max_output_tokens=4
        )
        assert plain.output_text


def test_response_events_have_documented_order(recall_server: Running, told: Dialogue) -> None:
    items: Any = told.ask(told.questions[0])
    with client(recall_server) as api, api.responses.stream(model="any", input=items) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    assert final.output_text.strip() == told.questions[0].answer


def test_response_has_tool_call_items(calling: Running) -> None:
    with client(calling) as api:
        made = api.responses.create(model="any", input="look", tools=FLAT)
        kinds = [item.type for item in made.output]
        assert kinds == ["message", "function_call", "function_call"]
        calls = [item for item in made.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"thing": "falcon"}] * 2
        with api.responses.stream(model="any", input="look", tools=FLAT) as stream:
            streamed = stream.get_final_response()
        names = [item.name for item in streamed.output if item.type == "function_call"]
        assert names == ["look_up", "look_up"]
        items: Any = [
            {"role": "user", "content": "look"},
            *made.output,
            *(
                {"type": "function_call_output", "call_id": call.call_id, "output": "4821"}
                for call in calls
            ),
        ]
        again = api.responses.create(model="any", input=items, tools=FLAT)
        assert again.usage is not None and made.usage is not None
        assert again.usage.input_tokens > made.usage.input_tokens


def test_response_output_round_trips_as_one_message(calling: Running) -> None:
    """Text and calls of one answer, whole or streamed."""
    with client(calling) as api:
        ask: Any = functools.partial(api.responses.create, model="any", tools=FLAT)
        *_, last = ask(input="look", stream=True)
        kinds = [item.type for item in last.response.output]
        assert kinds == ["message", "function_call", "message", "function_call"]
        for made in (ask(input="look"), last.response):
            calls = [item for item in made.output if item.type == "function_call"]
            results = [
                {"type": "function_call_output", "call_id": call.call_id, "output": "4821"}
                for call in calls
            ]
            items = [{"role": "user", "content": "look"}, *made.output, *results]
            said = {"role": "assistant", "content": made.output_text}
            called = [
                {"function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
            prompt = calling.service.prompts.render(
                [
                    items[0],
                    {**said, "tool_calls": called},
                    *({"role": "tool", "content": "4821"} for _ in calls),
                ],
                TOOLS,
            )
            assert len(calls) == 2
            assert ask(input=items).usage.input_tokens == len(prompt)


def test_response_messages_have_own_logprobs(calling: Running) -> None:
    include: Any = ["message.output_text.logprobs"]
    with client(calling) as api:
        ask: Any = functools.partial(
            api.responses.create, model="any", input="look", tools=FLAT, include=include
        )
        events = list(ask(stream=True))
        (message, *_) = ask().output
    told = [
        [token.token for token in event.logprobs]
        for event in events
        if event.type == "response.output_text.done"
    ]
    # The last piece is a call with a space behind it, in one token.
    assert told == [["I look it up. "], [" And again: ", CALL + " "]]
    written = [
        [token.token for token in item.content[0].logprobs]
        for item in events[-1].response.output
        if item.type == "message"
    ]
    assert written == told
    assert message.content[0].logprobs[0].token == "I look it up. "


def test_response_usage_counts_reasoning_and_cached_tokens(tmp_path: Path) -> None:
    """Reasoning is counted, and cached tokens never exceed the prompt."""
    pieces = ("<think>", "I wonder. ", "</think>", "It is so.")
    model, tokenizer = parrot(tmp_path, *pieces, marks=("<think>", "</think>"))
    limits = {"memory_limit": "400MB"}
    with serving(model, tokenizer, engine=limits) as running, client(running) as api:
        made = api.responses.create(model="any", input="so?")
        *_, last = api.responses.create(model="any", input="so?", stream=True)
        assert last.type == "response.completed"
        for response in (made, last.response):
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == 1
            read = response.usage.input_tokens_details
            assert 0 <= read.cached_tokens + read.cache_write_tokens <= response.usage.input_tokens
        count = running.service.prompts.reasoning_tokens
        start, thought, end, said = (tokenizer.convert_tokens_to_ids(piece) for piece in pieces)
        assert count([thought, thought, end, said], inside=True) == 2, "the template opened it"
        assert count([start, thought, thought]) == 2, "it was cut off"
        assert count([said, said]) == 0


def test_response_repeats_requested_format(recall_server: Running) -> None:
    form: Any = {
        "type": "json_schema",
        "name": "answer",
        "strict": True,
        "schema": {"type": "object", "properties": {"code": {"type": ["integer", "null"]}}},
    }
    with client(recall_server) as api:
        ask: Any = functools.partial(
            api.responses.create, model="any", input="Hello!", max_output_tokens=4
        )
        assert ask().text.format.to_dict() == {"type": "text"}
        first, *_ = ask(text={"format": form}, stream=True)
        for made in (first.response, ask(text={"format": form})):
            assert made.text.format.to_dict() == form


def test_response_follows_schema(recall_server: Running, told: Dialogue) -> None:
    items: Any = told.ask(told.questions[0])
    with client(recall_server) as api:
        made = api.responses.parse(model="any", input=items, text_format=Answer)
    assert isinstance(made.output_parsed, Answer)


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]},
        {"input": [{"type": "item_reference", "id": "a"}]},
        {"input": []},
    ],
    ids=lambda more: next(iter(more)),
)
def test_unsupported_responses_fields_are_refused(recall_server: Running, more: Any) -> None:
    with client(recall_server) as api, pytest.raises(openai.BadRequestError) as refused:
        api.responses.create(**{"model": "any", "input": "a", **more})
    assert refused.value.param is not None
    assert refused.value.param.startswith(next(iter(more)))


# ---- models, and what there is not


def test_models_route_lists_and_retrieves_model(recall_server: Running) -> None:
    with client(recall_server) as api:
        assert [model.id for model in api.models.list()] == [MODEL_NAME]
        assert api.models.retrieve(MODEL_NAME).owned_by == "penstock"
        with pytest.raises(openai.NotFoundError) as missing:
            api.models.retrieve("another/one")
        assert missing.value.code == "model_not_found"


def test_embeddings_of_text_model_are_404(recall_server: Running) -> None:
    with client(recall_server) as api, pytest.raises(openai.APIStatusError) as refused:
        api.embeddings.create(model="any", input="a")
    assert refused.value.status_code == 404
    assert "embeddings are not served" in refused.value.message


def test_stored_response_is_retrieved_and_deleted(recall_server: Running) -> None:
    with client(recall_server) as api:
        made = api.responses.create(model="any", input="hello", max_output_tokens=4)
        unkept = api.responses.create(model="any", input="hi", max_output_tokens=4, store=False)
        again = api.responses.retrieve(made.id)
        assert (again.id, again.output_text) == (made.id, made.output_text)
        for other in (unkept.id, "resp_none"):
            with pytest.raises(openai.NotFoundError) as missing:
                api.responses.retrieve(other)
            assert missing.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(made.id, extra_query={"cache_salt": "another tenant"})
        api.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(made.id)


def test_response_stream_error_events() -> None:
    """With a sequence number; the failed response is last, where clients look for it."""
    with serving(request_timeout_seconds=0.5) as running, client(running) as api:
        stream = api.responses.create(
            model="any",
            input="hello",
            max_output_tokens=30_000,
            stream=True,
            extra_body={"logit_bias": {"2": -100}},
        )
        events: list[Any] = list(stream)
    error, last = events[-2:]
    assert error.type == "error" and error.sequence_number == len(events) - 2
    assert error.code == "timeout" and "--request-timeout" in error.message
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == (error.code, error.message)


def test_response_repeats_request_settings(recall_server: Running) -> None:
    """Clients read them without checking for their presence."""
    flat = {"type": "function", "name": "f"}
    with client(recall_server) as api:
        plain = api.responses.create(model="any", input="hi", max_output_tokens=1).to_dict()
        body: Any = {"temperature": 0.5, "top_p": 0.9, "prompt_cache_key": "k", "tools": [flat]}
        given_back = api.responses.create(model="any", input="hi", **body).to_dict()
    assert (plain["temperature"], plain["top_p"], plain["truncation"]) == (0.0, 1.0, "disabled")
    assert (plain["presence_penalty"], plain["frequency_penalty"]) == (0.0, 0.0)
    assert (plain["status"], plain["completed_at"]) == ("incomplete", None)
    nothing = ("error", "max_tool_calls", "prompt_cache_key", "safety_identifier")
    assert {plain[name] for name in nothing} == {None}
    assert given_back["completed_at"] >= given_back["created_at"]
    assert (given_back["temperature"], given_back["top_p"]) == (0.5, 0.9)
    assert given_back["prompt_cache_key"] == "k"
    unsaid = {"description": None, "parameters": None, "strict": None}
    assert given_back["tools"] == [{**unsaid, **flat}]


def test_invalid_arguments_in_history_are_passed_on(recall_server: Running) -> None:
    """A truncated call is sent back in the next turn."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    history: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "no"},
        {"role": "user", "content": "again"},
    ]
    with client(recall_server) as api:
        made = api.chat.completions.create(model="any", messages=history, max_tokens=2)
    assert made.choices[0].message.role == "assistant"


# ---- wrong requests


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"seed": "1"}, "seed"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"modalities": ["audio"]}, "modalities"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0",
    ),
]


@pytest.mark.parametrize(("changed", "param"), WRONG, ids=lambda case: str(case)[:40])
def test_invalid_values_name_their_field(
    recall_server: Running, changed: dict[str, Any], param: str
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **changed}
    answer = httpx.post(
        f"{recall_server.url}/v1/chat/completions",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_unknown_fields_and_text_parts_are_accepted(recall_server: Running, told: Dialogue) -> None:
    *before, last = told.ask(told.questions[0])
    parts = [{"type": "text", "text": last["content"][:10]}, last["content"][10:]]
    messages: Any = [*before, {"role": "user", "content": parts, "cache_control": {"a": 1}}]
    with client(recall_server) as api:
        made = api.chat.completions.create(
            model="gpt-9",
            messages=messages,
            user="somebody",
            metadata={"a": "b"},
            store=False,
            extra_body={"never_heard_of": {"it": [1, 2]}},
        )
    assert (made.choices[0].message.content or "").strip() == told.questions[0].answer


def test_context_length_error_has_numbers(recall_server: Running) -> None:
    messages: Any = [{"role": "user", "content": "7 " * 40_000}]
    with client(recall_server) as api, pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model="any", messages=messages, max_tokens=10_000_000)
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length is 32768 tokens" in refused.value.message


def test_too_many_choices_are_400(told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    with serving(engine={"max_queue": 2, "max_batch_size": 1}) as running, client(running) as api:
        with pytest.raises(openai.BadRequestError, match=r"4 answers; at most 2") as refused:
            api.chat.completions.create(model="any", messages=messages, n=4)
        assert refused.value.code == "too_many_answers"
        with pytest.raises(openai.BadRequestError, match=r"2 prompts .* 4 answers; at most 2"):
            api.completions.create(model="any", prompt=["a", "b"], n=2, max_tokens=1)
        assert len(api.completions.create(model="any", prompt="a", n=2, max_tokens=1).choices) == 2


def test_request_timeout_is_reported(told: Dialogue) -> None:
    messages: Any = [{"role": "user", "content": "Hello!"}]
    more: dict[str, Any] = {"max_tokens": 4_000, "logit_bias": {"300": 100}}
    with serving(request_timeout_seconds=0.3) as running, client(running) as api:
        with pytest.raises(openai.APIStatusError) as refused:
            api.chat.completions.create(model="any", messages=messages, **more)
        assert refused.value.status_code == 504
        with pytest.raises(openai.APIError, match="did not end"):
            list(api.chat.completions.create(model="any", messages=messages, stream=True, **more))


# ---- long prompts, and clients that leave


def long_request(stream: bool) -> dict[str, Any]:
    """Return a long request: token 300, again and again."""
    return {
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 20_000,
        "logit_bias": {"300": 100},
        "stream": stream,
    }


def test_stream_has_comments_during_prefill(told: Dialogue) -> None:
    words = " ".join(["wandering"] * 1_500)
    body = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 1,
        "stream": True,
    }
    with (
        serving(ping_seconds=0.02) as running,
        httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body, timeout=60) as answer,
    ):
        lines = [line for line in answer.iter_lines() if line]
    first = next(i for i, line in enumerate(lines) if line.startswith("data: "))
    assert first > 0 and all(line.startswith((": ping", ": prompt: ")) for line in lines[:first])
    assert [line for line in lines if not line.startswith(":")][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_request(stream: bool) -> None:
    with serving() as running:
        engine = running.service.engine
        idle = engine.stats().used_bytes
        url = f"{running.url}/v1/chat/completions"
        with httpx.Client() as api:
            if stream:
                with api.stream("POST", url, json=long_request(True)) as answer:
                    lines = answer.iter_lines()
                    next(lines)
                    assert engine.stats().running == 1
            else:
                with pytest.raises(httpx.ReadTimeout):
                    api.post(url, json=long_request(False), timeout=0.5)
        wait_until(lambda: engine.stats().running + engine.stats().prefilling == 0)
        engine.clear()
        assert engine.stats().used_bytes <= idle + 100_000, "its bytes are back"
        wait_until(lambda: running.service.open_requests == 0)
        assert running.service.recent[-1].state == "cancelled"


def test_recent_request_records_have_no_text(fresh: Running, told: Dialogue) -> None:
    messages: Any = told.ask(told.questions[0])
    with client(fresh) as api:
        api.chat.completions.create(model="any", messages=messages)
    wait_until(lambda: fresh.service.open_requests == 0)
    record = fresh.service.recent[-1].record()
    assert record["state"] == "done" and record["finish"] == "stop"
    assert record["label"] == "/v1/chat/completions"
    assert record["prompt_tokens"] == len(prompt_of(fresh, messages))
    assert record["first_token_seconds"] > 0.0
    assert record["explanation"]["held_tokens"] == 0
    written = json.dumps(record)
    assert told.facts[0].noun not in written
