"""A turn computes only new tokens, even if its text would be tokenized differently."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from parrot import ASK, parrot
from servers import Running, serving

from penstock.errors import PenstockError
from penstock.server.cache_routes import rewritten_in_front
from penstock.server.prompt_memory import PromptMemory
from penstock.server.prompts import REWRITTEN, Prompts
from penstock.server.remembered_answers import Opening, RememberedAnswers

SAID = ("Hel", "lo", ", wor", "ld")
CALL = ("<tool_call>", '{"name":"look",', '"arguments":{"a":1,', '"b":[2]}}', "</tool_call>")
WHOLE = ("Hello", "Hello, ", "world", '"arguments":{"a":1,"b":[2]}}')
"""Tokens as which the text of the answers is read again."""
LOOK = {"name": "look", "parameters": {"type": "object"}}
OTHER_CALL = {"function": {"name": "look", "arguments": '{"a": 2}'}}
AGAIN = '{ "b" : [2],"a": 1}'
"""The call's arguments, as a client writes them."""


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from _server(tmp_path_factory.mktemp("t"), SAID)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from _server(tmp_path_factory.mktemp("c"), CALL)


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A byte-pair encoding reads as "He", "ll", "o" what was generated as "H", "el", "lo"."""
    merges = (("H", "e"), ("l", "l"), ("e", "l"), ("l", "o"))
    yield from _server(tmp_path_factory.mktemp("b"), ("H", "el", "lo"), merges=merges)


def _server(folder: Path, pieces: tuple[str, ...], **more: Any) -> Iterator[Running]:
    model, tokenizer = parrot(folder, *pieces, marks=() if more else WHOLE, **more)
    text = "".join(pieces)
    read = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.decode([token]) for token in read] != list(pieces)
    with serving(model, tokenizer, engine={"block_size": 16}) as running:
        yield running


def post(running: Running, path: str, **body: Any) -> tuple[dict[str, Any], int]:
    """Return the answer, and the number of prompt tokens computed for it."""

    def computed() -> int:
        return running.service.engine.ask(lambda view: view.stats().prefilled_tokens).result()

    before = computed()
    answer = httpx.post(running.url + path, json={"model": "any", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json(), computed() - before


def chat(running: Running, messages: list[Any], **more: Any) -> tuple[Any, dict[str, int], int]:
    answer, computed = post(running, "/v1/chat/completions", messages=messages, **more)
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    sizes = {"prompt": usage["prompt_tokens"], "cached": cached}
    return answer["choices"][0]["message"], sizes, computed


def assert_grown(before: dict[str, int], after: dict[str, int], said: int, computed: int) -> None:
    """Check that prompt and answer of the turn before are cached, and only new tokens computed."""
    assert after["cached"] == before["prompt"] + said
    assert computed == after["prompt"] - after["cached"] - 1


def test_chat_turn_reuses_all_answer_tokens(talking: Running) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say it, please."}]
    answer, sizes, _ = chat(talking, messages)
    for question in ("Again?", "And once more?"):
        messages += [answer, {"role": "user", "content": question}]
        answer, later, computed = chat(talking, messages)
        assert_grown(sizes, later, len(SAID), computed)
        sizes = later


def test_bpe_turn_reuses_all_answer_tokens(byte_pairs: Running) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say hello, please."}]
    answer, sizes, _ = chat(byte_pairs, messages)
    assert answer["content"] == "Hello"
    messages += [answer, {"role": "user", "content": "Again?"}]
    _, later, computed = chat(byte_pairs, messages)
    assert_grown(sizes, later, 3, computed)


def test_changed_answer_is_recomputed(talking: Running) -> None:
    """Negative control; another tenant's answers are unknown."""
    messages: list[Any] = [{"role": "user", "content": "Say that, please."}]
    _, sizes, _ = chat(talking, messages)
    said = {"role": "assistant", "content": "Hello, wurld"}
    messages += [said, {"role": "user", "content": "Again?"}]
    explained, _ = post(talking, "/v1/cache/explain", messages=messages)
    where = f"History rewrites the answer after token {sizes['prompt']}: 'orld' became 'urld'"
    assert where in explained["reason"]
    assert chat(talking, messages)[1]["cached"] <= sizes["prompt"] + 1
    said["content"] = "Hello, world"
    _, other, computed = chat(talking, messages, cache_salt="other")
    assert (other["cached"], computed) == (0, other["prompt"] - 1)


def test_tool_call_is_reused_with_other_json_spacing(calling: Running) -> None:
    tools = [{"type": "function", "function": LOOK}]
    messages: list[Any] = [{"role": "user", "content": "Look there, please."}]
    answer, sizes, _ = chat(calling, messages, tools=tools)
    (call,) = answer["tool_calls"]
    call["function"]["arguments"] = AGAIN
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Nothing."}
    _, later, computed = chat(calling, [*messages, answer, result], tools=tools)
    assert_grown(sizes, later, len(CALL), computed)
    call["function"]["arguments"] = '{"a": 2, "b": [2]}'
    _, changed, _ = chat(calling, [*messages, answer, result], tools=tools)
    assert changed["cached"] < later["cached"], "another call is another text"


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_anthropic_messages_reuse_answer_tokens(calling: Running, salt: str) -> None:
    """Also when counting tokens."""
    asked = {"role": "user", "content": "Look over there, please."}
    tools = [{"name": "look", "input_schema": {}}]
    body: dict[str, Any] = {"max_tokens": 20, "tools": tools, "cache_salt": salt}

    def ask(*messages: Any) -> tuple[Any, dict[str, int], int]:
        answer, computed = post(calling, "/v1/messages", messages=messages, **body)
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        new = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        return answer["content"], {"prompt": cached + new, "cached": cached}, computed

    (use,), sizes, _ = ask(asked)
    use["input"] = {"b": [2], "a": 1}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "Nothing."}
    said = {"role": "assistant", "content": [use]}
    turns = (asked, said, {"role": "user", "content": [result]})
    _, later, computed = ask(*turns)
    assert_grown(sizes, later, len(CALL), computed)
    for of, same in ((salt, True), ("another", False)):
        asking = {"messages": turns, "tools": tools, "cache_salt": of}
        counted, _ = post(calling, "/v1/messages/count_tokens", **asking)
        assert (counted["input_tokens"] == later["prompt"]) is same


def test_openai_responses_reuse_answer_tokens(calling: Running) -> None:
    asked = {"role": "user", "content": "Look around, please."}
    tools = [{"type": "function", **LOOK}]

    def ask(*items: Any) -> tuple[Any, dict[str, int], int]:
        answer, computed = post(calling, "/v1/responses", input=items, tools=tools)
        usage = answer["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return answer["output"], {"prompt": usage["input_tokens"], "cached": cached}, computed

    (call,), sizes, _ = ask(asked)
    call["arguments"] = AGAIN
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Nothing."}
    _, later, computed = ask(asked, call, result)
    assert_grown(sizes, later, len(CALL), computed)


def test_stored_answer_tokens_are_bounded_and_evicted(tmp_path: Path) -> None:
    _, tokenizer = parrot(tmp_path, *SAID)
    memory = PromptMemory(40_000)
    answers = RememberedAnswers(memory, tokenizer)
    for number in range(40):
        prompt = [number] * 100
        answers.note(f"prompt {number}", prompt)
        answers.remember("", prompt, [1, 2])
    assert 0 < memory.used_bytes == answers.nbytes <= 10_000
    assert len(answers) == 7
    hold = memory.hold()
    hold.resize(40_000)
    assert len(answers) == 0 and memory.used_bytes == 40_000
    answers.note("one more", [1])
    answers.remember("", [1], [2])
    assert len(answers) == 0 and memory.used_bytes == 40_000
    with pytest.raises(PenstockError):
        memory.hold().resize(1)


def test_answer_prefix_of_template_is_detected(tmp_path: Path) -> None:
    assert Prompts(parrot(tmp_path, "a")[1]).openings == (Opening(ASK, ASK),)


BARE = {
    "mistral": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}"
        "<|end|>{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}",
        Opening("[/INST]", "[/INST]"),
    ),
    "phi": (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{ASK}{{% else %}}<|stop|>{{% endif %}}",
        Opening(f"<|end|>{ASK}", f"<|end|>{ASK}"),
    ),
    "gemma": (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{ASK}<thought></thought>{{% endif %}}",
        Opening(f"{ASK}<thought></thought>", ASK),
    ),
    "deepseek": (
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.role == 'assistant' %}</think>{% endif %}{{ message.content }}<|end|>"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{ASK}<think>{{% endif %}}",
        Opening(f"{ASK}<think>", ASK),
    ),
}
"""Templates that write nothing in front of an answer; or an end of their own; or an empty thought,
which history leaves out; or a mark that begins as the one in history does."""


@pytest.mark.parametrize("name", BARE)
def test_answer_prefixes_of_known_templates_are_detected(name: str, tmp_path: Path) -> None:
    template, opening = BARE[name]
    tokenizer = parrot(tmp_path, *SAID, marks=("Hello, ",), template=template)[1]
    answers = RememberedAnswers(PromptMemory(1_000_000), tokenizer)
    prompts = Prompts(tokenizer, answers=answers)
    assert prompts.openings[0] == opening
    asked: list[Any] = [{"role": "user", "content": "a"}]
    before = prompts.render(asked)
    generated = [tokenizer.convert_tokens_to_ids(piece) for piece in SAID]
    answers.remember("", before, generated)
    later = [*asked, {"role": "assistant", "content": "".join(SAID)}, *asked]
    prompt, rewritten = prompts.render(later), REWRITTEN.get()
    kept = opening.text == opening.bare
    assert (prompt[: len(before) + len(SAID)] == (*before, *generated)) is kept
    assert (rewritten is None) is kept
    if not kept:
        assert f"{opening.text.removeprefix(opening.bare)!r} is left out" in str(rewritten)
    assert rewritten_in_front(prompts, later) is None, "nothing is in front of the answer"


def test_answer_after_tool_result_is_reused(tmp_path: Path) -> None:
    """As with DeepSeek's templates, which open no answer after a tool's result."""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        f"{{% if messages[loop.index0 - 1].role == 'user' %}}{ASK}{{% endif %}}"
        "{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{{ '<call>' + call.function.arguments }}{% endfor %}<|end|>"
        "{% else %}<|{{ message.role }}|>{{ message.content }}<|{{ message.role }}|>{% endif %}"
        f"{{% endfor %}}{{% if messages[-1].role == 'user' %}}{ASK}{{% endif %}}"
    )
    tokenizer = parrot(tmp_path, *SAID, marks=("Hello, ",), template=template)[1]
    answers = RememberedAnswers(PromptMemory(1_000_000), tokenizer)
    prompts = Prompts(tokenizer, answers=answers)
    assert prompts.traits.text_arguments
    asked: dict[str, Any] = {"role": "user", "content": "a"}
    call = {"role": "assistant", "content": "", "tool_calls": [{**OTHER_CALL, "id": "c"}]}
    talk: list[Any] = [asked, call, {"role": "tool", "content": "b", "tool_call_id": "c"}]
    tools = [{"type": "function", "function": LOOK}]
    before = prompts.render(talk, tools)
    generated = [tokenizer.convert_tokens_to_ids(piece) for piece in SAID]
    answers.remember("", before, generated)
    said = {"role": "assistant", "content": "".join(SAID)}
    assert prompts.render([*talk, said, asked], tools)[: len(before) + 4] == (*before, *generated)
    assert REWRITTEN.get() is None


def test_template_changes_before_answer_are_reported(tmp_path: Path) -> None:
    """As with Mistral's tools, which precede the last user message."""
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}"
        "{% if tools and loop.index0 >= (messages | length) - 1 %}[TOOLS]{{ tools | tojson }}"
        "{% endif %}"
        "[INST]{{ message.content }}[/INST]{% else %}{{ message.content }}<|end|>{% endif %}"
        "{% endfor %}"
    )
    model, tokenizer = parrot(tmp_path, "Hello", template=template)
    talk = [
        {"role": "user", "content": "Quartz?"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Walnut?"},
    ]
    tools = [{"type": "function", "function": LOOK}]
    prompts = Prompts(tokenizer)
    assert rewritten_in_front(prompts, talk) is None
    assert rewritten_in_front(prompts, talk[:1], tools) is None
    said = str(rewritten_in_front(prompts, talk, tools))
    assert "before messages.1, from character 1 on: 'TOOLS]" in said and "INST]" in said
    with serving(model, tokenizer) as running:
        explained, _ = post(running, "/v1/cache/explain", messages=talk, tools=tools)
        assert said in explained["reason"]
        explained, _ = post(running, "/v1/cache/explain", messages=talk)
        assert "rewrites the text" not in explained["reason"]


HARMONY = (
    "{% for message in messages %}{% set thought = message.reasoning_content %}"
    "{% if message.tool_calls %}{% if thought %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ thought }}<|end|>{% endif %}{% set call = message.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif message.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""A template as gpt-oss has it: of earlier turns the reasoning of calls alone is rendered."""
ANALYSIS, FINAL = "<|channel|>analysis<|message|>Hm<|end|>", "<|channel|>final<|message|>"
COMMENTARY = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"a": 1,"b":[2]}'
GENERATED: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (f"{FINAL}Hello", {"content": "Hello"}),
    "call": (COMMENTARY, {"tool_calls": [{"function": {"name": "look", "arguments": AGAIN}}]}),
    "reasoning, call": (
        f"{ANALYSIS}<|start|>assistant{COMMENTARY}",
        {
            "reasoning_content": "Hm",
            "tool_calls": [{"function": {"name": "look", "arguments": AGAIN}}],
        },
    ),
    "reasoning, text": (
        f"{ANALYSIS}<|start|>assistant{FINAL}Hello",
        {"reasoning_content": "Hm", "content": "Hello"},
    ),
}


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("changed", [False, True], ids=["as it was", "changed"])
def test_harmony_messages_are_reused(name: str, changed: bool, tmp_path: Path) -> None:
    """An answer is one or several messages, of which only the last ends it."""
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
    parrot(tmp_path, "Hello", marks=marks, template=HARMONY)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "<|return|>"}))
    tokenizer = load_tokenizer(tmp_path)
    tokenizer = load_tokenizer(
        tmp_path, eos_token_ids=[tokenizer.convert_tokens_to_ids("<|call|>")]
    )
    assert sorted(map(tokenizer.decode, [[token] for token in tokenizer.eos_token_ids])) == [
        "<|call|>",
        "<|return|>",
    ]
    answers = RememberedAnswers(PromptMemory(1_000_000), tokenizer)
    prompts = Prompts(tokenizer, answers=answers)
    text, message = GENERATED[name]
    tools = [{"type": "function", "function": LOOK}]
    asked: list[Any] = [{"role": "user", "content": "a"}]
    before = prompts.render(asked, tools)
    # One by one, and so in other tokens than the text is read as.
    spelled = re.split(r"(<\|\w+\|>)", text)
    generated = [
        token
        for part in spelled
        for piece in ([part] if part.startswith("<|") else part)
        for token in tokenizer.encode(piece, add_special_tokens=False)
    ]
    answers.remember("", before, generated)
    if "Hello" in text:
        assert tokenizer.encode(text, add_special_tokens=False) != generated
    said = {"role": "assistant", **message}
    if changed:
        said |= {"content": "Hi"} if "content" in message else {"tool_calls": [OTHER_CALL]}
    again = {"role": "tool" if "tool_calls" in message else "user", "content": "b"}
    prompt = prompts.render([*asked, said, again], tools)
    kept = name != "reasoning, text" and not changed
    assert (prompt[: len(before) + len(generated)] == (*before, *generated)) is kept
    rewritten = str(REWRITTEN.get())
    assert ("rewrites" in rewritten) is not kept
    assert ("reasoning is left out" in rewritten) is (name == "reasoning, text")


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "left out"])
def test_answer_prefix_with_reasoning_start_is_reused_or_reported(
    kept: bool, tmp_path: Path
) -> None:
    """Where history keeps the reasoning its tokens are reused; otherwise that is reported."""
    thought = "<think>" if kept else ""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        f"{ASK}{thought}{{{{ message.content }}}}<|end|>"
        "{% else %}<|user|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{ASK}<think>{{% endif %}}"
    )
    marks = ("<think>", "</think>", "Hm</think>")
    tokenizer = parrot(tmp_path, "Hm", "</think>", "Yes", marks=marks, template=template)[1]
    answers = RememberedAnswers(PromptMemory(1_000_000), tokenizer)
    prompts = Prompts(tokenizer, answers=answers, reasoning_parser="think")
    asked: list[Any] = [{"role": "user", "content": "a"}]
    before = prompts.render(asked)
    generated = [tokenizer.convert_tokens_to_ids(text) for text in ("Hm", "</think>", "Yes")]
    answers.remember("", before, generated)
    content = "Hm</think>Yes" if kept else "Yes"
    later = [*asked, {"role": "assistant", "content": content}, *asked]
    prompt = prompts.render(later)
    assert (prompt[: len(before) + 3] == (*before, *generated)) is kept
    said = REWRITTEN.get()
    assert (said is None) if kept else f"after token {len(before)}: " in str(said)
