"""Harmony answers as `openai-harmony` writes and reads them, one JSON object per line.

    python harmony_reference.py NUMBER     (needs `openai-harmony`, and not penstock)

Each line has the text of an answer, from behind `<|start|>assistant` on, and its messages. `ends`
has the messages of the answer cut off behind each of its tokens; null where its header is not
whole. Marks spelled by ordinary tokens are left out: a reader of text cannot tell them apart.
"""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any

from openai_harmony import (  # type: ignore[import-not-found]
    Author,
    HarmonyEncodingName,
    HarmonyError,
    Message,
    Role,
    StreamableParser,
    load_harmony_encoding,
)

OPENING = "<|start|>assistant"
TEXTS = (
    *("", "So.", " Hm, é\n\n", "日本 🦫", "a < b <| c", "<|en", "to=functions.look_up", "{}"),
    *('{"text": "no call"}', "1\r\n2\t", "<b>|></b>", "[x](y)", "assistant", "analysis "),
)
VALUES: tuple[Any, ...] = (
    "x y",
    "Zürich 🦫",
    'q"\\n\n\t',
    "<|}]",
    "</tool_call>",
    1.5,
    -9,
    None,
    [{"k": True}],
    {},
)
HEADERS = (
    " to={}<|channel|>{}",
    " to={}<|channel|>{} json",
    " to={}<|channel|>{} <|constrain|>json",
    "<|channel|>{1} to={0}",
    "<|channel|>{1} to={0} json",
    "<|channel|>{1} to={0}<|constrain|>json",
    "<|channel|>{1} to={0} <|constrain|>json",
    "<|channel|>{1} {0} <|constrain|>json",
    "<|channel|>{1} {0}",
)
"""Headers of a call, as models write them: recipient and channel."""


def main(number: int) -> None:
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    for seed in range(number):
        random = Random(seed)
        written = rendered if seed % 2 else composed
        tokens = written(encoding, random)
        messages, ends = read(encoding, tokens)
        line = {"text": encoding.decode(tokens), "messages": messages, "ends": ends}
        print(json.dumps(line))


def rendered(encoding: Any, random: Random) -> list[int]:
    """Return the tokens of an answer as the library renders it."""
    tokens: list[int] = []
    for channel, recipient, text in talk(random):
        author = Author(role=Role.ASSISTANT)
        message = Message.from_author_and_content(author, text).with_channel(channel)
        if recipient:
            message = message.with_recipient(recipient).with_content_type("<|constrain|>json")
        tokens += encoding.render(message)
    opening = encoding.encode(OPENING, allowed_special="all")
    assert tokens[: len(opening)] == opening
    tokens = tokens[len(opening) :]
    return tokens[:-1] if random.random() < 0.3 else tokens


def composed(encoding: Any, random: Random) -> list[int]:
    """Return the tokens of an answer with a header of any kind before each call."""
    parts: list[list[int]] = []
    for channel, recipient, text in talk(random):
        header = f"<|channel|>{channel}"
        if recipient:
            header = random.choice(HEADERS).format(recipient, channel)
        head = encoding.encode(f"{header}<|message|>", allowed_special="all")
        parts.append([*head, *encoding.encode(text, disallowed_special=())])
    between = encoding.encode(f"<|end|>{OPENING}", allowed_special="all")
    tokens = parts[0]
    for part in parts[1:]:
        tokens = [*tokens, *between, *part]
    last = random.choice(("", "<|return|>", "<|call|>", "<|end|>"))
    return [*tokens, *encoding.encode(last, allowed_special="all")]


def talk(random: Random) -> list[tuple[str, str, str]]:
    """Return the messages of an answer: channel, recipient, text."""
    messages = [("analysis", "", random.choice(TEXTS)) for _ in range(random.choice((0, 1, 1, 2)))]
    messages += [("commentary", "", random.choice(TEXTS)) for _ in range(random.choice((0, 0, 1)))]
    for _ in range(random.choice((0, 1, 1, 2))):
        recipient = random.choice(("functions.look_up", "functions.write_file", "python"))
        arguments = {"text": random.choice(VALUES), "n": random.choice(VALUES)}
        channel = "analysis" if recipient == "python" else "commentary"
        messages.append((channel, recipient, json.dumps(arguments, ensure_ascii=False)))
    if not messages or random.random() < 0.5:
        messages.append(("final", "", random.choice(TEXTS)))
    return messages


def read(encoding: Any, tokens: list[int]) -> tuple[list[Any], list[Any]]:
    """Return the messages of an answer, and the recipient state after each token."""
    parsed = encoding.parse_messages_from_completion_tokens(tokens, role=Role.ASSISTANT)
    ends: list[Any] = []
    for stop in range(1, len(tokens)):
        parser = StreamableParser(encoding, role=Role.ASSISTANT)
        try:
            for token in tokens[:stop]:
                parser.process(token)
            parser.process_eos()
        except HarmonyError:
            ends.append(None)
        else:
            text = encoding.decode_utf8(tokens[:stop]) if whole(encoding, tokens[:stop]) else None
            ends.append(None if text is None else [text, described(parser.messages)])
    return described(parsed), ends


def whole(encoding: Any, tokens: list[int]) -> bool:
    """Return whether tokens end at a character boundary."""
    return "\ufffd" not in str(encoding.decode(tokens))


def described(messages: list[Any]) -> list[list[str]]:
    """Return the channel, recipient and content of messages."""
    return [
        [one.channel or "", one.recipient or "", "".join(part.text for part in one.content)]
        for one in messages
    ]


if __name__ == "__main__":
    main(int(sys.argv[1]))
