"""`MemoryBudget` on plain sequences with a real ledger and tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from text_segment import Text

from penstock.attention.attention_backend import PlainOperations
from penstock.attention.attention_memory import AttentionMemory
from penstock.config import EngineSettings
from penstock.engine.model.figures import ModelFigures
from penstock.engine.model.prompt_logprobs import PromptLogprobs
from penstock.engine.model.step_peaks import StepPeaks
from penstock.engine.schedule.budget import FixedReservations, MemoryBudget
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.errors import LedgerFull, NeverFits
from penstock.kv.tails import LayerShape
from penstock.ledger import Kind, Ledger, Reservation
from penstock.prefix.pin import Pin
from penstock.prefix.prefixes import Prefixes

BLOCK = 16
TOKEN = 1_024
"""Bytes of a token: two heads of 64, keys and values, as float32."""
LIMIT = 2_000_000
FIXED = 100_000 + 20_000 + 30_000
"""Bytes of weights, pool and step."""
PEAKS = StepPeaks(0, 0, 0, far=0, far_tokens=1, token_seconds=0.0, measured_tokens=8)


@dataclass
class KV:
    """KV state of a sequence, reduced to what the budget reads."""

    num_cached_tokens: int = 0
    reservation: Reservation | None = None
    pin: Pin[Any] | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass
class Answer:
    """A sequence, reduced to what the budget reads."""

    prompt_tokens: int
    max_tokens: int = 500
    generated_tokens: int = 0
    kv: KV = field(default_factory=KV)
    step_reservation: Reservation | None = None
    reserved_tokens: int = 0
    stuck: bool = False

    @property
    def tokens(self) -> range:
        return range(self.prompt_tokens + self.generated_tokens)

    @property
    def max_kv_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens - 1


class Copies:
    """A component that reserves 5,000 bytes."""

    nbytes = 5_000


def scores(tokens: int) -> int:
    """Return the bytes of a decode step's scores: two heads, eight floats each."""
    return tokens * 2 * 32


def layer(tokens: int) -> int:
    """Return the bytes of a layer that a chunk copies; scores fit those of any step."""
    return 2 * tokens * TOKEN


def budget(limit_bytes: int = LIMIT) -> MemoryBudget:
    figures = ModelFigures(
        shapes=(LayerShape(2, 64, 64, mx.float32),), heads=2, vocabulary_size=100
    )
    limits = EngineSettings(
        memory_limit=limit_bytes, block_size=BLOCK, prefill_chunk=32, max_kv_size=4_096
    )
    ledger = Ledger(limit_bytes)
    aside = FixedReservations(
        weights=ledger.reserve(Kind.WEIGHTS, 100_000),
        pool=ledger.reserve(Kind.TAILS, 20_000),
        step=ledger.reserve(Kind.BUFFERS, 30_000),
        chunk=ledger.reserve(Kind.BUFFERS, 0),
    )
    prefixes: Prefixes[Text] = Prefixes(ledger, block_size=BLOCK, remembered=0)
    memory = AttentionMemory(scores_at_once=2**20)
    estimator = MemoryEstimator(figures, limits, memory, PEAKS, PlainOperations())
    return MemoryBudget(aside, estimator, prefixes, copying=(), token_bytes=TOKEN)


def cached(of: MemoryBudget, tokens: int) -> Pin[Text]:
    """Commit this number of tokens to the tree, and return a pin on them."""
    prefixes: Any = of._prefixes
    content = tuple(range(tokens))
    pin: Pin[Text] = prefixes.pin(prefixes.find(content))
    with prefixes.reserve(Kind.TAILS, Text.token_bytes * tokens) as paid:
        hashes = prefixes.block_hashes(content)
        assert prefixes.insert(pin, 0, hashes, content, Text(content), paid).refused is None
    return pin


def test_fixed_bytes_include_weights_pool_step_and_components() -> None:
    made = budget()
    index = made._prefixes.fixed_bytes
    assert made.fixed_bytes == FIXED + index
    parts = MemoryBudget(
        made._aside,
        made._estimator,
        made._prefixes,
        copying=[Copies(), Copies()],
        token_bytes=TOKEN,
        draft_bytes=7,
    )
    assert parts.fixed_bytes == FIXED + index + 2 * 5_000 + 7
    assert (parts.weights_bytes, parts.step_bytes) == (100_000, 30_000)
    parts.check_limit(FIXED + index + 10_007)
    with pytest.raises(NeverFits, match="the limit cannot be"):
        parts.check_limit(FIXED + index + 10_006)


def test_admitted_sequence_reserves_tokens_plus_32() -> None:
    made, answer = budget(), Answer(100)
    assert made.reserve(answer)
    assert answer.reserved_tokens == 99 + 32
    assert answer.kv.reservation is not None and answer.kv.reservation.nbytes == 131 * TOKEN
    assert answer.step_reservation is not None and answer.step_reservation.nbytes == scores(131)
    assert made._aside.chunk.nbytes == layer(131)


def test_cached_tokens_are_not_reserved_again() -> None:
    made, answer = budget(), Answer(100, kv=KV(num_cached_tokens=64))
    assert made.reserve(answer)
    assert answer.kv.reservation is not None
    assert answer.kv.reservation.nbytes == (131 - 64) * TOKEN


def test_reservation_grows_up_to_answer_length() -> None:
    made, answer = budget(), Answer(100, max_tokens=50)
    assert made.reserve(answer) and answer.reserved_tokens == 131
    answer.generated_tokens = 32
    assert made.grow(answer) and answer.reserved_tokens == answer.max_kv_tokens == 149
    assert answer.kv.reservation is not None and answer.kv.reservation.nbytes == 149 * TOKEN
    assert made._ledger.used_bytes == (made.fixed_bytes + 149 * TOKEN + scores(149) + layer(149))


def test_reservation_falls_back_to_current_length_or_fails() -> None:
    one = FIXED + budget()._prefixes.fixed_bytes + 100 * TOKEN + scores(100) + layer(100)
    answer = Answer(100)
    assert budget(one).reserve(answer) and answer.reserved_tokens == 100
    full, other = budget(one - 1), Answer(100)
    before = full._ledger.by_class()
    assert not full.reserve(other)
    assert full._ledger.by_class() == before
    assert other.kv.reservation is other.step_reservation is None and other.reserved_tokens == 0


def test_reserving_evicts_nodes_in_full_ledger() -> None:
    made = budget()
    cached(made, 64).release()
    made._ledger.reserve(Kind.BUFFERS, made._ledger.free_bytes)
    answer = Answer(1, max_tokens=1)
    assert made.reserve(answer) and answer.reserved_tokens == 1


def test_readmitted_out_of_memory_sequence_reserves_maximum() -> None:
    made = budget(FIXED + 700_000)
    answer = Answer(100, max_tokens=4_000, stuck=True)
    assert made.reserve(answer)
    assert answer.reserved_tokens == made.most_tokens() - 1 > 131


def test_chunk_reservation_follows_longest_sequence() -> None:
    made, long, short = budget(), Answer(200), Answer(50)
    assert made.reserve(long) and made.reserve(short)
    assert made._aside.chunk.nbytes == layer(199 + 32)
    made.release(long, [short])
    assert long.kv.reservation is None and long.reserved_tokens == 0
    assert made._aside.chunk.nbytes == layer(49 + 32)
    made.release(short, [])
    assert made._ledger.used_bytes == made.fixed_bytes


def test_most_tokens_is_length_of_longest_fitting_sequence() -> None:
    made = budget()
    most = made.most_tokens()
    fits, over = Answer(most - 1), Answer(most)
    assert made.fits_alone(fits) and not made.fits_alone(over)
    made.check_fits(fits)
    with pytest.raises(NeverFits, match=rf"{most} tokens > {most - 1} maximum") as told:
        made.check_fits(over)
    needed = most * TOKEN + scores(most) + layer(most)
    needed += made._prefixes.index_bytes(most // BLOCK + 1)
    assert told.value.needed_bytes == needed


def test_prompt_logprobs_are_reserved() -> None:
    """4 rows of 8 bytes per token, and a chunk's logits."""
    made, plain = budget(12_000_000), Answer(100)
    asked = Answer(100, kv=KV(prompt_logprobs=PromptLogprobs(range(100), top=3)))
    logits = made._estimator.logits_bytes + 2 * 8 * 32 * 4 + 40 * (2**18 // 100) * 3
    assert made.reserve(plain) and made.reserve(asked)
    assert asked.step_reservation is not None
    assert asked.step_reservation.nbytes == scores(131) + 8 * 100 * 4
    assert made._aside.chunk.nbytes == layer(131) + logits
    made.release(asked, [plain])
    assert made._aside.chunk.nbytes == layer(131)


def test_refusal_counts_prompt_logprobs() -> None:
    made = budget(4_000_000)
    tokens = made.most_tokens() - 1
    made.check_fits(Answer(tokens))
    asked = Answer(tokens, kv=KV(prompt_logprobs=PromptLogprobs(range(tokens), top=3)))
    with pytest.raises(NeverFits, match="of logits for its tokens") as told:
        made.check_fits(asked)
    needed = (tokens + 1) * TOKEN + scores(tokens + 1) + layer(tokens + 1)
    needed += made._prefixes.index_bytes((tokens + 1) // BLOCK + 1)
    assert told.value.needed_bytes > needed + 8 * tokens
    least = made.fixed_bytes + told.value.needed_bytes
    assert budget(least).fits_alone(asked) and not budget(least - 1).fits_alone(asked)


def test_only_unpinned_nodes_are_evicted_to_admit() -> None:
    made = budget()
    pin = cached(made, 64)
    room = 100 * TOKEN + scores(100) + layer(100)
    rest = made._ledger.reserve(Kind.BUFFERS, made._ledger.free_bytes - room + 1)
    assert not made.reserve(Answer(100))
    pin.release()
    answer = Answer(100)
    assert made.reserve(answer) and answer.reserved_tokens == 100
    assert made._prefixes.evictable_bytes == 0, "the node had to go"
    rest.release()


@pytest.mark.parametrize("alone", [True, False])
def test_admission_uses_expected_answer_length(*, alone: bool) -> None:
    """256 tokens are expected of an answer."""
    tokens = 99 + 256
    both = 2 * (tokens * TOKEN + scores(tokens)) + layer(tokens)
    made = budget(FIXED + both - 1)
    running = Answer(100)
    assert made.reserve(running)
    assert made.has_room(Answer(100), [] if alone else [running]) is alone
    enough = budget(FIXED + both + enough_index())
    assert enough.reserve(other := Answer(100))
    assert enough.has_room(Answer(100), [other])


def test_evictable_nodes_count_as_free_for_admission() -> None:
    made = budget()
    cached(made, 64).release()
    assert made.reserve(running := Answer(100, max_tokens=1))
    new = Answer(100, max_tokens=1)
    needed = 100 * TOKEN + scores(100)
    evictable = made._prefixes.evictable_bytes
    assert 0 < evictable < needed
    blocker = made._ledger.reserve(Kind.BUFFERS, made._ledger.free_bytes - needed + evictable)
    assert made.has_room(new, [running])
    blocker.resize(blocker.nbytes + 1)
    assert not made.has_room(new, [running])


def test_preemption_fit_counts_expected_growth_of_others() -> None:
    """Then the expected lengths count; for a sequence alone only its present one does."""
    made = budget(4_000_000)
    going, staying = Answer(100), Answer(100)
    assert made.reserve(going) and made.reserve(staying)
    assert going.kv.reservation is not None and going.step_reservation is not None
    freed = going.kv.reservation.nbytes + going.step_reservation.nbytes
    expected, reserved = 99 + 256, 99 + 32
    needed = expected * TOKEN + scores(expected) + layer(expected) - layer(reserved)
    needed += (expected - reserved) * TOKEN + scores(expected) - scores(reserved)
    blocker = made._ledger.reserve(Kind.BUFFERS, made._ledger.free_bytes - needed + freed)
    assert made.would_fit(Answer(100), 0, [going], [staying])
    blocker.resize(blocker.nbytes + 1)
    assert not made.would_fit(Answer(100), 0, [going], [staying])
    assert made.would_fit(Answer(100), 0, [going], [])


def enough_index() -> int:
    """Return the bytes of an empty tree."""
    return budget()._prefixes.fixed_bytes


def test_preemption_frees_only_exclusive_bytes() -> None:
    made = budget()
    running = Answer(1, max_tokens=1)
    running.kv.pin = cached(made, 64)
    assert made.reserve(running)
    assert running.kv.reservation is not None and running.step_reservation is not None
    held = running.kv.reservation.nbytes + running.step_reservation.nbytes
    node = 64 * Text.token_bytes + running.kv.pin.node.index_bytes  # type: ignore[union-attr]
    new = Answer(100, max_tokens=1)
    needed = 100 * TOKEN + scores(100) + layer(100) - made._aside.chunk.nbytes
    blocker = made._ledger.reserve(Kind.BUFFERS, made._ledger.free_bytes - needed + held + node)
    assert made.would_fit(new, 0, [running], [])
    assert not made.would_fit(new, 0, [running], [], evict=False)
    blocker.resize(blocker.nbytes + 1)
    assert not made.would_fit(new, 0, [running], [])
    assert made.would_fit(new, 16, [running], []), "sixteen of its tokens are cached"


def test_evicted_cached_tokens_are_reserved_again() -> None:
    made, answer = budget(), Answer(100, kv=KV(num_cached_tokens=64))
    assert made.reserve(answer)
    answer.kv.num_cached_tokens = 16
    assert made.reserve_anew(answer)
    assert answer.kv.reservation is not None
    assert answer.kv.reservation.nbytes == (131 - 16) * TOKEN
    made._ledger.reserve(Kind.BUFFERS, made._ledger.free_bytes - 16 * TOKEN + 1)
    answer.kv.num_cached_tokens = 0
    assert not made.reserve_anew(answer)
    assert answer.kv.reservation.nbytes == (131 - 16) * TOKEN


def test_top_up_restores_missing_reservation_bytes() -> None:
    made, answer = budget(), Answer(100)
    assert made.reserve(answer)
    own = answer.kv.reservation
    assert own is not None
    own.resize(own.nbytes - 10 * TOKEN)
    assert made.top_up(answer) and own.nbytes == 131 * TOKEN
    answer.kv.num_cached_tokens = 100
    assert made.top_up(answer) and own.nbytes == 131 * TOKEN


def test_memory_set_aside_for_prompts_is_at_most_half_of_free() -> None:
    made = budget()
    free = made._ledger.free_bytes
    assert made.set_aside_prompts(10_000) == 10_000
    assert made.set_aside_prompts(free) == free // 2
    assert made.set_aside_prompts(0) == 0 and made._ledger.free_bytes == free


def test_grammars_are_evicted_for_sequences() -> None:
    room = 100 * TOKEN + scores(100) + layer(100)
    made = budget(FIXED + enough_index() + room + 1_000)
    made.reserve_grammars(3_000)
    assert not made.reserve(Answer(100))
    kept: list[int] = [1_000]
    evict: Callable[[], int] = lambda: kept[0]  # noqa: E731
    made.evict_grammars = evict
    assert made.reserve(Answer(100))
    assert made._grammars.nbytes == 1_000
    with pytest.raises(LedgerFull):
        made.reserve_grammars(room)
    assert made._grammars.nbytes == 1_000


def test_check_detects_unaccounted_bytes() -> None:
    made, answer = budget(), Answer(100)
    assert made.reserve(answer)

    class Pool:
        nbytes = 20_000

    def check() -> None:
        tails: Any = Pool()
        made.check([answer], tails, weights=100_000, draft=0, reading=0, scored=0, features=0)

    check()
    lost = made._ledger.reserve(Kind.TAILS, 1)
    with pytest.raises(AssertionError):
        check()
    lost.release()
    Pool.nbytes = 10_000
    with pytest.raises(AssertionError, match="tails of 10000 bytes, 20000 counted"):
        check()


def test_close_keeps_weights_in_ledger() -> None:
    made = budget()
    made.set_aside_prompts(10_000)
    made.close()
    assert made._ledger.used_bytes == 100_000 + made._prefixes.fixed_bytes
