r"""Grammars of text inside a JSON string, as needed for a custom tool's input.

     line: "a\n"   ──quoted_grammar──>  P_RULE_LINE: "a\\n"
     /[^x]+/       ───────────────────>  /(?:[[^x]&&[^"\\\x00-\x1f]]|\\"|\\\\|\\n|...)+/

Characters that JSON escapes become their shortest escape. Rules become terminals, so that the text
is one terminal: llguidance ends a terminal at the first character that cannot continue it, and a
backslash may begin either kind of text. Recursive grammars are therefore not supported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from penstock.errors import SettingError

ESCAPED = '"\\' + "".join(map(chr, range(0x20)))
"""Characters that a JSON string escapes."""
COMMON = {
    "CNAME": r"[_a-zA-Z]\w*",
    "CR": r"\r",
    "DECIMAL": r"\d+\.\d*|\.\d+",
    "DIGIT": r"\d",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "FLOAT": r"\d+[eE][+-]?\d+|(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"\d+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?",
    "SIGNED_INT": r"[+-]?\d+",
    "SIGNED_NUMBER": r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}

_PLAIN = r'[^"\\\x00-\x1f]'
_STRING = r'"(?:\\.|[^"\\\n])*"'
_LARK = re.compile(
    r"(?P<comment>//[^\n]*)"
    rf"|(?P<range>{_STRING}\s*\.\.\s*{_STRING})"
    rf"|(?P<string>{_STRING})(?P<case>i?)"
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/)(?P<flags>[imslux]*)"
    r"|%import\s+common\.(?P<import>\w+)(?:\s*->\s*(?P<alias>\w+))?"
    r"|(?P<alias_of_rule>->\s*\w+)"
    r"|(?P<rule>^\s*[?!]+(?=\w))"
    r"|(?P<other>%\w+|~(?!\s*\d)|@|<)"
    r"|(?P<name>[A-Za-z_][\w-]*)",
    re.MULTILINE,
)
_ESCAPE = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|[xu]\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<on>[a-z]*)(?:-(?P<off>[a-z]+))?(?P<end>[:)])))?")
_SETS, _ASSERTIONS = "dDwWsS", "bBAzZGpPkKX"


def quoted_grammar(lark: str, prefix: str) -> str:
    r"""Convert a Lark grammar to terminals for JSON strings; SettingError if unsupported.

    `prefix`, in upper case, is prepended to the names of terminals.

    >>> print(quoted_grammar('start: "a\\n" LINE\nLINE: /[a-z]+/', "P_"))
    P_RULE_START: "a\\n" P_LINE
    P_LINE: /[a-z]+/
    """

    def part(match: re.Match[str]) -> str:
        if match["name"] is not None:
            return prefix + _terminal(match["name"])
        if match["import"] is not None:
            name = prefix + _terminal(match["alias"] or match["import"])
            return f"{name}: /{quoted_regex(_common(match['import']))}/"
        return _quoted_part(match)

    return _LARK.sub(part, lark)


def quoted_regex(pattern: str, *, dot_all: bool = False) -> str:
    r"""Convert a regular expression to one for JSON strings; SettingError if unsupported.

    >>> print(quoted_regex(r'a"[0-9]\n+'))
    a(?:\\")[0-9](?:\\n)+
    """
    return "".join(_regex_parts(pattern, dot_all))


def _quoted_part(match: re.Match[str]) -> str:
    if match["string"] is not None:
        text = _string(match["string"])
        if match["case"] and set(ESCAPED) & set(text):
            raise SettingError(f"{match[0]} is not supported inside a JSON string")
        return f"{json.dumps(_escaped(text), ensure_ascii=False)}{match['case']}"
    if match["regex"] is not None:
        flags = match["flags"]
        if "x" in flags:
            raise SettingError("a regular expression with the flag x is not supported")
        return f"/{quoted_regex(match['regex'][1:-1], dot_all='s' in flags)}/{flags}"
    if match["range"] is not None:
        first, last = (_string(text) for text in re.findall(_STRING, match["range"]))
        if len(first) != 1 or len(last) != 1:
            raise SettingError(f"{match[0]} is not a range of characters")
        return f"/{quoted_regex(f'[{_character(first)}-{_character(last)}]')}/"
    if match["alias_of_rule"] or match["rule"]:
        return ""
    if match["other"] is not None:
        raise SettingError(f"{match['other']} is not supported inside a JSON string")
    return match[0]


def _terminal(name: str) -> str:
    return f"RULE_{name.upper()}" if name.lstrip("_")[:1].islower() else name


def _common(name: str) -> str:
    if name not in COMMON:
        raise SettingError(f"%import common.{name} is not supported inside a JSON string")
    return COMMON[name]


def _regex_parts(pattern: str, dot_all: bool) -> Iterator[str]:
    position, dots = 0, [dot_all]
    while position < len(pattern):
        sign = pattern[position]
        if sign == "\\":
            part = _escape(pattern, position)
            yield _set(part) if part[1] in _SETS else _one(part)
        elif sign == "[":
            part = pattern[position : _class_end(pattern, position)]
            yield _set(part)
        elif sign == ".":
            part = "."
            yield _set(r"[\s\S]" if dots[-1] else r"[^\n]")
        elif sign == "(":
            part = _group(pattern, position, dots)
            yield part
        elif sign == "{" and (end := pattern.find("}", position)) > 0:
            part = pattern[position : end + 1]
            yield part
        else:
            part = sign
            if sign == ")" and len(dots) > 1:
                dots.pop()
            yield _one(sign) if sign in ESCAPED else sign
        position += len(part)


def _escape(pattern: str, position: int) -> str:
    match = _ESCAPE.match(pattern, position)
    if match is None or match[0][1] in _ASSERTIONS:
        escape = pattern[position : position + 2]
        raise SettingError(f"{escape} is not supported inside a JSON string")
    return match[0]


def _group(pattern: str, position: int, dots: list[bool]) -> str:
    """Return the opening of a group, and record in `dots` whether dots match line ends."""
    match = _GROUP.match(pattern, position)
    if match is None or (match[0] == "(" and pattern[position + 1 : position + 2] == "?"):
        raise SettingError("a regular expression with lookaround is not supported")
    on, off = match["on"] or "", match["off"] or ""
    if "x" in on:
        raise SettingError("a regular expression with the flag x is not supported")
    all_of = (dots[-1] or "s" in on) and "s" not in off
    if match["end"] == ")":
        dots[-1] = all_of
    else:
        dots.append(all_of)
    return match[0]


def _class_end(pattern: str, position: int) -> int:
    """Return the end position of a character class, which may be nested."""
    depth, start = 0, position
    while position < len(pattern):
        if pattern[position] == "\\":
            position += 1
        elif pattern[position] == "[":
            depth += 1
            position += pattern[position + 1 : position + 2] == "^"
            # A bracket as the first character is literal.
            position += pattern[position + 1 : position + 2] == "]"
        elif pattern[position] == "]":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    raise SettingError(f"{pattern[start:][:40]} has no end")


def _one(part: str) -> str:
    matched = _matched(part)
    return f"(?:{re.escape(_escaped(matched[0]))})" if matched else part


def _set(part: str) -> str:
    matched = _matched(part)
    if not matched:
        return part
    escapes = "|".join(re.escape(_escaped(character)) for character in matched)
    return f"(?:[{part}&&{_PLAIN}]|{escapes})"


def _matched(part: str) -> str:
    try:
        pattern = re.compile(re.sub(r"\\[xu]\{([0-9A-Fa-f]+)\}", _code, part))
    except re.error as error:
        raise SettingError(f"{part[:40]} is not supported inside a JSON string") from error
    return "".join(character for character in ESCAPED if pattern.fullmatch(character))


def _code(match: re.Match[str]) -> str:
    return f"\\U{int(match[1], 16):08x}"


def _character(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _string(literal: str) -> str:
    try:
        text = json.loads(literal)
    except ValueError as error:
        raise SettingError(f"{literal[:40]} is not a string") from error
    return str(text)
