"""Prefill between decode steps: the scheduler and measured speed on a virtual clock.

The clock follows a model whose chunks take a time of their own, some for each token, and some for
each token that one reads; with noise, and with changes of the machine's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from test_scheduler import Item, admitted, item, make, shares

from penstock.engine.prefill_rate import PrefillRate, RunningMean
from penstock.engine.schedule.scheduler import PrefillChunk, State
from penstock.engine.schedule.step_time import ALONE_SECONDS, SLACK, ChunkSpeed, StepTime

STALL = 0.2
CHUNK, BLOCK = 512, 32
MOST = 1.5
"""Longest gap for prompts over the one that was asked for."""
NOISE = 0.15
"""Share of its time by which a chunk is quicker or slower at most."""
LEARNING = 5
"""Chunks after a change of the machine's speed, or at an unknown length, that may take longer."""


@dataclass(slots=True)
class Machine:
    """Seconds per chunk, per token, and per token of context."""

    fixed: float
    token: float
    read: float
    noise: float = 0.0
    slowness: float = 1.0
    random: Random = field(default_factory=lambda: Random(0))

    def exact(self, start: int, tokens: int) -> float:
        each = self.token + self.read * (start + tokens / 2)
        return self.slowness * (self.fixed + tokens * each)

    def seconds(self, start: int, tokens: int) -> float:
        return self.exact(start, tokens) * self.random.uniform(1 - self.noise, 1 + self.noise)


def measured(machine: Machine) -> PrefillRate:
    """Return the prefill rate as a newly opened engine knows it."""
    seconds = machine.seconds(0, CHUNK)
    return PrefillRate(RunningMean(seconds / CHUNK), CHUNK)


@dataclass(slots=True)
class Gap:
    """Prompt chunks between two decode steps."""

    chunks: dict[int, int]
    seconds: float
    possible: bool
    """Whether one token of each would be read in time."""
    learning: bool


class Simulation:
    """One sequence that decodes endlessly, and prompts beside it."""

    def __init__(
        self,
        machine: Machine,
        speed: Callable[[Machine], ChunkSpeed] = measured,
        alone_seconds: float | None = None,
        block_tokens: int | None = None,
    ) -> None:
        self.machine, self.speed = machine, speed(machine)
        self.time = StepTime(
            STALL, self.speed, alone_seconds=alone_seconds, block_tokens=block_tokens
        )
        self.ended: dict[int, float] = {}
        """Time at which a prompt was read, by its number."""
        self.scheduler = make(8, CHUNK, BLOCK)
        self.gaps: list[Gap] = []
        self.learning = 0
        self.clock, self.read_tokens = 0.0, 0
        self._number = 0

    def decode(self) -> None:
        """Start a sequence that decodes."""
        running = item(self._next())
        admitted(self.scheduler, running)
        self.scheduler.act(running, "prefilled")

    def ask(self, tokens: int, cached: int = 0) -> None:
        """Submit a prompt with this number of cached tokens."""
        if not self.scheduler.free_places:
            return
        admitted(self.scheduler, item(self._next(), left=tokens, position=cached))

    def change(self, slowness: float) -> None:
        self.machine.slowness = slowness
        self.learning = LEARNING

    @property
    def is_reading(self) -> bool:
        return bool(self.scheduler.sequences(State.PREFILLING))

    def step(self) -> None:
        plan = self.scheduler.plan(self.time)
        possible = all(self.machine.exact(c.sequence.position, 1) <= STALL for c in plan.prefill)
        began = self.clock
        for chunk in plan.prefill:
            self._read(chunk)
        if plan.prefill:
            gap = Gap(shares(plan), self.clock - began, possible, self.learning > 0)
            self.gaps.append(gap)
            self.learning -= 1

    def run(self) -> None:
        while self.is_reading:
            self.step()

    def _read(self, chunk: PrefillChunk[Item]) -> None:
        moved, tokens = chunk.sequence, chunk.tokens
        seconds = self.machine.seconds(moved.position, tokens)
        self.clock += seconds
        if isinstance(self.speed, PrefillRate):
            self.speed.prefilled(tokens, seconds, moved.position)
        moved.position += tokens
        moved.remaining_tokens -= tokens
        moved.served_tokens += tokens
        self.read_tokens += tokens
        if not moved.remaining_tokens:
            self.scheduler.act(moved, "prefilled")
            self.scheduler.act(moved, "finish")
            self.ended[moved.id] = self.clock

    @property
    def last_number(self) -> int:
        """Number of the last prompt."""
        return self._number

    def _next(self) -> int:
        self._number += 1
        return self._number


def drawn_machine(random: Random) -> Machine:
    """Return a machine whose first chunk of a prompt takes 20 ms to 20 s."""
    chunk = 0.02 * 10 ** random.uniform(0, 3)
    fixed = random.choice((0.0, 0.02, 0.3)) * min(chunk, STALL)
    token = (chunk - fixed) / CHUNK
    read = token * random.choice((0.0, 1e-4, 2e-3))
    return Machine(fixed, token, read, random.choice((0.0, 0.1, NOISE)), 1.0, random)


def talk(
    seed: int,
    speed: Callable[[Machine], ChunkSpeed] = measured,
    block_tokens: int | None = None,
) -> Simulation:
    """Submit prompts of all lengths beside a decoding sequence on a changing machine."""
    random = Random(seed)
    simulation = Simulation(drawn_machine(random), speed, block_tokens=block_tokens)
    simulation.decode()
    for _ in range(12):
        event = random.choice(("long", "short", "turn", "several", "change"))
        if event == "change":
            simulation.change(random.choice((0.25, 0.5, 1.0, 2.0, 4.0)))
        for _ in range(3 if event == "several" else 1):
            simulation.ask(
                {"long": 4_000, "turn": 40}.get(event, random.randrange(1, 900)),
                cached=random.choice((0, 0, 700, 20_000)) if event == "turn" else 0,
            )
        for _ in range(random.randrange(60)):
            simulation.step()
    for _ in range(200):
        simulation.step()
    return simulation


def stalls(simulation: Simulation) -> list[Gap]:
    """Return the gaps that were longer than necessary."""
    return [gap for gap in simulation.gaps if gap.possible and not gap.learning and is_long(gap)]


def is_long(gap: Gap) -> bool:
    """Return whether a gap is too long; a single block may take `SLACK` times its time."""
    most = MOST if sum(gap.chunks.values()) > BLOCK else SLACK * (1 + NOISE) / (1 - NOISE)
    return gap.seconds > most * STALL


class FixedChunk:
    """A prefill rate at which every chunk fits."""

    def chunk_seconds(self, tokens: int, start: int) -> float:
        return 0.0

    def tokens_within(self, seconds: float, start: int, most: int) -> int:
        return most

    tokens_to_try = tokens_within

    def tokens_worth(self, start: int) -> int:
        return 0


class OneMean(PrefillRate):
    """A prefill rate that ignores chunk length and position."""

    def chunk_seconds(self, tokens: int, start: int) -> float:
        return self.prefill_seconds(tokens)

    def tokens_within(self, seconds: float, start: int, most: int) -> int:
        return min(most, int(seconds / self.prefill_seconds(1)))

    def tokens_to_try(self, seconds: float, start: int, most: int) -> int:
        return most

    def tokens_worth(self, start: int) -> int:
        return 0


def one_mean(machine: Machine) -> PrefillRate:
    return OneMean(RunningMean(machine.seconds(0, CHUNK) / CHUNK), CHUNK)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("block_tokens", [None, BLOCK])
def test_time_between_decode_steps_is_bounded(seed: int, block_tokens: int | None) -> None:
    simulation = talk(seed, block_tokens=block_tokens)
    assert any(gap.possible for gap in simulation.gaps)
    assert stalls(simulation) == []


@pytest.mark.parametrize("speed", [lambda machine: FixedChunk(), one_mean])
def test_check_detects_rate_ignoring_context_length(
    speed: Callable[[Machine], ChunkSpeed],
) -> None:
    assert sum(bool(stalls(talk(seed, speed))) for seed in range(6)) >= 2


def steady(machine: Machine, block_tokens: int | None) -> Simulation:
    """Prefill a long prompt beside a decoding sequence."""
    simulation = Simulation(machine, block_tokens=block_tokens)
    simulation.decode()
    simulation.ask(4_000)
    simulation.run()
    return simulation


def test_fast_machine_uses_quarter_of_allowed_time() -> None:
    """A block takes 11 ms, so chunks of 50 ms cost a tenth more in all than those of 200."""
    whole, quarter = (steady(Machine(0.005, 2e-4, 0.0), size) for size in (None, BLOCK))
    assert max(gap.seconds for gap in whole.gaps[LEARNING:]) > STALL / 2
    assert max(gap.seconds for gap in quarter.gaps[LEARNING:]) <= STALL / 4
    assert quarter.clock < 1.15 * whole.clock


def test_slow_machine_prefills_one_block_per_step() -> None:
    """A block takes 0.13 s: shorter chunks would cost more in all."""
    whole, blocks = (steady(Machine(0.1, 1e-3, 0.0), size) for size in (None, BLOCK))
    assert {sum(gap.chunks.values()) for gap in blocks.gaps[LEARNING:-1]} == {BLOCK}
    assert blocks.clock < 1.5 * whole.clock


@pytest.mark.parametrize("seed", range(10))
def test_prefill_chunks_use_allowed_time(seed: int) -> None:
    """A long prompt uses most of it; a short one does not delay the next."""
    machine = drawn_machine(Random(seed))
    simulation = Simulation(machine)
    simulation.decode()
    for _ in range(4):
        simulation.ask(2_500)
        simulation.ask(3)
        simulation.run()
    gaps = [gap for gap in simulation.gaps[10:] if gap.possible and len(gap.chunks) == 1]
    used = [gap.seconds / STALL for gap in gaps if sum(gap.chunks.values()) < CHUNK - BLOCK]
    room = machine.exact(2_000, CHUNK) > STALL > machine.exact(2_000, BLOCK)
    assert not room or sum(used) / len(used) > 0.6


@pytest.mark.parametrize("seed", range(10))
def test_single_prompt_is_prefilled_in_large_chunks(seed: int) -> None:
    simulation = Simulation(drawn_machine(Random(seed)))
    for tokens in (4_000, 3, 700):
        simulation.ask(tokens)
        simulation.run()
    spent, read = simulation.clock, simulation.read_tokens
    fixed = Simulation(drawn_machine(Random(seed)), lambda machine: FixedChunk())
    fixed.decode()
    for tokens in (4_000, 3, 700):
        fixed.ask(tokens)
        fixed.run()
    assert {tokens for gap in fixed.gaps for tokens in gap.chunks.values()} >= {CHUNK}
    assert read / spent >= 0.95 * fixed.read_tokens / fixed.clock


def test_prefill_rate_adapts_to_slowdown_in_few_chunks() -> None:
    simulation = Simulation(Machine(0.01, 0.001, 1e-6))
    simulation.decode()
    simulation.ask(4_000)
    for slowness in (4.0, 1.0, 10.0, 0.1):
        for _ in range(6):
            simulation.step()
        simulation.change(slowness)
        late = []
        for _ in range(LEARNING):
            simulation.step()
            late.append(is_long(simulation.gaps[-1]))
        assert sum(late) <= 1, "only the chunk in which it happens"


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_short_request_during_long_prompt_decodes_within_two_seconds(
    seed: int, bounded: bool
) -> None:
    """Without the bound, it waits for a slow chunk."""
    random = Random(seed)
    machine = Machine(0.005, random.uniform(1e-3, 4e-3), random.uniform(1e-7, 1e-6), NOISE)
    simulation = Simulation(machine, alone_seconds=ALONE_SECONDS if bounded else None)
    simulation.ask(18_900)
    for _ in range(LEARNING):
        simulation.step()
    waits = []
    while simulation.is_reading:
        came = simulation.clock + random.uniform(0, 0.1)
        simulation.step()  # it comes while this one computes
        simulation.ask(24)
        number = simulation.last_number
        while number not in simulation.ended:
            simulation.step()
        waits.append(simulation.ended[number] - came)
    assert (max(waits) <= 2.0) is bounded


@pytest.mark.parametrize("worth", [True, False])
def test_small_chunks_amortize_fixed_cost(worth: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SmolLM2 on two cores: 8 tokens take nearly as long as 16."""
    if not worth:
        monkeypatch.setattr(PrefillRate, "tokens_worth", lambda self, start: 0)
    machine = Machine(0.16, 0.008, 0.0)
    simulation = Simulation(machine)
    simulation.ask(3_100)
    simulation.run()
    simulation.decode()
    for _ in range(12):
        simulation.ask(56, cached=3_072)
        simulation.run()
    first: dict[int, int] = {}
    for gap in simulation.gaps[-12:]:
        first = {**gap.chunks, **first}
    assert (min(first.values()) >= 0.5 * 0.16 / 0.008) is worth, first
