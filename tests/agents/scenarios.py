"""Turns of a coding agent: the prompt, the scripted answers, and the files expected afterwards.

Every program has tools of its own; the answers call them by their names.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripted_model import ENDLESS, Script, call

from penstock.server.parsing.formats import CALL_FORMATS

NOTES, COPY, COUNT, LONG = "notes.txt", "copy.txt", "count.txt", "long.txt"
BEFORE, AFTER, LAST = "4821", "1793", "2048"
TEXT = "The code is {}.\n"


@dataclass(frozen=True)
class Turn:
    """A prompt, and the files that exist afterwards."""

    name: str
    prompt: str
    files: tuple[tuple[str, str], ...] = ()
    aborted: bool = False
    """Whether the program is interrupted while the model answers."""
    delegated: bool = False
    """Whether a subagent does it, which begins with a prompt of its own."""
    compacts: bool = False
    """Whether the program first has its conversation summed up, and goes on from the summary."""
    renewed: bool = False
    """Whether much of its prompts is new, so that their share is of what was there before."""


_EDITED = (NOTES, TEXT.format(AFTER))
TURNS = (
    Turn("greeting", "Say hello."),
    Turn("read a file", f"What does {NOTES} say?"),
    Turn("edit it", f"Change the code to {AFTER}.", (_EDITED,)),
    Turn("run a command", f"Copy it to {COPY}.", (_EDITED, (COPY, TEXT.format(AFTER)))),
    Turn("run another", f"Count its words into {COUNT}.", ((COUNT, "4\n"),)),
    Turn("abort", "Tell a long story.", aborted=True),
    Turn("go on", "Enough. Where were we?"),
    Turn("read a file", f"What does {COPY} say?"),
    Turn("edit it", f"Change that code to {LAST}.", ((COPY, TEXT.format(LAST)), _EDITED)),
    Turn("sum up", "Sum up."),
    Turn("subagent", "Have another one greet me.", delegated=True, renewed=True),
    Turn("read a long one", f"Read {LONG}.", renewed=True),
    Turn("compaction", "What are you about to do?", compacts=True, renewed=True),
    Turn("go on", "And then?", renewed=True),
)
SUBAGENT = 15
"""Task of the subagent, whose conversation is its own."""


Call = tuple[str, Mapping[str, Any]]
"""Name of a tool, and the arguments of a call."""


def use(name: str, **arguments: Any) -> Call:
    """Return a tool call."""
    return name, arguments


@dataclass(frozen=True)
class Tools:
    """Calls of a program's tools, each of a file's whole path or of a command."""

    read: Callable[[str], Call]
    edit: Callable[[str, str, str], Call]
    """Call that puts a line in the place of another."""
    run: Callable[[str], Call]
    write: Callable[[str, str], Call] | None = None
    """Call that writes a file of this content; None where a command does."""
    delegate: Callable[[str], Call] | None = None
    """Call that has a subagent do a task; None where there is none."""
    wait: Call | None = None
    """Call that waits for the subagent; None where the first call does."""


@dataclass(frozen=True)
class Compaction:
    """How a program is made to compact its conversation."""

    arguments: Sequence[str] = ()
    """Arguments in front of the turn's own."""
    command: str | None = None
    """Words in place of the turn's own."""
    context_tokens: int | None = None
    """Size of a context that the conversation no longer fits in."""


@dataclass(frozen=True)
class Agent:
    """A program: the arguments of its first turn and of later ones, and its tools."""

    first: Sequence[str]
    later: Sequence[str]
    tools: Tools
    environment: tuple[tuple[str, str], ...] = ()
    compact: Compaction | None = None
    """Way in which the program is brought to compact; None where it is not."""


def _patch(path: str, old: str, new: str) -> Call:
    lines = (
        *("apply_patch <<'EOF'", "*** Begin Patch", f"*** Update File: {path}", "@@"),
        *(f"-{old}", f"+{new}", "*** End Patch", "EOF"),
    )
    return use("exec_command", cmd="\n".join(lines))


_CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_CLAUDE = ("-p", "--dangerously-skip-permissions")
AGENTS = {
    "claude": Agent(
        _CLAUDE,
        (*_CLAUDE, "--continue"),
        Tools(
            lambda path: use("Read", file_path=path),
            lambda path, old, new: use("Edit", file_path=path, old_string=old, new_string=new),
            lambda command: use("Bash", command=command, description="As it was asked"),
            lambda path, content: use("Write", file_path=path, content=content),
            lambda task: use("Agent", description="Greeting", prompt=task),
        ),
        (("IS_SANDBOX", "1"),),  # it refuses to skip permissions as root otherwise
        Compaction(command="/compact Keep the codes."),
    ),
    "codex": Agent(
        _CODEX,
        (*_CODEX, "resume", "--last"),
        Tools(
            lambda path: use("exec_command", cmd=f"cat {path}"),
            _patch,
            lambda command: use("exec_command", cmd=command),
            delegate=lambda task: use("multi_agent_v1__spawn_agent", message=task),
            # Waiting for a subagent takes its name, a random number that no script can know.
            wait=use("exec_command", cmd="sleep 9.5", yield_time_ms=20_000),
        ),
        compact=Compaction(("-c", "model_auto_compact_token_limit=2000")),
    ),
    "opencode": Agent(
        ("run",),
        ("run", "-c"),
        Tools(
            lambda path: use("read", filePath=path),
            lambda path, old, new: use("edit", filePath=path, oldString=old, newString=new),
            lambda command: use("bash", command=command),
            lambda path, content: use("write", filePath=path, content=content),
            lambda task: use("task", description="Greeting", prompt=task, subagent_type="general"),
        ),
        compact=Compaction(context_tokens=30_000),
    ),
    "pi": Agent(
        ("-p",),
        ("-p", "--continue"),
        Tools(
            lambda path: use("read", path=path),
            lambda path, old, new: use("edit", path=path, edits=[{"oldText": old, "newText": new}]),
            lambda command: use("bash", command=command),
        ),
    ),
    "qwen": Agent(
        ("--yolo", "-p"),
        ("--yolo", "--continue", "-p"),
        Tools(
            lambda path: use("read_file", file_path=path),
            lambda path, old, new: use("edit", file_path=path, old_string=old, new_string=new),
            lambda command: use("run_shell_command", command=command, is_background=False),
        ),
    ),
}


FORMATS = (
    ("claude", "glm47"),
    ("claude", "minimax_m2"),
    ("codex", "qwen3_coder"),
    ("opencode", "kimi_k2"),
)
"""Programs, and formats of calls in which the model then writes to them."""
MARKED, EDITED, NULL = "marked.md", "edited.md", "null.txt"
"""Files of these turns; Claude Code strips the ends of lines in all files but Markdown."""
INDENTED = "    return x  \t "
"""Line whose blanks must stay, at both ends."""


def marked(family: str) -> str:
    """Return a text with the markers of a format, blanks, and both kinds of line ends."""
    calls = CALL_FORMATS[family]
    shape = calls.shape
    assert shape is not None
    marks = [*calls.openings, shape.closing.strip(), shape.after.strip()]
    marks += [shape.tags.end.strip()] if shape.tags is not None else []
    lines = [f"So {mark} ends none of it, and {mark}" for mark in dict.fromkeys(marks) if mark]
    return "\r\n".join((*lines, " \u65e5\u672c \U0001f9ab null None true", "")) + f"{INDENTED}\n \n"


def format_turns(family: str) -> tuple[Turn, ...]:
    """Return turns that write and edit files whose texts contain the markers of a format."""
    text = marked(family)
    edited = f"{TEXT.format(family)}{_edit_of(family)}\nlast\n"
    return (
        Turn("write", f"Write {MARKED}.", ((MARKED, text),)),
        Turn("write null", f"Write {NULL}.", ((NULL, "null"),)),
        Turn("edit", f"Edit {EDITED}.", ((EDITED, edited), (MARKED, text), (NULL, "null"))),
    )


def _edit_of(family: str) -> str:
    """Return a line with leading and trailing blanks, and markers between."""
    return f"    {marked(family).split(chr(13))[0]} {INDENTED}"


def format_script(tools: Tools, work: Path, family: str, write: Callable[..., str]) -> Script:
    """Return the answers of those turns, with calls as the format has them.

    Args:
        tools: of the program.
        work: folder in which it works.
        family: the format.
        write: returns a call's text, of the format, the arguments and the tool's name.
    """
    edited, null, text = (str(work / name) for name in (EDITED, NULL, MARKED))

    def written(path: str, content: str) -> Call:
        if tools.write is not None:
            return tools.write(path, content)
        return tools.run(f"printf %s {shlex.quote(content)} > {path}")

    before = f"{TEXT.format(family)}{INDENTED}\nlast\n"
    script: dict[int, list[str | Call]] = {
        1: [written(text, marked(family)), "The marked text is in its file."],
        2: [written(null, "null"), "Four letters are in the other one."],
        3: [
            written(edited, before),
            tools.read(edited),
            tools.edit(edited, INDENTED, _edit_of(family)),
            "One line is another one now.",
        ],
    }
    return {
        task: [one if isinstance(one, str) else write(family, dict(one[1]), one[0]) for one in all_]
        for task, all_ in script.items()
    }


def script_of(tools: Tools, work: Path) -> Script:
    """Return the answers of every turn; the last answer of a turn is for the user."""
    notes, copy, count, long = (str(work / name) for name in (NOTES, COPY, COUNT, LONG))
    delegated = f"Greet the user. (task {SUBAGENT})"
    script: dict[int, list[str | Call]] = {
        1: ["Good morning, what shall I do?"],
        2: [tools.read(notes), f"Your notes hold the code {BEFORE}."],
        3: [
            tools.read(notes),
            tools.edit(notes, TEXT.format(BEFORE).strip(), TEXT.format(AFTER).strip()),
            f"From now on, {AFTER} is the code.",
        ],
        4: [tools.run(f"cp {notes} {copy}"), "There are two files of it now."],
        5: [tools.run(f"wc -w < {copy} > {count}"), "I wrote down how many words it has."],
        6: [f"Once upon a time a king had a daughter, and she had a garden. {ENDLESS}"],
        7: ["We had counted words before that story."],
        8: [tools.read(copy), "The second file says the same as the first."],
        9: [
            tools.read(copy),
            tools.edit(copy, TEXT.format(AFTER).strip(), TEXT.format(LAST).strip()),
            f"Only the second file has {LAST}.",
        ],
        10: ["All ten are through; goodbye."],
    }
    if tools.delegate is not None:
        wait = [tools.wait] if tools.wait else []
        script[11] = [tools.delegate(delegated), *wait, "My colleague has greeted you."]
        script[SUBAGENT] = ["A fine evening to you."]
        script[12] = [tools.read(long), "That was a long text about caches."]
        script[13] = ["The codes are known, and I carry on from here."]
        script[14] = ["Afterwards there is nothing left."]
    return {
        task: [one if isinstance(one, str) else call(one[0], **one[1]) for one in answers]
        for task, answers in script.items()
    }
