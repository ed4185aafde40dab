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
        int, Field(ge=1), Setting("Size of a replica's KV cache.", "TOKENS", flag="memory")
    ] = 500_000
    prefill_rate: Annotated[
        float,
        Field(ge=1.0),
        Setting(
            "Prefill speed of a replica in tokens per second, one prompt after the other.",
            "TOKENS",
            flag="prefill",
        ),
    ] = 5_000.0
    decode_rate: Annotated[
        float,
        Field(ge=0.1),
        Setting("Decode speed of an answer in tokens per second.", "TOKENS", flag="decode"),
    ] = 30.0
    max_batch_size: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Batch size of a replica, including the sequence in prefill.",
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
        Setting(
            "Maximum number of requests per run; the first ones of all replicas are replayed.",
            "NUMBER",
        ),
    ] = 20_000
    routers: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Number of routers, used in turn; each knows only its own requests at once.", "NUMBER"
        ),
    ] = 1
    gossip_seconds: Annotated[
        float,
        Field(ge=0.1),
        Setting("Interval at which replicas report their cached blocks.", "SECONDS"),
    ] = 5.0
    worth: Annotated[
        float,
        Field(ge=0.1),
        Setting(
            "Cost of recomputing a block of one conversation, relative to a queued block.",
            "NUMBER",
        ),
    ] = WORTH


class ServeSettings(Settings):
    """Load of a server; lengths in tokens of the embedded model's tokenizer."""

    rounds: Annotated[
        int, Field(ge=1), Setting("Number of runs, each with newly started servers.")
    ] = 1
    sessions: Annotated[int, Field(ge=1), Setting("Number of concurrent sessions.", "NUMBER")] = 8
    turns: Annotated[int, Field(ge=1), Setting("Number of turns per session.", "NUMBER")] = 5
    system_tokens: Annotated[
        int,
        Field(ge=64),
        Setting("Length of the shared system prompt.", "TOKENS", flag="system"),
    ] = 4_000
    answer_tokens: Annotated[
        int, Field(ge=2), Setting("Maximum length of an answer.", "TOKENS", flag="answer")
    ] = 64
    forks: Annotated[
        int,
        Field(ge=0),
        Setting("Number of sessions that are continued twice after their second turn.", "NUMBER"),
    ] = 0
    edits: Annotated[
        int,
        Field(ge=0),
        Setting("Number of sessions whose fourth turn replaces the third.", "NUMBER"),
    ] = 0
    rate: Annotated[
        float,
        Field(ge=0.0),
        Setting(
            "Mean number of randomly timed requests per second, sent after the sessions whether "
            "or not the servers keep up; 0 disables them.",
            "REQUESTS",
        ),
    ] = 0.0
    arrivals: Annotated[
        int, Field(ge=1), Setting("Number of randomly timed requests.", "REQUESTS")
    ] = 40
    connections: Annotated[
        int,
        Field(ge=0),
        Setting("Number of simultaneous requests to penstock; 0 disables this test.", "NUMBER"),
    ] = 200
    overhead_rounds: Annotated[
        int,
        Field(ge=0),
        Setting("Number of rounds that time the server against the engine alone; 0 disables them."),
    ] = 5
    memory_limit: Annotated[
        int | None,
        Field(ge=1),
        Setting("Memory limit of penstock's server.", "BYTES", unset="the server's default"),
    ] = None


class EvalSettings(Settings):
    """Size of an evaluation, in tokens and questions."""

    outlier_scale: Annotated[
        float,
        Field(ge=1.0),
        Setting("Factor of the larger channels of the form outliers.", "FACTOR", flag="outliers"),
    ] = OUTLIER_SCALE
    questions: Annotated[
        int, Field(ge=1), Setting("Minimum number of questions per length and task.")
    ] = 64
    text_tokens: Annotated[
        int, Field(ge=1), Setting("Maximum number of tokens of the text.", "TOKENS")
    ] = 4_000
    piece_tokens: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Length of the pieces of the text, each processed from an empty cache.",
            "TOKENS",
            flag="piece",
        ),
    ] = 1_000
    prompts: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Maximum number of continuations per piece; 0 disables them.",
            "NUMBER",
            flag="continuations",
        ),
    ] = 16
    raw_first_tokens: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Number of first tokens of every prompt that stay in full precision. 0 shows a "
            "codec's effect best.",
            "TOKENS",
            flag="kv-cache-raw-first-tokens",
        ),
    ] = 0
