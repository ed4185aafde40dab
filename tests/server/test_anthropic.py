"""Anthropic's API through Anthropic's client over a socket."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from parrot import parrot
from servers import MODEL_NAME, Running, serving

from penstock.server.answers import Delta, ToolCall
from penstock.server.anthropic.anthropic_forms import CountRequest, MessagesRequest
from penstock.server.anthropic.anthropic_prompt import prompt_of
from penstock.server.anthropic.messages import Blocks
from penstock.server.prompts import Prompts
from penstock_bench.recall import Dialogue, Question

CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
WEATHER = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLIENTS: list[anthropic.Anthropic] = []


@functools.cache
def client(running: Running) -> anthropic.Anthropic:
    made = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
    CLIENTS.append(made)
    return made


@pytest.fixture(scope="module", autouse=True)
def _closing() -> Iterator[None]:
    yield
    for made in CLIENTS:
        made.close()


def asking(told: Dialogue, question: Question, **more: Any) -> dict[str, Any]:
    """Return the arguments of a client call for a question."""
    messages = told.ask(question)
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    found = {"model": MODEL_NAME, "max_tokens": 32, "messages": rest, **more}
    return {**found, "system": system[0]} if system else found


def total(usage: Any) -> int:
    """Return the number of prompt tokens."""
    return int(
        usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    )


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text").strip()


# ---- the official client


def test_message_has_answer_and_stop_reason(recall_server: Running, told: Dialogue) -> None:
    for question in told.questions:
        message = client(recall_server).messages.create(**asking(told, question))
        assert text_of(message) == question.answer
        assert (message.type, message.role, message.model) == ("message", "assistant", MODEL_NAME)
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert message.id.startswith("msg_")
        assert message.usage.output_tokens > 1


def test_stream_matches_whole_message(recall_server: Running, told: Dialogue) -> None:
    question = told.questions[0]
    whole = client(recall_server).messages.create(**asking(told, question))
    with client(recall_server).messages.stream(**asking(told, question)) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(texts) == text_of_blocks(message) == text_of_blocks(whole)
    assert len(texts) > 1  # as it came
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert total(message.usage) == total(whole.usage)


def text_of_blocks(message: Any) -> str:
    (block,) = message.content
    return str(block.text)


def test_stream_events_have_documented_order(recall_server: Running, told: Dialogue) -> None:
    asked = asking(told, told.questions[0], stream=True)
    with client(recall_server).messages.create(**asked) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_event_names_match_types_and_include_ping(recall_server: Running, told: Dialogue) -> None:
    asked = asking(told, told.questions[0], stream=True)
    answer = httpx.post(f"{recall_server.url}/v1/messages", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    for name, content in events:
        assert json.loads(content.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert ["event: ping", 'data: {"type":"ping"}'] in events


def test_async_client_gets_whole_and_streamed_message(
    recall_server: Running, told: Dialogue
) -> None:
    async def ask(question: Question) -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(
            base_url=recall_server.url, api_key="none", max_retries=0
        ) as asynchronous:
            whole = await asynchronous.messages.create(**asking(told, question))
            async with asynchronous.messages.stream(**asking(told, question)) as stream:
                texts = [text async for text in stream.text_stream]
        return text_of(whole), "".join(texts).strip()

    async def ask_all() -> list[tuple[str, str]]:
        return await asyncio.gather(*(ask(question) for question in told.questions))

    for question, found in zip(told.questions, asyncio.run(ask_all()), strict=True):
        assert found == (question.answer, question.answer)


def test_stop_sequence_ends_message(recall_server: Running, told: Dialogue) -> None:
    question = told.questions[0]
    asked = asking(told, question, stop_sequences=["~", "."])
    message = client(recall_server).messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ".")
    assert text_of(message) == question.answer.removesuffix(".")
    with client(recall_server).messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", ".")


def test_max_tokens_ends_message(recall_server: Running, told: Dialogue) -> None:
    message = client(recall_server).messages.create(**asking(told, told.questions[0], max_tokens=1))
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 1)


def test_sampling_parameters_reach_engine(recall_server: Running, told: Dialogue) -> None:
    """`top_k` and `top_p` leave only the likeliest token."""
    question = told.questions[0]
    for chosen in ({"temperature": 1.0, "top_k": 1}, {"temperature": 0.5, "top_p": 0.5}):
        asked = asking(told, question, extra_body=chosen)  # the client no longer names them
        assert text_of(client(recall_server).messages.create(**asked)) == question.answer


def test_unknown_fields_are_ignored(recall_server: Running, told: Dialogue) -> None:
    question = told.questions[0]
    more = {"metadata": {"user_id": "7"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked = asking(told, question, **more, extra_body={"context_management": {"edits": []}})
    assert text_of(client(recall_server).messages.create(**asked)) == question.answer


def test_answer_follows_schema(recall_server: Running, told: Dialogue) -> None:
    class Found(pydantic.BaseModel):
        found: bool

    asked = asking(told, told.questions[0], max_tokens=64)
    message = client(recall_server).messages.parse(**asked, output_format=Found)
    assert isinstance(message.parsed_output, Found)


# ---- usage: what was really served


@pytest.fixture
def fresh(told: Dialogue) -> Iterator[Running]:
    """A server with an empty cache."""
    with serving() as running:
        yield running


def test_usage_counts_cached_tokens(fresh: Running, told: Dialogue) -> None:
    first, second = told.questions[:2]
    before = fresh.service.engine.stats()
    cold = client(fresh).messages.create(**asking(told, first)).usage
    between = fresh.service.engine.stats()
    warm = client(fresh).messages.create(**asking(told, second)).usage
    after = fresh.service.engine.stats()
    for usage, old, new in ((cold, before, between), (warm, between, after)):
        assert total(usage) == new.prompt_tokens - old.prompt_tokens
        assert usage.cache_read_input_tokens == new.hit_tokens - old.hit_tokens
    assert cold.cache_read_input_tokens == 0
    assert warm.cache_read_input_tokens > 400
    # What the first has left behind is what the second was served.
    assert cold.cache_creation_input_tokens >= warm.cache_read_input_tokens
    assert cold.cache_creation_input_tokens % 64 == 0  # whole blocks
    assert 0 < cold.input_tokens <= 64


def test_usage_of_repeated_prompt_has_no_cache_creation(fresh: Running, told: Dialogue) -> None:
    asked = asking(told, told.questions[0])
    cold = client(fresh).messages.create(**asked).usage
    with client(fresh).messages.stream(**asked) as stream:
        warm = stream.get_final_message().usage
    assert warm.cache_creation_input_tokens == 0
    assert warm.cache_read_input_tokens == cold.cache_creation_input_tokens
    assert total(warm) == total(cold)


def test_other_cache_salt_gets_no_hits(fresh: Running, told: Dialogue) -> None:
    asked = asking(told, told.questions[0])
    usages = [
        client(fresh).messages.create(**asked, extra_body={"cache_salt": salt}).usage
        for salt in ("one", "two", "two")
    ]
    read = [usage.cache_read_input_tokens for usage in usages]
    assert read[:2] == [0, 0]
    assert read[2] > 400


def test_message_start_reports_no_cache_hits(fresh: Running, told: Dialogue) -> None:
    asked = asking(told, told.questions[0])
    for _ in range(2):
        with client(fresh).messages.create(**asked, stream=True) as stream:
            events = {event.type: event for event in stream}
    usage = events["message_start"].message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (None, None)
    assert usage.input_tokens == total(events["message_delta"].usage)


def test_count_tokens_matches_usage_without_generating(
    recall_server: Running, told: Dialogue
) -> None:
    asked = asking(told, told.questions[0])
    used = total(client(recall_server).messages.create(**asked).usage)
    del asked["max_tokens"]
    generated = recall_server.service.engine.stats().generated_tokens
    assert client(recall_server).messages.count_tokens(**asked).input_tokens == used
    assert recall_server.service.engine.stats().generated_tokens == generated


# ---- cache_control


def held(running: Running) -> dict[tuple[int, int], float]:
    """Return the nodes on hold with their remaining seconds."""
    nodes = running.service.engine.ask(lambda view: view.tree()).result(10)
    return {(node.start, node.end): node.held_seconds for node in nodes if node.held_seconds > 0}


def test_cache_control_holds_prompt_up_to_breakpoint(fresh: Running, told: Dialogue) -> None:
    asked = asking(told, told.questions[0])
    client(fresh).messages.create(**asked)
    assert held(fresh) == {}  # nobody asked for it
    middle = len(asked["messages"]) // 2
    text = asked["messages"][middle]["content"]
    for ttl, least in (("5m", 200.0), ("1h", 3000.0)):
        control = {"type": "ephemeral", "ttl": ttl}
        block = {"type": "text", "text": text, "cache_control": control}
        asked["messages"][middle] = {**asked["messages"][middle], "content": [block]}
        client(fresh).messages.create(**asked)
        seconds = held(fresh)
        assert min(seconds) == min(seconds, key=lambda node: node[0])
        assert min(start for start, _ in seconds) == 0
        assert all(least < left <= least * 1.5 for left in seconds.values())


def request_of(**fields: Any) -> CountRequest:
    return CountRequest.model_validate({"model": MODEL_NAME, **fields})


def marked(text: str, ttl: str = "5m") -> dict[str, Any]:
    control = {"type": "ephemeral", "ttl": ttl}
    return {"type": "text", "text": text, "cache_control": control}


def plain(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    made = [plain(block) if isinstance(block, str) else block for block in blocks]
    return {"role": "user", "content": made}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    """Renders prompts with a token per character, for readable comparisons."""
    _, tokenizer = parrot(tmp_path_factory.mktemp("parrot"), "Hello")
    return Prompts(tokenizer)


def spelled(request: CountRequest, prompts: Prompts) -> tuple[str, str | None, float]:
    """Return a prompt's text, its held part, and the seconds of the hold."""
    prompt = prompt_of(request, prompts)
    text = prompts.decode(prompt.tokens)
    if prompt.hold is None:
        return text, None, 0.0
    return text, prompts.decode(prompt.tokens[: prompt.hold.tokens]), prompt.hold.seconds


HOLDS = {
    "a system prompt": (
        {"system": [marked("Be brief.")], "messages": [user("Hi")]},
        "<|system|>Be brief.<|end|><|user|>",
    ),
    "the first of its blocks": (
        {"system": [marked("Be brief."), plain("Today is Monday.")], "messages": [user("Hi")]},
        "<|system|>Be brief.",
    ),
    "a message": (
        {"messages": [user(marked("Hi")), {"role": "assistant", "content": "Yes?"}, user("Bye")]},
        "<|user|>Hi<|end|>",
    ),
    "a block of a message": (
        {"system": "Be brief.", "messages": [user("A", marked("B"), "C")]},
        "<|system|>Be brief.<|end|><|user|>A\n\nB",
    ),
    "the last message": (
        {"messages": [user("A"), {"role": "assistant", "content": [marked("B")]}, user("C")]},
        "<|user|>A<|end|><|assistant|>B<|end|>",
    ),
    "the last of several marks": (
        {"system": [marked("S")], "messages": [user(marked("A")), user("B")]},
        "<|system|>S<|end|><|user|>A",
    ),
    "the last of several, as the longest": (
        {"system": [marked("S", "1h")], "messages": [user(marked("A"), "B")]},
        "<|system|>S<|end|><|user|>A",
    ),
    "all, as the longest": (
        {
            "system": [marked("S", "1h")],
            "messages": [user("A")],
            "cache_control": {"type": "ephemeral", "ttl": "5m"},
        },
        "<|system|>S<|end|><|user|>A<|end|><|assistant|>",
    ),
    "a mark on all": (
        {"messages": [user("A")], "cache_control": {"type": "ephemeral"}},
        "<|user|>A<|end|><|assistant|>",
    ),
    "no mark": ({"messages": [user("A")]}, None),
}


@pytest.mark.parametrize("name", HOLDS)
def test_hold_ends_at_cache_breakpoint(name: str, prompts: Prompts) -> None:
    fields, expected = HOLDS[name]
    text, found, seconds = spelled(request_of(**fields), prompts)
    assert found == expected
    assert text.startswith(found or "")
    assert seconds == (0.0 if expected is None else 3600.0 if "longest" in name else 300.0)


def test_cache_breakpoint_on_tools_covers_tools_and_system(prompts: Prompts) -> None:
    tool = {**WEATHER, "cache_control": {"type": "ephemeral"}}
    text, found, _ = spelled(request_of(tools=[tool], messages=[user("Hi")]), prompts)
    assert found == text[: text.index("Hi")]
    assert found.startswith("<|tools|>")
    system = [marked("Be brief."), plain("Today is Monday.")]
    both = request_of(tools=[tool], system=system, messages=[user("Hi")])
    text, found, _ = spelled(both, prompts)
    assert found == text[: text.index("Hi")], "tools may stand behind the system"


# ---- what templates are given


def test_content_blocks_join_to_message_text(prompts: Prompts) -> None:
    whole = request_of(system="S", messages=[{"role": "user", "content": "A\n\nB"}])
    blocks = request_of(system=[plain("S")], messages=[user("A"), user("B")])
    assert prompt_of(whole, prompts) == prompt_of(blocks, prompts)


def test_tool_calls_and_results_are_rendered(prompts: Prompts) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [plain("Rain")]},
        {"type": "tool_result", "tool_use_id": "t1", "content": "none", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t1"},
    ]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    said = {"role": "assistant", "content": [thought, plain("Let me see."), use]}
    text, _, _ = spelled(request_of(messages=[user("Hi"), said, user(*results, "So?")]), prompts)
    assert text == (
        "<|user|>Hi<|end|>"
        '<|assistant|>Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}'
        "</tool_call><|end|><|tool|>Rain<|end|><|tool|>Error: none<|end|><|tool|><|end|>"
        "<|user|>So?<|end|><|assistant|>"
    )


def test_prefilled_assistant_turn_is_continued(prompts: Prompts) -> None:
    messages = [user("Hi"), {"role": "assistant", "content": "The answer is"}]
    text, _, _ = spelled(request_of(messages=messages), prompts)
    assert text == "<|user|>Hi<|end|><|assistant|>The answer is"


def test_tool_choice_none_hides_tools_from_model(prompts: Prompts) -> None:
    fields = {"tools": [WEATHER], "messages": [user("Hi")]}
    assert "weather" in spelled(request_of(**fields), prompts)[0]
    none = request_of(**fields, tool_choice={"type": "none"})
    assert "weather" not in spelled(none, prompts)[0]


# ---- calls and reasoning


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model thinks, writes text and calls a tool."""
    pieces = ("<think>", "Which city?", "</think>", "One moment.", "<tool_call>", CALL)
    model, tokenizer = parrot(tmp_path_factory.mktemp("calling"), *pieces, "</tool_call>")
    with serving(model, tokenizer) as running:
        yield running


def weather(**more: Any) -> dict[str, Any]:
    base = {"model": "any", "max_tokens": 200, "tools": [WEATHER], "messages": [user("Weather?")]}
    return {**base, **more}


def test_tool_call_becomes_tool_use_block(calling: Running) -> None:
    message = client(calling).messages.create(**weather())
    said, use = message.content
    assert (said.type, said.text) == ("text", "One moment.")
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"


def test_tool_use_block_is_streamed(calling: Running) -> None:
    with client(calling).messages.stream(**weather()) as stream:
        events = list(stream)
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[1].input == {"city": "Oslo"}
    assert message.stop_reason == "tool_use"
    starts = [event.index for event in events if event.type == "content_block_start"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == stops == [0, 1]


def test_call_is_text_if_request_has_no_tools(calling: Running) -> None:
    message = client(calling).messages.create(**weather(tools=[]))
    assert text_of(message) == f"One moment.<tool_call>{CALL}</tool_call>"
    assert message.stop_reason == "end_turn"


CITIES = {"city": {"enum": ["Oslo", "Lima"]}}
STRICT = {
    "type": "object",
    "properties": CITIES,
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_forced_tool_choice_gives_tool_use_block(tmp_path: Path, choice: dict[str, str]) -> None:
    """The model by itself would say something else."""
    tools = [{**WEATHER, "input_schema": STRICT}, {**WEATHER, "name": "time"}]
    with serving(*parrot(tmp_path, "Hello")) as running:
        asked = weather(tools=tools if choice["type"] == "tool" else tools[:1])
        free = client(running).messages.create(**asked)
        assert text_of(free) == "Hello"
        message = client(running).messages.create(**asked, tool_choice=choice, timeout=60)
        assert [block.type for block in message.content] == ["tool_use"]
        assert message.content[0].name == "weather"
        assert message.content[0].input["city"] in ("Oslo", "Lima")
        assert message.stop_reason == "tool_use"
        other = {"type": "tool", "name": "stocks"}
        with pytest.raises(anthropic.BadRequestError, match="stocks"):
            client(running).messages.create(**asked, tool_choice=other)


def test_thinking_is_returned_when_enabled(calling: Running) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    whole = client(calling).messages.create(**weather(thinking=thinking))
    with client(calling).messages.stream(**weather(thinking=thinking)) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[0].thinking == "Which city?"


def test_conversation_continues_after_tool_result(calling: Running) -> None:
    first = client(calling).messages.create(**weather())
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "Rain"}
    said = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    messages = [user("Weather?"), said, user(result)]
    again = client(calling).messages.create(**weather(messages=messages))
    assert again.stop_reason == "tool_use"  # it knows nothing else


def test_schema_disables_thinking(calling: Running) -> None:
    """The model would think first."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    form = {"format": {"type": "json_schema", "schema": STRICT}}
    message = client(calling).messages.create(**weather(thinking=thinking, output_config=form))
    assert json.loads(text_of(message))["city"] in ("Oslo", "Lima")


def test_adjacent_blocks_of_one_kind_are_joined() -> None:
    blocks = Blocks(thinking=False)
    call = ToolCall("c", "f", '"no object"')
    deltas = (Delta("a"), Delta(reasoning="hidden"), Delta("b"), Delta(calls=(call, call)))
    events = [event for delta in deltas for event in blocks.push(delta)]
    events += blocks.end()
    assert [block["type"] for block in blocks.content] == ["text", "tool_use", "tool_use"]
    assert blocks.content[0]["text"] == "ab"
    assert blocks.content[1]["input"] == {"arguments": '"no object"'}
    kinds = [(event["type"], event["index"]) for event in events]
    for index in range(3):
        own = [kind for kind, place in kinds if place == index]
        assert (own[0], own[-1]) == ("content_block_start", "content_block_stop")
        assert own.count("content_block_start") == own.count("content_block_stop") == 1


# ---- refusals, in Anthropic's words

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
WRONG = {
    "an image": ({"messages": [user(IMAGE)]}, "messages.0.content"),
    "no messages": ({"messages": []}, "messages"),
    "a role": ({"messages": [{"role": "developer", "content": "S"}]}, "messages.0.role"),
    "a block without a type": ({"messages": [user({"text": "Hi"})]}, "messages.0.content.0"),
    "a number that is a text": ({"max_tokens": "9"}, "max_tokens"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "a share": ({"top_p": 1.5}, "top_p"),
    "a lifetime": (
        {"messages": [user(marked("Hi", "1d"))]},
        "messages.0.content.0.text.cache_control.ttl",
    ),
    "a tool without a schema": ({"tools": [{"name": "w"}]}, "tools.0.input_schema"),
    "a tool without a name": ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    "a schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
        "schema",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_unsupported_fields_are_refused_by_name(name: str, recall_server: Running) -> None:
    fields, named = WRONG[name]
    body = {"model": "any", "max_tokens": 4, "messages": [user("Hi")], **fields}
    for stream in (False, True):
        answer = httpx.post(
            f"{recall_server.url}/v1/messages",
            content=json.dumps({**body, "stream": stream}),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400, answer.text
        told = answer.json()
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        assert named in told["error"]["message"]


def test_client_raises_bad_request_error(recall_server: Running) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content"):
        client(recall_server).messages.create(**weather(messages=[user(IMAGE)]))
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client(recall_server).messages.create(**weather(max_tokens=0))


def test_unknown_request_fields_are_accepted() -> None:
    body = {"model": "any", "max_tokens": 4, "messages": [user("Hi")], "surprise": {"a": 1}}
    assert MessagesRequest.model_validate(body).max_tokens == 4


def test_test_model_tokenizer_has_tool_parser(tmp_path: Path) -> None:
    """The tests' tokenizer was loaded by mlx-lm, with its parser."""
    _, tokenizer = parrot(tmp_path, "Hello")
    assert tokenizer.has_tool_calling
    assert tokenizer.tool_parser(CALL) == json.loads(CALL)


def test_server_side_conversation_is_refused(recall_server: Running) -> None:
    """With the error code on which the client resends all messages."""
    api = client(recall_server)

    def greet() -> str:
        """Greet."""
        return "Hello"

    tools = [anthropic.beta_tool(greet)]
    runner = api.beta.messages.tool_runner(**weather(messages=[user("Hi")], tools=tools))
    assert runner.until_done().content
    body = {"model": "any", "max_tokens": 4, "messages": [user("Hi")]}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = httpx.post(f"{recall_server.url}/v1/messages", json={**body, "thread": thread})
        assert answer.status_code == 400 and "all messages" in answer.json()["error"]["message"]
        details = answer.json()["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request"}


def test_message_has_all_fields(recall_server: Running) -> None:
    body = {"model": "any", "max_tokens": 4, "messages": [user("Hi")]}
    whole = httpx.post(f"{recall_server.url}/v1/messages", json=body).json()
    assert {whole[name] for name in ("stop_details", "container")} == {None}
    assert whole["content"][0]["citations"] == []
    usage = whole["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": 0}
    assert {"cache_creation", "inference_geo", "server_tool_use", "service_tier"} <= set(usage)
