"""Settings of benchmarks: name, default, range, and help text of the option."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.config import WORTH, Setting, Settings

OUTLIER_SCALE = 16.0
"""Scale of the outlier channels of keys; a power of two, so that scaling is exact."""


class Machine(Settings):
    """Speed and memory of a simulated replica, linear in the tokens."""

    memory_tokens: Annotated[
        int, Field(ge=1), Setting("KV that a replica holds.", "TOKENS", flag="memory")
    ] = 500_000
    prefill_rate: Annotated[
        float,
        Field(ge=1.0),
        Setting(
            "Prompt tokens that a replica reads a second, one prompt after the other.",
            "TOKENS",
            flag="prefill",
        ),
    ] = 5_000.0
    decode_rate: Annotated[
        float, Field(ge=0.1), Setting("Tokens a second of an answer.", "TOKENS", flag="decode")
    ] = 30.0
    max_batch_size: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Sequences that a replica runs at the same time, the one that is read included.",
            "NUMBER",
            flag="batch",
        ),
    ] = 16


class ReplaySettings(Settings):
    """Size of a replay on replicas, and their routers."""

    split: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Cut the trace into this many parts of whole conversations, one for each replica. "
            "More replicas get copies with other users.",
            "PARTS",
        ),
    ] = 10
    requests: Annotated[
        int,
        Field(ge=1),
        Setting("Replay at most this many a run: the first ones of all replicas.", "NUMBER"),
    ] = 20_000
    routers: Annotated[
        int,
        Field(ge=1),
        Setting("Routers that take turns; each knows at once what it sent itself.", "NUMBER"),
    ] = 1
    gossip_seconds: Annotated[
        float, Field(ge=0.1), Setting("How often replicas say what they hold.", "SECONDS")
    ] = 5.0
    worth: Annotated[
        float,
        Field(ge=0.1),
        Setting(
            "Weight of a block of one conversation that would be computed again, against a block "
            "that waits.",
            "NUMBER",
        ),
    ] = WORTH


class ServeSettings(Settings):
    """Load of a server; lengths in tokens of the embedded model's tokenizer."""

    rounds: Annotated[
        int, Field(ge=1), Setting("How often each server is started and given the sessions.")
    ] = 1
    sessions: Annotated[
        int, Field(ge=1), Setting("Agents that talk at the same time.", "NUMBER")
    ] = 8
    turns: Annotated[int, Field(ge=1), Setting("Turns of each agent.", "NUMBER")] = 5
    system_tokens: Annotated[
        int,
        Field(ge=64),
        Setting("Length of the system prompt that agents share.", "TOKENS", flag="system"),
    ] = 4_000
    answer_tokens: Annotated[
        int, Field(ge=2), Setting("Length of an answer, at most.", "TOKENS", flag="answer")
    ] = 64
    forks: Annotated[
        int, Field(ge=0), Setting("Agents that go on twice after their second turn.", "NUMBER")
    ] = 0
    edits: Annotated[
        int, Field(ge=0), Setting("Agents whose fourth turn replaces the third.", "NUMBER")
    ] = 0
    rate: Annotated[
        float,
        Field(ge=0.0),
        Setting(
            "Then send requests that come at random, this many a second on average, whether or "
            "not the servers keep up; 0 leaves that out.",
            "REQUESTS",
        ),
    ] = 0.0
    arrivals: Annotated[
        int, Field(ge=1), Setting("Number of requests that come at random.", "REQUESTS")
    ] = 40
    connections: Annotated[
        int,
        Field(ge=0),
        Setting("Requests to penstock at the same moment; 0 leaves them out.", "NUMBER"),
    ] = 200
    overhead_rounds: Annotated[
        int,
        Field(ge=0),
        Setting("How often the server and the engine alone are timed; 0 leaves that out."),
    ] = 5


class EvalSettings(Settings):
    """Size of an evaluation, in tokens and questions."""

    outlier_scale: Annotated[
        float,
        Field(ge=1.0),
        Setting("Factor of the larger channels of the form outliers.", "FACTOR", flag="outliers"),
    ] = OUTLIER_SCALE
    questions: Annotated[
        int, Field(ge=1), Setting("Questions for each length, and task, at least.")
    ] = 64
    text_tokens: Annotated[
        int, Field(ge=1), Setting("Tokens of the text that are read, at most.", "TOKENS")
    ] = 4_000
    piece_tokens: Annotated[
        int,
        Field(ge=1),
        Setting("The text is read in pieces, each from an empty cache.", "TOKENS", flag="piece"),
    ] = 1_000
    prompts: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Beginnings of each piece that the engine continues, at most; 0 leaves that out.",
            "NUMBER",
            flag="continuations",
        ),
    ] = 16
    raw_first_tokens: Annotated[
        int,
        Field(ge=0),
        Setting(
            "First tokens of every prompt that stay in full precision. 0 shows most of what a "
            "codec does.",
            "TOKENS",
            flag="kv-cache-raw-first-tokens",
        ),
    ] = 0
