"""Answers in the formats of model families: contents and rendered text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from penstock.server.parsing.formats import CALL_FORMATS, HARMONY, REASONING, AnswerFormat
from penstock.server.parsing.muse import MUSE
from penstock.server.parsing.parser import ReasoningMarks

NAMES = ("look_up", "write_file")
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "list": {"type": "array"},
        "none": {"type": "null"},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Written:
    """An answer, and its parts."""

    text: str
    reasoning: str
    said: str
    calls: list[Call]


def dumped(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def listed(calls: list[Call], key: str = "arguments") -> str:
    return dumped([{"name": name, key: arguments} for name, arguments in calls])


def joined(one: Callable[[str, dict[str, Any]], str], between: str = "") -> Any:
    return lambda calls: between.join(one(name, arguments) for name, arguments in calls)


def json_type(value: Any) -> str:
    """Return the type of a value as Kimi K3 names it."""
    names = {bool: "boolean", dict: "object", list: "array", str: "string", type(None): "null"}
    return names.get(type(value), "number")


def gemma(value: Any, quote: str = '<|"|>') -> str:
    """Return a value in Gemma 4's notation, or FunctionGemma's with its own markers."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma(one, quote)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(gemma(one, quote) for one in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else dumped(value)


def python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def xml(head: str, argument: str, tail: str) -> Any:
    """Return a writer of calls with a tag per argument and text values."""
    return joined(
        lambda name, arguments: "".join(
            (
                head.replace("NAME", name),
                *(
                    argument.replace("KEY", key).replace("VALUE", value)
                    for key, value in arguments.items()
                ),
                tail,
            )
        )
    )


GLM = xml(
    "<tool_call>NAME\n",
    "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    "</tool_call>",
)
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
OURS: dict[str, tuple[str, Any]] = {
    "hermes": (
        "hermes",
        joined(lambda n, a: f"<tool_call>\n{dumped({'name': n, 'arguments': a})}\n</tool_call>"),
    ),
    "hermes, arguments first": (
        "hermes",
        joined(lambda n, a: f"<tool_call>{dumped({'arguments': a, 'name': n})}</tool_call>"),
    ),
    "nemotron": ("nemotron", lambda calls: f"<TOOLCALL>{listed(calls)}</TOOLCALL>"),
    "apriel": ("apriel", lambda calls: f"<tool_calls>{listed(calls)}</tool_calls>"),
    "granite": ("granite", lambda calls: f"<|tool_call|>{listed(calls)}"),
    "granite, closed": ("granite", lambda calls: f"<tool_call>{listed(calls)}</tool_call>"),
    "phi": ("phi", lambda calls: f"<|tool_call|>{listed(calls)}<|/tool_call|>"),
    "phi, functools": ("phi", lambda calls: f"functools{listed(calls)}"),
    "llama": (
        "llama",
        joined(lambda n, a: dumped({"name": n, "parameters": a}), "; "),
    ),
    "llama, marked": (
        "llama",
        lambda calls: f"<|python_tag|>{listed(calls, 'parameters')}",
    ),
    "llama, python": ("llama", lambda calls: f"[{joined(python, ', ')(calls)}]"),
    "llama, marked python": (
        "llama",
        lambda calls: f"<|python_start|>[{joined(python, ', ')(calls)}]<|python_end|>",
    ),
    "deepseek": (
        "deepseek",
        lambda calls: SECTION.format(joined(lambda n, a: V3.format(n, dumped(a)), "\n")(calls)),
    ),
    "deepseek, V3.1": (
        "deepseek",
        lambda calls: SECTION.format(joined(lambda n, a: V31.format(n, dumped(a)))(calls)),
    ),
    "deepseek, V3.2": (
        "deepseek_tags",
        lambda calls: (
            "<｜DSML｜function_calls>\n"
            + "".join(
                f'<｜DSML｜invoke name="{name}">\n'
                + "".join(
                    f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n'
                    if isinstance(value, str)
                    else f'<｜DSML｜parameter name="{key}" string="false">{dumped(value)}'
                    "</｜DSML｜parameter>\n"
                    for key, value in arguments.items()
                )
                + "</｜DSML｜invoke>\n"
                for name, arguments in calls
            )
            + "</｜DSML｜function_calls>"
        ),
    ),
}
OURS["seed"] = (
    "seed",
    xml(
        "<seed:tool_call>\n<function=NAME>\n",
        "<parameter=KEY>VALUE</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
)
MLX_LM: dict[str, Any] = {
    "function_gemma": joined(
        lambda n, a: f"<start_function_call>call:{n}{gemma(a, '<escape>')}<end_function_call>"
    ),
    "gemma4": joined(lambda n, a: f"<|tool_call>call:{n}{gemma(a)}<tool_call|>"),
    "glm47": GLM,
    "laguna": GLM,
    "json_tools": OURS["hermes"][1],
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>"
            f"{dumped(arguments)}<|tool_call_end|>"
            for at, (name, arguments) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    ),
    "kimi_k3": lambda calls: (
        "<|open|>tools<|sep|>"
        + "".join(
            f'<|open|>call tool="{name}" index="{at}"<|sep|>'
            + "".join(
                f'<|open|>argument key="{key}" type="{json_type(value)}"<|sep|>'
                f"{value if isinstance(value, str) else dumped(value)}<|close|>argument<|sep|>"
                for key, value in arguments.items()
            )
            + "<|close|>call<|sep|>"
            for at, (name, arguments) in enumerate(calls, 1)
        )
        + "<|close|>tools<|sep|>"
    ),
    "longcat": xml(
        "<longcat_tool_call>NAME\n",
        "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>VALUE</longcat_arg_value>\n",
        "</longcat_tool_call>",
    ),
    "minicpm5": xml('<function name="NAME">', '<param name="KEY">VALUE</param>', "</function>"),
    "minimax_m2": lambda calls: (
        "<minimax:tool_call>\n"
        + xml('<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n', "</invoke>\n")(
            calls
        )
        + "</minimax:tool_call>"
    ),
    "mistral": lambda calls: f"[TOOL_CALLS]{listed(calls)}",
    "muse_spark": lambda calls: (
        "<atem:function_calls>\n"
        + xml(
            '<atem:invoke name="NAME">\n',
            '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
            "</atem:invoke>\n",
        )(calls)
        + "</atem:function_calls>"
    ),
    "pythonic": lambda calls: (
        f"<|tool_call_start|>[{joined(python, ', ')(calls)}]<|tool_call_end|>"
    ),
    "qwen3_coder": xml(
        "<tool_call>\n<function=NAME>\n",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
}
FAMILIES = ("harmony", "muse_spark, with headers", *OURS, *MLX_LM)
TEXTS_ONLY = frozenset(MLX_LM) - {
    *("function_gemma", "gemma4", "json_tools", "kimi_k2", "kimi_k3", "mistral", "pythonic")
} | {"seed", "muse_spark, with headers"}
"""Families whose arguments are texts between tags here."""


def written_call(family: str, arguments: dict[str, Any], name: str = "look_up") -> str:
    """Render a call in a family's format, with values of any type."""
    if family == "harmony":
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return head + dumped(arguments)
    if family == "granite":
        return f"<|tool_call|>{dumped([{'name': name, 'arguments': arguments}])}"
    if family == "mistral, newer":
        return f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}"
    if family == "pythonic":
        values = ", ".join(f"{key}={dumped(value)}" for key, value in arguments.items())
        return f"<|tool_call_start|>[{name}({values})]<|tool_call_end|>"
    if family in TEXTS_ONLY:
        arguments = {
            key: value if isinstance(value, str) else dumped(value)
            for key, value in arguments.items()
        }
    if family in MLX_LM:
        return str(MLX_LM[family]([(name, arguments)]))
    return str(OURS[family][1]([(name, arguments)]))


def form_of(family: str) -> AnswerFormat:
    """Return the answer format of a family."""
    marks = ReasoningMarks("<think>", "</think>")
    if family == "harmony":
        return AnswerFormat(HARMONY, HARMONY)
    if family == "muse_spark, with headers":
        return replace(form_of("muse_spark"), reasoning_name=MUSE, reasoning=REASONING[MUSE])
    name = family if family in MLX_LM else OURS[family][0]
    return AnswerFormat(name, "think", CALL_FORMATS[name], marks)


def written(family: str, random: Random) -> Written:
    """Render an answer with optional reasoning, text and calls."""
    reasoning = random.choice(("", "Hm, é.", "a < b\n<tool"))
    calls = [_call(family, random) for _ in range(random.choice((0, 1, 1, 2)))]
    bare = family in ("llama", "llama, python") and calls
    said = "" if bare else random.choice(("", "So: 日本 <b>.\n", "[1](x), {y} <|", "\n"))
    if family == "harmony":
        return _harmony(reasoning, said, calls, random)
    if family == "muse_spark, with headers":
        return _muse(reasoning, said, calls, random)
    think = f"<think>{reasoning}</think>" if reasoning else ""
    write = MLX_LM[family] if family in MLX_LM else OURS[family][1]
    return Written(f"{think}{said}{write(calls) if calls else ''}", reasoning, said, calls)


def _call(family: str, random: Random) -> Call:
    text = random.choice(("x y", "Zürich 🦫", "ß=1", "日"))
    if family in TEXTS_ONLY:
        return random.choice(NAMES), {"text": text}
    more: tuple[dict[str, Any], ...] = (
        {},
        {"n": random.randrange(-9, 99)},
        {"list": [1.5, {"k": "<|}]"}]},
        {"none": None},
    )
    arguments: dict[str, Any] = {"text": random.choice((text, 'q"\\n\n\t', "</tool_call>"))}
    if family == "deepseek, V3.2":
        arguments["text"] = random.choice((text, 'a "b"\n\\'))
    if family in ("json_tools", "kimi_k2"):  # which know of no strings around their marks
        arguments["text"] = text
    return random.choice(NAMES), arguments | random.choice(more)


def _harmony(reasoning: str, said: str, calls: list[Call], random: Random) -> Written:
    messages = [f"<|channel|>analysis<|message|>{reasoning}"] if reasoning else []
    if said:
        channel = "commentary" if calls else "final"
        messages.append(f"<|channel|>{channel}<|message|>{said}")
    for name, arguments in calls:
        to, json_text = f" to=functions.{name}", dumped(arguments)
        header = random.choice(
            (
                f"<|channel|>commentary{to} <|constrain|>json<|message|>",
                f"{to}<|channel|>commentary json<|message|>",
                f"<|channel|>commentary{to}<|message|>",
            )
        )
        messages.append(f"{header}{json_text}")
    last = "<|call|>" if calls else random.choice(("", "<|return|>"))
    text = "<|end|><|start|>assistant".join(messages) + last
    return Written(text, reasoning, said, calls)


def _muse(reasoning: str, said: str, calls: list[Call], random: Random) -> Written:
    messages = [f" to=self<|message|>{reasoning}"] if reasoning else []
    if said:
        to = random.choice(("user", "commentary")) if calls else "user"
        messages.append(f" to={to}<|message|>{said}")
    blocks = [[call] for call in calls] if random.random() < 0.5 else [calls] if calls else []
    for block in blocks:
        messages.append(f" to={block[0][0]}<|message|>{MLX_LM['muse_spark'](block)}")
    text = "<|eom|><|start|>assistant".join(messages) + random.choice(("", "<|eot|>"))
    return Written(text, reasoning, said, calls)
