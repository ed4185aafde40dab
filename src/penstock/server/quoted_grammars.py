r"""Grammars of texts inside a JSON string, as the input of a custom tool is inside a call.

    line: "a\n"   ──quoted_grammar──>  P_RULE_LINE: "a\\n"
    /[^x]+/       ───────────────────>  /(?:[[^x]&&[^"\\\x00-\x1f]]|\\"|\\\\|\\n|...)+/

Each character that JSON escapes becomes its shortest escape; all others stay as they are. Rules
become terminals, so that the whole text is one. llguidance ends a terminal at the first character
that cannot go on in it. A backslash can begin texts that go on, and texts that do not. So a grammar
whose rules contain themselves cannot be followed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from penstock.errors import SettingError

ESCAPED = '"\\' + "".join(map(chr, range(0x20)))
"""Characters that a JSON string holds as an escape."""
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
"""Regular expressions of Lark's common terminals."""

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
    r"""Return terminals of the JSON strings that hold the texts of a Lark grammar.

    >>> print(quoted_grammar('start: "a\\n" LINE\nLINE: /[a-z]+/', "P_"))
    P_RULE_START: "a\\n" P_LINE
    P_LINE: /[a-z]+/

    Args:
        lark: the grammar.
        prefix: of the names of all terminals, in capital letters.

    Raises:
        SettingError: it has a part for which that cannot be told.
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
    r"""Return the regular expression of the JSON strings that hold the texts of another.

    >>> print(quoted_regex(r'a"[0-9]\n+'))
    a(?:\\")[0-9](?:\\n)+

    Raises:
        SettingError: it looks around, or has a part for which that cannot be told.
    """
    return "".join(_regex_parts(pattern, dot_all))


def _quoted_part(match: re.Match[str]) -> str:
    """Return a string, a regular expression, a range or an import, quoted."""
    if match["string"] is not None:
        text = _string(match["string"])
        if match["case"] and set(ESCAPED) & set(text):
            raise SettingError(f"{match[0]} cannot be followed inside a JSON string")
        return f"{json.dumps(_escaped(text), ensure_ascii=False)}{match['case']}"
    if match["regex"] is not None:
        flags = match["flags"]
        if "x" in flags:
            raise SettingError("a regular expression with the flag x cannot be followed")
        return f"/{quoted_regex(match['regex'][1:-1], dot_all='s' in flags)}/{flags}"
    if match["range"] is not None:
        first, last = (_string(text) for text in re.findall(_STRING, match["range"]))
        if len(first) != 1 or len(last) != 1:
            raise SettingError(f"{match[0]} is no range of characters")
        return f"/{quoted_regex(f'[{_character(first)}-{_character(last)}]')}/"
    if match["alias_of_rule"] or match["rule"]:
        return ""
    if match["other"] is not None:
        raise SettingError(f"{match['other']} cannot be followed inside a JSON string")
    return match[0]


def _terminal(name: str) -> str:
    """Return the name of the terminal for a rule or a terminal."""
    return f"RULE_{name.upper()}" if name.lstrip("_")[:1].islower() else name


def _common(name: str) -> str:
    if name not in COMMON:
        raise SettingError(f"%import common.{name} cannot be followed inside a JSON string")
    return COMMON[name]


def _regex_parts(pattern: str, dot_all: bool) -> Iterator[str]:
    """Yield the parts of a regular expression, quoted."""
    at, dots = 0, [dot_all]
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            part = _escape(pattern, at)
            yield _set(part) if part[1] in _SETS else _one(part)
        elif sign == "[":
            part = pattern[at : _class_end(pattern, at)]
            yield _set(part)
        elif sign == ".":
            part = "."
            yield _set(r"[\s\S]" if dots[-1] else r"[^\n]")
        elif sign == "(":
            part = _group(pattern, at, dots)
            yield part
        elif sign == "{" and (end := pattern.find("}", at)) > 0:
            part = pattern[at : end + 1]
            yield part
        else:
            part = sign
            if sign == ")" and len(dots) > 1:
                dots.pop()
            yield _one(sign) if sign in ESCAPED else sign
        at += len(part)


def _escape(pattern: str, at: int) -> str:
    match = _ESCAPE.match(pattern, at)
    if match is None or match[0][1] in _ASSERTIONS:
        raise SettingError(f"{pattern[at : at + 2]} cannot be followed inside a JSON string")
    return match[0]


def _group(pattern: str, at: int, dots: list[bool]) -> str:
    """Return how a group begins, and note whether dots in it stand for line ends, too."""
    match = _GROUP.match(pattern, at)
    if match is None or (match[0] == "(" and pattern[at + 1 : at + 2] == "?"):
        raise SettingError("a regular expression that looks around cannot be followed")
    on, off = match["on"] or "", match["off"] or ""
    if "x" in on:
        raise SettingError("a regular expression with the flag x cannot be followed")
    all_of = (dots[-1] or "s" in on) and "s" not in off
    if match["end"] == ")":
        dots[-1] = all_of
    else:
        dots.append(all_of)
    return match[0]


def _class_end(pattern: str, at: int) -> int:
    """Return where a class of characters ends; classes stand within each other."""
    depth, start = 0, at
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"  # as the first it stands for itself
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    raise SettingError(f"{pattern[start:][:40]} has no end")


def _one(part: str) -> str:
    """Return one character, escaped if JSON does that."""
    matched = _matched(part)
    return f"(?:{re.escape(_escaped(matched[0]))})" if matched else part


def _set(part: str) -> str:
    """Return a set of characters, those escaped that JSON escapes."""
    matched = _matched(part)
    if not matched:
        return part
    escapes = "|".join(re.escape(_escaped(character)) for character in matched)
    return f"(?:[{part}&&{_PLAIN}]|{escapes})"


def _matched(part: str) -> str:
    """Return the characters of `ESCAPED` that a part of a regular expression matches."""
    try:
        pattern = re.compile(re.sub(r"\\[xu]\{([0-9A-Fa-f]+)\}", _code, part))
    except re.error as error:
        raise SettingError(f"{part[:40]} cannot be followed inside a JSON string") from error
    return "".join(character for character in ESCAPED if pattern.fullmatch(character))


def _code(match: re.Match[str]) -> str:
    return f"\\U{int(match[1], 16):08x}"


def _character(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _string(literal: str) -> str:
    """Return the text of a Lark string."""
    try:
        text = json.loads(literal)
    except ValueError as error:
        raise SettingError(f"{literal[:40]} is no string") from error
    return str(text)
