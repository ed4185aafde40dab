"""Turns of a coding agent: what is asked, what the scripted model answers, what it leaves.

Every program has tools of its own; the answers call them by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripted_model import ENDLESS, Script, call

NOTES, COPY, COUNT, LONG = "notes.txt", "copy.txt", "count.txt", "long.txt"
BEFORE, AFTER, LAST = "4821", "1793", "2048"
TEXT = "The code is {}.\n"


@dataclass(frozen=True)
class Turn:
    """What is asked, and the files that there are afterwards."""

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


@dataclass(frozen=True)
class Tools:
    """Calls of a program's tools, each of a file's whole path or of a command."""

    read: Callable[[str], str]
    edit: Callable[[str, str, str], str]
    run: Callable[[str], str]
    delegate: Callable[[str], str] | None = None
    """Call that has a subagent do a task; None where there is none."""
    wait: str | None = None
    """Call that waits for the subagent; None where the first call does."""


@dataclass(frozen=True)
class Compaction:
    """Way in which a program is brought to compact its conversation."""

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


def _patch(path: str, old: str, new: str) -> str:
    lines = (
        *("apply_patch <<'EOF'", "*** Begin Patch", f"*** Update File: {path}", "@@"),
        *(f"-{TEXT.format(old).strip()}", f"+{TEXT.format(new).strip()}", "*** End Patch", "EOF"),
    )
    return call("exec_command", cmd="\n".join(lines))


_CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_CLAUDE = ("-p", "--dangerously-skip-permissions")
AGENTS = {
    "claude": Agent(
        _CLAUDE,
        (*_CLAUDE, "--continue"),
        Tools(
            lambda path: call("Read", file_path=path),
            lambda path, old, new: call("Edit", file_path=path, old_string=old, new_string=new),
            lambda command: call("Bash", command=command, description="As it was asked"),
            lambda task: call("Agent", description="Greeting", prompt=task),
        ),
        (("IS_SANDBOX", "1"),),  # it refuses to skip permissions as root otherwise
        Compaction(command="/compact Keep the codes."),
    ),
    "codex": Agent(
        _CODEX,
        (*_CODEX, "resume", "--last"),
        Tools(
            lambda path: call("exec_command", cmd=f"cat {path}"),
            _patch,
            lambda command: call("exec_command", cmd=command),
            lambda task: call("multi_agent_v1__spawn_agent", message=task),
            # Waiting for a subagent takes its name, a random number that no script can know.
            call("exec_command", cmd="sleep 9.5", yield_time_ms=20_000),
        ),
        compact=Compaction(("-c", "model_auto_compact_token_limit=2000")),
    ),
    "opencode": Agent(
        ("run",),
        ("run", "-c"),
        Tools(
            lambda path: call("read", filePath=path),
            lambda path, old, new: call("edit", filePath=path, oldString=old, newString=new),
            lambda command: call("bash", command=command),
            lambda task: call("task", description="Greeting", prompt=task, subagent_type="general"),
        ),
        compact=Compaction(context_tokens=30_000),
    ),
    "pi": Agent(
        ("-p",),
        ("-p", "--continue"),
        Tools(
            lambda path: call("read", path=path),
            lambda path, old, new: call(
                "edit", path=path, edits=[{"oldText": old, "newText": new}]
            ),
            lambda command: call("bash", command=command),
        ),
    ),
    "qwen": Agent(
        ("--yolo", "-p"),
        ("--yolo", "--continue", "-p"),
        Tools(
            lambda path: call("read_file", file_path=path),
            lambda path, old, new: call("edit", file_path=path, old_string=old, new_string=new),
            lambda command: call("run_shell_command", command=command, is_background=False),
        ),
    ),
}


def script_of(tools: Tools, work: Path) -> Script:
    """Return the answers of every turn, the last of which is said to the user."""
    notes, copy, count, long = (str(work / name) for name in (NOTES, COPY, COUNT, LONG))
    delegated = f"Greet the user. (task {SUBAGENT})"
    script = {
        1: ["Good morning, what shall I do?"],
        2: [tools.read(notes), f"Your notes hold the code {BEFORE}."],
        3: [
            tools.read(notes),
            tools.edit(notes, BEFORE, AFTER),
            f"From now on, {AFTER} is the code.",
        ],
        4: [tools.run(f"cp {notes} {copy}"), "There are two files of it now."],
        5: [tools.run(f"wc -w < {copy} > {count}"), "I wrote down how many words it has."],
        6: [f"Once upon a time a king had a daughter, and she had a garden. {ENDLESS}"],
        7: ["We had counted words before that story."],
        8: [tools.read(copy), "The second file says the same as the first."],
        9: [tools.read(copy), tools.edit(copy, AFTER, LAST), f"Only the second file has {LAST}."],
        10: ["All ten are through; goodbye."],
    }
    if tools.delegate is not None:
        wait = [tools.wait] if tools.wait else []
        script[11] = [tools.delegate(delegated), *wait, "My colleague has greeted you."]
        script[SUBAGENT] = ["A fine evening to you."]
        script[12] = [tools.read(long), "That was a long text about caches."]
        script[13] = ["The codes are known, and I carry on from here."]
        script[14] = ["Afterwards there is nothing left."]
    return script
