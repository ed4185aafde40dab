"""Thousands of requests through one engine; then every byte must be back where it began.

    python tools/soak.py --requests 10000

A seeded crowd asks the embedded model. Many requests share long system prompts. Some are cancelled,
time out, want several answers to one prompt, or must be refused. Some have seeded sampling,
penalties or stop strings. The memory limit is so low that prefixes are evicted all the time. From
time to time the engine is left to run dry, and all prefixes are evicted. Then all of this holds:

- The bytes that MLX has allocated, and those in the ledger, are the same to the byte as the first
  time.
- A recount from the arrays agrees with the ledger.
- Python holds no more objects than before, beyond a handful.
- Equal requests with equal seeds got equal answers, however their prefixes were shared meanwhile.

Exits with 1 if any of this fails.
"""

from __future__ import annotations

import gc
import json
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Annotated

import penstock  # before mlx: it loads a fast BLAS on a Linux CPU

import mlx.core as mx  # isort: skip
import psutil
import typer
from rich.console import Console
from rich.progress import Progress

from penstock.engine.handle import Handle
from penstock.engine.request import Request, Sampling
from penstock.errors import NeverFits, PenstockError, SettingError
from penstock.memory import format_bytes, parse_bytes
from penstock.recall import MODEL_PATH
from penstock_bench.recall import Dialogue, dialogue
from penstock_bench.rivals import random_falcon

SYSTEM_PROMPTS = 8
"""Beginnings that are shared; more than fit at once."""
SHORTEST = 300
"""Tokens of the shortest; each is longer than the one before by two thirds of that."""
IN_FLIGHT = 24
"""Requests that are open at the same time: some run, some wait."""
SETTLED_REQUESTS = 1_000
"""By then the engine remembers as many evictions as it ever does: Python's objects are counted from
there. A shorter soak counts them from its first look."""
STRAY_OBJECTS = 200
"""Python objects that may be added after that, for any number of requests."""
WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Look:
    """Bytes and objects that are there when nothing runs and nothing is kept."""

    requests: int
    active_bytes: int
    used_bytes: int
    held_bytes: int
    objects: int
    resident_bytes: int


@dataclass(slots=True)
class Outcome:
    """Results of a soak."""

    requests: int
    seconds: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    """Answers by how they ended; refused requests by their error."""
    repeated: int = 0
    """Answers that were compared with an earlier one to the same request."""
    differing: list[str] = field(default_factory=list)
    """Of these, the ones that were told otherwise."""
    hit_tokens: int = 0
    prompt_tokens: int = 0
    evicted_nodes: int = 0
    preemptions: int = 0
    looks: list[Look] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Crowd:
    """Makes the requests of one seed, each with the name under which its answer is compared."""

    def __init__(self, tokenizer: object, seed: int, shortest: int = SHORTEST) -> None:
        self._draw = Random(seed)
        self._tokenizer = tokenizer
        self._told: list[Dialogue] = [
            dialogue(seed + i, tokens=shortest + 2 * shortest * i // 3, facts=6)
            for i in range(SYSTEM_PROMPTS)
        ]

    def next(self) -> tuple[str, Request]:
        """Return a name and a request; the same name is always the same request."""
        draw = self._draw
        told = draw.randrange(SYSTEM_PROMPTS)
        question = draw.randrange(6)
        kind = draw.choices(
            ["greedy", "seeded", "several", "penalized", "stopped", "hasty", "huge", "unknown"],
            [50, 20, 8, 8, 8, 2, 2, 2],
        )[0]
        seed = draw.randrange(3)
        tokens = draw.choice((4, 12, 24))
        prompt = self._prompt(told, question)
        name = f"{kind} {told} {question} {seed} {tokens}"
        more: dict[str, object] = {"max_tokens": tokens, "ignore_eos": draw.random() < 0.2}
        name += f" {more['ignore_eos']}"
        if kind == "seeded":
            more["sampling"] = Sampling(temperature=0.9, top_p=0.9, seed=seed, logprobs=True)
        elif kind == "several":
            more |= {"n": 2 + seed, "sampling": Sampling(temperature=1.2, top_k=20, seed=seed)}
        elif kind == "penalized":
            more["sampling"] = Sampling(repetition_penalty=1.2, presence_penalty=0.3)
        elif kind == "stopped":
            more["stop"] = (" is", "ed", ".")
        elif kind == "hasty":
            more["timeout_seconds"] = 0.002
        elif kind == "huge":
            more |= {"max_tokens": Request.ENDLESS, "ignore_eos": False}
        elif kind == "unknown":
            prompt = (*prompt, 10_000_000)
        return name, Request(prompt=prompt, **more)  # type: ignore[arg-type]

    def cancels_after(self) -> int | None:
        """Return after how many events the next request is evicted; None: it is not."""
        return self._draw.randrange(3) if self._draw.random() < 0.1 else None

    def _prompt(self, told: int, question: int) -> tuple[int, ...]:
        of = self._told[told]
        messages = of.ask(of.questions[question % len(of.questions)])
        return tuple(
            self._tokenizer.apply_chat_template(  # type: ignore[attr-defined]
                messages, add_generation_prompt=True
            )
        )


@dataclass(slots=True)
class Asked:
    """A request that is open."""

    name: str
    handle: Handle
    cancel_after: int | None
    events: int = 0


class Soak:
    """Runs the crowd through an engine and looks from time to time."""

    def __init__(self, engine: penstock.Engine, crowd: Crowd, outcome: Outcome) -> None:
        self.engine, self.crowd, self.outcome = engine, crowd, outcome
        self._open: deque[Asked] = deque()
        self._answers: dict[str, int] = {}
        """Hashes: they are no objects to Python's collector, whose count is looked at."""

    def ask(self) -> None:
        """Submit the crowd's next request, waiting for the oldest if too many are open."""
        while len(self._open) >= IN_FLIGHT:
            self._read(self._open.popleft())
        name, request = self.crowd.next()
        try:
            handle = self.engine.submit(request)
        except (NeverFits, SettingError) as error:
            self.outcome.ends[type(error).__name__] += 1
            if not name.startswith("unknown"):
                self.outcome.faults.append(f"{name} was refused: {error}")
            return
        if name.startswith("unknown"):
            self.outcome.faults.append(f"{name} was taken in")
        asked = Asked(name, handle, self.crowd.cancels_after())
        if asked.cancel_after == 0:
            handle.cancel()
        self._open.append(asked)

    def drain(self) -> None:
        """Wait for everybody."""
        while self._open:
            self._read(self._open.popleft())

    def _read(self, asked: Asked) -> None:
        until = time.monotonic() + WAIT_SECONDS
        for _ in asked.handle:
            asked.events += 1
            if asked.events == asked.cancel_after:
                asked.handle.cancel()
            if time.monotonic() > until:
                raise TimeoutError(f"{asked.name} did not end in {WAIT_SECONDS:.0f} s")
        ends = []
        for choice in asked.handle.choices:
            assert choice.finish is not None
            ends.append(choice.finish.reason)
            self.outcome.ends[choice.finish.reason] += 1
            if choice.finish.error is not None:
                self.outcome.faults.append(f"{asked.name}: {choice.finish.error}")
        if all(reason in ("stop", "length") for reason in ends):
            self._compare(asked)

    def _compare(self, asked: Asked) -> None:
        tokens = tuple(tuple(choice.tokens) for choice in asked.handle.choices)
        self.outcome.repeated += asked.name in self._answers
        if self._answers.setdefault(asked.name, hash(tokens)) != hash(tokens):
            self.outcome.differing.append(f"{asked.name}: {tokens}, and something else before")

    def look(self, requests: int) -> None:
        """Run dry, evict everything, recount, and note the rest."""
        self.drain()
        self.engine.clear()
        try:
            self.engine.check()
        except AssertionError as error:
            self.outcome.faults.append(f"after {requests} requests: {error}")
        gc.collect()
        stats = self.engine.stats()
        self.outcome.looks.append(
            Look(
                requests=requests,
                active_bytes=stats.active_bytes,
                used_bytes=stats.used_bytes,
                held_bytes=stats.held_bytes,
                objects=len(gc.get_objects()),
                resident_bytes=psutil.Process().memory_info().rss,
            )
        )


def judge(outcome: Outcome, *, may_differ: float = 0.0) -> None:
    """Add a fault for every look that differs from the first, and for answers that differ.

    Answers count only if their share is above `may_differ`.
    """
    if len(outcome.differing) > may_differ * outcome.repeated:
        outcome.faults += outcome.differing
    first, *later = outcome.looks
    settled = next(
        (look for look in outcome.looks[:-1] if look.requests >= SETTLED_REQUESTS), first
    )
    for look in later:
        for what in ("active_bytes", "used_bytes", "held_bytes"):
            before, now = getattr(first, what), getattr(look, what)
            if now != before:
                outcome.faults.append(
                    f"after {look.requests:,} requests {what} is {now:,}, {now - before:+,}"
                )
        if look.requests > settled.requests and look.objects > settled.objects + STRAY_OBJECTS:
            outcome.faults.append(
                f"after {look.requests:,} requests Python holds {look.objects:,} objects, "
                f"{look.objects - settled.objects:+,}"
            )


def soak(
    requests: int,
    *,
    memory_limit: int,
    seed: int = 1,
    looks: int = 10,
    quiet: bool = True,
    hybrid: bool = False,
    shortest: int = SHORTEST,
) -> Outcome:
    """Send `requests` through one engine and look `looks` times, and once before.

    With `hybrid` to a random model of recurrent layers and attention. Of its words none is likelier
    than another by much: one answer in a thousand may be told otherwise, as chunks end elsewhere.

    Memory that the first tenth leaves (streams, the tokenizer's own) is not counted: the first look
    is behind it.
    """
    outcome = Outcome(requests)
    model, tokenizer = penstock.load(MODEL_PATH)
    if hybrid:
        model = random_falcon(vocabulary_size=int(model.args.vocab_size))
    crowd = Crowd(tokenizer, seed, shortest)
    began = time.monotonic()
    with (
        penstock.Engine(model, tokenizer, memory_limit=memory_limit, block_size=64) as engine,
        Progress(disable=quiet, console=Console(stderr=True)) as progress,
    ):
        mx.set_cache_limit(0)  # a buffer that is used again may be larger than it need be
        run = Soak(engine, crowd, outcome)
        each = max(1, requests // looks)
        bar = progress.add_task("requests", total=requests)
        for number in range(1, requests + 1):
            run.ask()
            progress.advance(bar)
            if number % each == 0:
                run.look(number)
        run.drain()
        stats = engine.stats()
        outcome.hit_tokens, outcome.prompt_tokens = stats.hit_tokens, stats.prompt_tokens
        outcome.evicted_nodes, outcome.preemptions = stats.evicted_nodes, stats.preemptions
    outcome.seconds = round(time.monotonic() - began, 1)
    judge(outcome, may_differ=1e-3 if hybrid else 0.0)
    return outcome


def main(
    requests: Annotated[int, typer.Option(help="How many.", min=1)] = 10_000,
    memory_limit: Annotated[
        str, typer.Option(help="Memory for everything; less evicts more.", metavar="BYTES")
    ] = "60MB",
    seed: Annotated[int, typer.Option(help="Seed of the crowd.")] = 1,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="Of a random model with recurrent layers.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send requests through one engine, and see that every byte comes back."""
    try:
        limit = parse_bytes(memory_limit)
        outcome = soak(requests, memory_limit=limit, seed=seed, quiet=as_json, hybrid=hybrid)
    except PenstockError as error:
        print(f"soak: {error}")
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(asdict(outcome)))
    else:
        first, last = outcome.looks[0], outcome.looks[-1]
        ends = ", ".join(f"{count:,} {name}" for name, count in outcome.ends.most_common())
        print(f"{requests:,} requests in {outcome.seconds:,.0f} s: {ends}")
        print(f"{outcome.repeated:,} answers compared with an earlier one to the same request")
        print(
            f"{outcome.hit_tokens:,} of {outcome.prompt_tokens:,} prompt tokens served from the "
            f"cache; {outcome.evicted_nodes:,} nodes evicted, {outcome.preemptions:,} preemptions"
        )
        print(
            f"MLX: {first.active_bytes:,} bytes at the first look, {last.active_bytes:,} at the "
            f"last; ledger: {first.used_bytes:,} and {last.used_bytes:,}; resident: "
            f"{format_bytes(first.resident_bytes)} and {format_bytes(last.resident_bytes)}"
        )
        for fault in outcome.faults:
            print(f"FAULT: {fault}")
        print("all bytes are back" if not outcome.faults else f"{len(outcome.faults)} faults")
    raise typer.Exit(1 if outcome.faults else 0)


if __name__ == "__main__":
    typer.run(main)
