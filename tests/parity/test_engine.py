"""The engine's tokens match a plain mlx-lm loop, wherever the KV came from."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from asking import answer, ask, cached, drain, recount
from combinations import each, pairs
from core_parts import cached_nodes, evict_all, pinned_nodes, sequences_in, shrink, way_of, why_of
from mlx_lm.models import cache as theirs
from parity_models import (
    JOINED_FAMILIES,
    LATENT_FAMILIES,
    SHARED_FAMILIES,
    Step,
    assert_same,
    generate,
    model_of,
    prompt_of,
)

from penstock.attention import devices, span_attention
from penstock.attention.attention_backend import AttentionBackend, DecodeStep
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.span_attention import AttentionWindow
from penstock.caches import SinkRotatingKVCache
from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.model.model_probe import PROBE
from penstock.engine.model.sampling import TokenSampler
from penstock.engine.request import Sampling
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.scheduler import State
from penstock.errors import PenstockError
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import Tails
from penstock.models.layer_seams import attach
from penstock.models.loading import load
from penstock.prefix import prefixes
from penstock.prefix.prefixes import InsertResult
from penstock.prefix.tree import PrefixTree
from penstock.recall import MODEL_PATH
from penstock_bench.recall import dialogue

FAMILIES = (*SHARED_FAMILIES, *JOINED_FAMILIES, *LATENT_FAMILIES)
READ = {
    **dict.fromkeys(SHARED_FAMILIES, "shared"),
    **dict.fromkeys(JOINED_FAMILIES, "joined"),
    **dict.fromkeys(LATENT_FAMILIES, "latent"),
}
KINDS = ("llama", "gemma3", "gpt_oss", "gemma2")
"""One each of plain attention, windows, windows and sinks, and joined KV."""
every_family = pytest.mark.parametrize("family", FAMILIES)
every_kind = pytest.mark.parametrize("family", KINDS)
every_reading = pytest.mark.parametrize("family", (*KINDS, "deepseek_v32"))
"""Those, and latents that an index of the model's own chooses."""
SMALL = {"block_size": 16, "prefill_chunk": 32}
BASE = tuple(prompt_of(70))
"""Four whole blocks and six tokens."""


@contextmanager
def engine(model: Any, **settings: Any) -> Iterator[Core]:
    core = Core(model, **{"memory_limit": "400MB", **settings})
    try:
        yield core
        recount(core)
        assert core.view.idle and pinned_nodes(core) == 0
        assert core.tails.free_slots == core.tails.slots
    finally:
        core.close()


Caches = Callable[[], list[Any]]
_told: dict[tuple[Any, ...], list[Step]] = {}
"""What a plain loop has said, by family, prompt and what else it depends on."""


def told(
    family: str, prompt: tuple[int, ...], tokens: int, caches: Caches, *how: int, chunk: int = 2_048
) -> list[Step]:
    """Generate in mlx-lm's loop on caches identified by `how`; results are reused."""
    key = (family, prompt, *how)
    if len(_told.get(key, ())) < tokens:
        _told[key] = generate(model_of(family), prompt, caches(), tokens, chunk)
    return _told[key][:tokens]


def plain_text(family: str, prompt: Sequence[int], tokens: int) -> list[Step]:
    """Generate in mlx-lm's loop."""
    return told(family, tuple(prompt), tokens, lambda: theirs.make_prompt_cache(model_of(family)))


def check(family: str, *handles: Handle) -> None:
    """Compare answers with those of a plain loop."""
    for number, handle in enumerate(handles):
        request = handle.request
        reference = plain_text(family, request.prompt, request.max_tokens)
        what = f"{family}, request {number} of {len(request.prompt)} tokens"
        assert_same(answer(handle), reference, what)


# ---- one after the other


@every_family
def test_text_is_equal_cold_warm_and_next_turn(family: str) -> None:
    with engine(model_of(family), **SMALL) as core:
        assert way_of(core) == READ[family], why_of(core)
        for hits, computed in ((0, 69), (64, 5)):
            before = core.view.stats().prefilled_tokens
            handle = ask(core, BASE, 12)
            drain(core)
            check(family, handle)
            assert cached(handle) == hits
            assert core.view.stats().prefilled_tokens - before == computed
        # What was generated is held to its end: 70 + 11 tokens.
        turn = ask(core, (*BASE, *answer(handle), *prompt_of(4)), 12)
        drain(core)
        check(family, turn)
        assert cached(turn) == 81


@every_family
def test_fully_cached_prompt_is_not_prefilled(family: str) -> None:
    """It ends on a block: its last token is decoded, nothing is copied."""
    prompt = BASE[:64]
    with engine(model_of(family), **SMALL) as core:
        first = ask(core, prompt, 20)
        drain(core)
        before = core.view.stats()
        again = [ask(core, prompt, 20), ask(core, prompt, 3), ask(core, (*prompt, 7), 20)]
        drain(core, 1)
        assert len(again[0].events()) == 1, "the first step gave no token"
        after = core.view.stats()
        assert after.prefilled_tokens == before.prefilled_tokens
        assert after.copied_bytes == before.copied_bytes
        drain(core)
        check(family, first, *again)
        assert [cached(handle) for handle in again] == [63, 63, 64]


def answers_on(device: AttentionBackend, family: str, codec: str | None = None) -> list[Handle]:
    """Ask one question alone on a back end, then three of one conversation at once."""
    prompts = [(*BASE[:64], *prompt_of(20, seed)) for seed in range(4)]
    if family == "embedded":
        tokenizer, told = load(MODEL_PATH)[1], dialogue(1, tokens=600, facts=6)
        asked = [told.ask(question) for question in told.questions[:4]]
        prompts = [
            tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
            for messages in asked
        ]
    settings: dict[str, Any] = {**SMALL, "block_size": 64, "prefill_chunk": 128}
    if codec is not None:
        settings |= {"kv_cache_quantization": codec, "kv_cache_quantize_when": "active"}
        settings |= {"kv_cache_min_quantize_tokens": 0}
    with devices.using(device), engine(model_of(family), **settings) as core:
        assert way_of(core) == READ[family], why_of(core)
        handles = [ask(core, prompts[0], 12)]
        drain(core)
        handles += [ask(core, prompt, 12) for prompt in prompts[1:]]
        drain(core)
        assert all(cached(handle) >= 64 for handle in handles[1:])
    return handles


@pytest.mark.parametrize(
    ("family", "codec"), [*((kind, None) for kind in KINDS), ("embedded", None), ("embedded", "8")]
)
def test_gpu_backend_matches_plain(family: str, codec: str | None) -> None:
    """Chosen explicitly on any device: fused chunks, no lanes, lazy slices."""
    check(family, *answers_on(GPUBackend(), family, codec))


class MisreadChunks(GPUBackend):
    """Negates the attention of chunks, except in the engine's trial steps."""

    def prefill(self, queries: mx.array, keys: mx.array, values: mx.array, **how: Any) -> mx.array:
        found = super().prefill(queries, keys, values, **how)
        return found if queries.shape[2] <= len(PROBE) else -found


class MisreadCodes(GPUBackend):
    """Negates products with codes."""

    def multiply_codes(self, x: mx.array, *parts: mx.array, **how: Any) -> mx.array:
        return super().multiply_codes(-x, *parts, **how)


@pytest.mark.parametrize(("wrong", "codec"), [(MisreadChunks(), None), (MisreadCodes(), "8")])
def test_check_detects_broken_backend(wrong: AttentionBackend, codec: str | None) -> None:
    with pytest.raises(AssertionError, match="which led by"):
        check("embedded", *answers_on(wrong, "embedded", codec))


def first_token_bytes(family: str) -> float:
    """Return the peak of a full hit's first step as a share of the prompt's KV."""
    prompt = prompt_of(256)
    with engine(model_of(family), block_size=64, prefill_chunk=256) as core:
        for _ in range(2):
            ask(core, prompt, 1)
            drain(core)
        handle = ask(core, prompt, 1)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        drain(core)
        peak = mx.get_peak_memory() - before
        check(family, handle)
        return peak / (256 * core.view.token_bytes)


def test_full_cache_hit_allocates_nothing_for_prompt() -> None:
    assert first_token_bytes("llama") < 0.1
    # Negative control: joined models copy a layer, of which this one has two: its keys and its
    # values, one of which may have been let go when the other is made.
    assert first_token_bytes("gemma2") > 0.25


# ---- at the same time


@every_reading
def test_simultaneous_requests_prefill_shared_prefix_once(family: str) -> None:
    fork = (*BASE[:50], *prompt_of(10, 3))
    with engine(model_of(family), **SMALL) as core:
        handles = [ask(core, prompt, 20) for prompt in (BASE, fork, BASE, fork, BASE)]
        drain(core)
        check(family, *handles)
        # The four blocks of BASE, three of which are the fork's; what is no whole block, and
        # the fork's last eleven tokens, each for himself. The last token is decoded.
        assert core.view.stats().prefilled_tokens == 64 + 3 * 5 + 2 * 11
        assert core.view.stats().hit_tokens == 2 * 64 + 2 * 48


@every_reading
def test_request_shares_prompt_that_is_being_prefilled(family: str) -> None:
    """It shares committed blocks and follows those committed later."""
    with engine(model_of(family), block_size=8, prefill_chunk=8) as core:
        first = ask(core, BASE, 20)
        drain(core, 3)
        assert core.view.stats().prefilled_tokens == 24
        second, fork = ask(core, BASE, 20), ask(core, (*BASE[:50], 3, 1, 4), 20)
        drain(core)
        check(family, first, second, fork)
        assert (cached(second), cached(fork)) == (64, 48)
        assert core.view.stats().prefilled_tokens == 69 + 5 + 4


@every_kind
def test_blocks_of_cancelled_request_are_reused(family: str) -> None:
    with engine(model_of(family), block_size=8, prefill_chunk=8) as core:
        first = ask(core, BASE, 20)
        drain(core, 3)
        first.cancel()
        recount(core)
        second = ask(core, BASE, 20)
        drain(core)
        check(family, second)
        assert answer(first) == []
        assert cached(second) == 24


@every_reading
def test_node_split_while_in_use_keeps_answers(family: str) -> None:
    with engine(model_of(family), block_size=16, prefill_chunk=64) as core:
        first = ask(core, BASE, 30)
        drain(core, 5)
        assert [node.end for node in cached_nodes(core)] == [64]
        fork = ask(core, (*BASE[:40], *prompt_of(30, 3)), 20)
        drain(core, 1)
        assert (0, 32) in {(node.start, node.end) for node in cached_nodes(core)}
        warm = ask(core, BASE, 20)
        drain(core)
        check(family, first, fork, warm)
        assert (cached(fork), cached(warm)) == (32, 64)


SIZES = ((1, 1), (3, 7), (8, 16), (32, 5), (128, 512))


@pytest.mark.parametrize(
    ("sizes", "family"), each(SIZES, ("gemma3", "llama", "deepseek_v3", "deepseek_v32"))
)
def test_text_is_independent_of_block_and_chunk_size(family: str, sizes: tuple[int, int]) -> None:
    block, chunk = sizes
    fork = (*BASE[:40], *prompt_of(9, 3))
    with engine(model_of(family), block_size=block, prefill_chunk=chunk) as core:
        cold = [ask(core, BASE, 20), ask(core, fork, 20)]
        drain(core)
        warm = [ask(core, prompt, 20) for prompt in (fork, BASE[:48], BASE)]
        drain(core)
        check(family, *cold, *warm)
        assert cached(warm[2]) == min(69, 70 // block * block)


# ---- after things have gone


@every_reading
def test_text_is_equal_after_eviction(family: str) -> None:
    fork = (*BASE[:40], *prompt_of(30, 3))
    with engine(model_of(family), **SMALL) as core:
        for prompt in (BASE, fork):
            ask(core, prompt, 20)
        drain(core)
        while nodes := core.view.stats().nodes:
            while core.view.stats().nodes == nodes:
                shrink(core, 1)  # what windows need no more, then a leaf at a time
            recount(core)
            held = core.view.stats().held_tokens
            handles = [ask(core, prompt, 8) for prompt in (BASE, fork)]
            drain(core)
            check(family, *handles)
            while core.view.stats().held_tokens > held:
                shrink(core, 1)


@every_kind
def test_text_is_equal_under_mutual_eviction(family: str) -> None:
    """Memory holds one and a half prompts."""
    prompts = [tuple(prompt_of(70, seed)) for seed in (1, 2, 3)]
    with engine(model_of(family), **SMALL, max_kv_size=256) as core:
        probe = ask(core, BASE, 1)
        core.step()
        needed = core.view.stats().used_bytes
        probe.cancel()
        evict_all(core)
        core.set_limit(needed + 40 * core.view.token_bytes)
        for _ in range(2):
            handles = [ask(core, prompt, 12) for prompt in prompts]
            drain(core)
            check(family, *handles)
        assert core.view.stats().evicted_nodes >= 3


@pytest.mark.parametrize(("family", "steps"), each(KINDS, (1, 3, 12)))
def test_text_is_equal_after_preemption(family: str, steps: int) -> None:
    """One slot: a higher priority arrives during prefill and during decode."""
    with engine(model_of(family), **SMALL, max_batch_size=1) as core:
        low = ask(core, BASE, 30)
        drain(core, steps)
        high = ask(core, (*BASE[:40], *prompt_of(9, 3)), 10, priority=1)
        drain(core)
        check(family, low, high)
        assert core.view.stats().preemptions == 1
        assert cached(low) == 0, "its own work was counted as a hit"


@every_kind
def test_text_is_equal_after_preemption_for_other_request(family: str) -> None:
    """Four choices hold both slots when another request arrives, then a third."""
    with engine(model_of(family), **SMALL, max_batch_size=2) as core:
        four = ask(core, BASE, 40, n=4)
        drain(core, 5)
        others = [ask(core, prompt_of(9, seed), tokens) for seed, tokens in ((3, 60), (4, 5))]
        core.step()
        assert [core.admission.sequences[n].state for n in (0, 4)] == [State.RUNNING] * 2
        drain(core)
        check(family, four, *others)
        for choice in range(1, 4):
            assert answer(four, choice) == answer(four)
        assert 2 <= core.view.stats().preemptions <= 6


# ---- beside one that fails


def test_prompt_with_nan_fails_alone() -> None:
    """Its neighbor reads the valid first half of the node."""
    model = model_of("llama")
    embedding = model.model.embed_tokens
    weight = embedding.weight
    expected = plain_text("llama", BASE[:34], 10)
    bad = min({*range(9, 99)} - {*BASE, *(step.token for step in expected)})
    try:
        nowhere = mx.arange(weight.shape[0])[:, None] == bad
        embedding.weight = mx.where(nowhere, float("nan"), weight)
        with engine(model, block_size=16, prefill_chunk=64) as core:
            for _ in range(2):
                ill = ask(core, (*BASE[:40], *[bad] * 20), 10)
                well = ask(core, BASE[:34], 10)
                drain(core)
                with pytest.raises(PenstockError, match="NaN or infinity"):
                    answer(ill)
                check("llama", well)
    finally:
        embedding.weight = weight


# ---- crowds


@dataclass(frozen=True)
class Guest:
    """A request, its arrival step, and the number of steps until it is cancelled."""

    arrives: int
    prompt: tuple[int, ...]
    tokens: int
    leaves: int | None
    salt: str


def guests(dice: random.Random, count: int) -> list[Guest]:
    """Draw requests with common prefixes, the earliest last."""

    def one() -> Guest:
        own = prompt_of(dice.choice([1, 9, 16, 30]), dice.randint(5, 6))
        return Guest(
            dice.randint(0, 20),
            (*BASE[: dice.choice([0, 16, 17, 40, 64])], *own),
            dice.choice([1, 3, 17, 24]),
            dice.randint(1, 8) if dice.random() < 0.2 else None,
            dice.choice(["", "", "tenant"]),
        )

    return sorted((one() for _ in range(count)), key=lambda guest: guest.arrives, reverse=True)


def receive(
    core: Core, dice: random.Random, count: int, reference: Callable[[Guest], list[Step]]
) -> None:
    """Let requests arrive, cancel and preempt some, and compare all answers."""
    coming, here, now = guests(dice, count), [], 0
    while coming or not core.view.idle:
        while coming and coming[-1].arrives <= now:
            guest = coming.pop()
            here.append((guest, ask(core, guest.prompt, guest.tokens, salt=guest.salt)))
        for guest, handle in here:
            if guest.leaves is not None and now == guest.arrives + guest.leaves:
                handle.cancel()
        core.step()
        recount(core)
        for sequence in sequences_in(core, State.RUNNING):
            if dice.random() < 0.02:
                core.admission.preempt(sequence)
        now += 1
        assert now < 2_000, "somebody waits for ever"
    for guest, handle in here:
        said, expected = answer(handle), reference(guest)
        if guest.leaves is not None:
            expected = expected[: len(said)]
        assert_same(said, expected, f"{guest}")


@pytest.mark.parametrize(
    ("family", "places", "counts"),
    [
        *((family, 8, (11,)) for family in FAMILIES),
        ("llama", 1, (6,)),
        ("llama", 2, (8, 4)),
        ("llama", 16, (20, 8)),
        ("gemma3", 16, (16,)),
        ("gpt_oss", 3, (8, 4)),
    ],
)
def test_random_arrivals_match_plain(family: str, places: int, counts: tuple[int, ...]) -> None:
    """The second run starts with the tree of the first."""

    def reference(guest: Guest) -> list[Step]:
        return plain_text(family, guest.prompt, guest.tokens)

    with engine(model_of(family), **SMALL, max_batch_size=places) as core:
        for seed, count in enumerate(counts, start=places):
            receive(core, random.Random(seed), count, reference)


# ---- bounded windows


def bounded_text(
    family: str, prompt: tuple[int, ...], tokens: int, max_size: int, keep: int
) -> list[Step]:
    """Generate token by token in mlx-lm's loop with the same window rule."""

    def caches() -> list[Any]:
        return [
            theirs.RotatingKVCache(min(cache.max_size, max_size))
            if isinstance(cache, theirs.RotatingKVCache)
            else SinkRotatingKVCache(max_size, keep)
            for cache in theirs.make_prompt_cache(model_of(family))
        ]

    return told(family, prompt, tokens, caches, max_size, keep, chunk=1)


@pytest.mark.parametrize(
    ("family", "block_size", "prompt_tokens"), pairs(("llama", "gemma3"), (8, 32, 64), (10, 100))
)
def test_window_with_kept_tokens_matches_reference(
    family: str, block_size: int, prompt_tokens: int
) -> None:
    """Also with blocks longer than the window, so that nothing can be committed."""
    prompt = tuple(prompt_of(prompt_tokens))
    reference = bounded_text(family, prompt, 60, 24, 8)
    settings = {"max_kv_size": 24, "keep": 8, "block_size": block_size, "prefill_chunk": 64}
    with engine(model_of(family), **settings) as core:
        handle = ask(core, prompt, 60)
        drain(core)
        assert_same(answer(handle), reference, f"{family}, blocks of {block_size}")


def test_window_with_uncommitted_kept_tokens_matches_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tree is full: kept tokens stay in the sequence's own spans, and visible."""
    prompt = tuple(prompt_of(60))
    reference = bounded_text("llama", prompt, 40, 48, 12)
    settings = {"max_kv_size": 48, "keep": 12, "block_size": 8, "prefill_chunk": 16}
    with engine(model_of("llama"), **settings) as core:
        refused = lambda pin, blocks_done, *_: InsertResult(blocks_done, 0, "no room")  # noqa: E731
        monkeypatch.setattr(core.prefixes, "insert", refused)
        handle = ask(core, prompt, 40)
        drain(core)
        assert_same(answer(handle), reference, "nothing committed")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_windows_share_prefix(dtype: mx.Dtype) -> None:
    model = model_of("gemma3")
    model.set_dtype(dtype)
    try:
        shared = prompt_of(48)
        with engine(model, block_size=16, prefill_chunk=64) as core:
            handles = [ask(core, shared, 10), ask(core, shared + prompt_of(64, 3), 10)]
            drain(core)
            assert [len(answer(handle)) for handle in handles] == [10, 10]
    finally:
        model_of.cache_clear()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "gemma2", "gear", "deepseek_v3"])
def test_random_arrivals_with_windows_match_plain(family: str) -> None:
    """Sequences past their window release unseen blocks, but not those of others."""

    def reference(guest: Guest) -> list[Step]:
        return bounded_text(family, guest.prompt, guest.tokens, 48, 12)

    settings = {"max_kv_size": 48, "keep": 12, "block_size": 8, "prefill_chunk": 16}
    with engine(model_of(family), **settings, max_batch_size=4) as core:
        receive(core, random.Random(4), 7, reference)


def test_random_arrivals_with_windows_match_plain_in_little_memory() -> None:
    """Blocks cannot be committed, and cold ones are evicted all the time."""

    def reference(guest: Guest) -> list[Step]:
        return bounded_text("llama", guest.prompt, guest.tokens, 48, 12)

    settings = {"max_kv_size": 48, "keep": 12, "block_size": 8, "prefill_chunk": 16}
    with engine(model_of("llama"), **settings, max_batch_size=4) as core:
        core.set_limit(core.view.stats().used_bytes + 200 * core.view.token_bytes)
        receive(core, random.Random(4), 10, reference)
        assert core.view.stats().evicted_nodes > 0


# ---- sampling


WAYS = {
    "seeded": Sampling(temperature=0.9, seed=11),
    "filtered": Sampling(temperature=1.2, top_p=0.9, top_k=40, min_p=0.01, seed=-5),
    "penalized": Sampling(
        repetition_penalty=1.6,
        repetition_context=30,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={7: 2.0, 11: -3.0},
    ),
    "both": Sampling(temperature=0.8, repetition_penalty=1.3, seed=3),
}


@functools.cache
def drawn_text(family: str, prompt: tuple[int, ...], way: str, choice: int = 0) -> list[int]:
    """Sample 20 tokens in a plain loop on mlx-lm's caches by the same rule."""
    model, sampling = model_of(family), WAYS[way]
    caches = theirs.make_prompt_cache(model)
    sampler, drawn = TokenSampler(sampling, prompt, choice), list[int]()
    logits = model(mx.array([prompt]), cache=caches)[0, -1]
    while len(drawn) < 20:
        drawn.append(sampler.choose(logits, drawn).token)
        logits = model(mx.array([drawn[-1:]]), cache=caches)[0, -1]
    return drawn


@pytest.mark.parametrize(("way", "family"), each(tuple(WAYS), ("llama", "gemma3", "gemma2")))
def test_sampling_is_independent_of_batch_and_cache(family: str, way: str) -> None:
    """Cold, warm, batched, and after preemption."""
    sampling = WAYS[way]
    expected = drawn_text(family, BASE, way)
    with engine(model_of(family), **SMALL) as core:
        for _ in ("cold", "warm"):
            alone = ask(core, BASE, 20, sampling=sampling)
            drain(core)
            assert answer(alone) == expected
        others = [ask(core, BASE[:length], 20) for length in (70, 40, 33)]
        within = ask(core, BASE, 20, sampling=sampling)
        others.append(ask(core, BASE, 20, sampling=Sampling(temperature=1.0, seed=1)))
        drain(core, 8)
        for sequence in sequences_in(core, State.RUNNING):
            core.admission.preempt(sequence)
        drain(core)
        assert answer(within) == expected
        check(family, *others[:3])
        assert answer(others[3]) != expected


@every_kind
def test_choices_have_own_seeds_and_share_prefill(family: str) -> None:
    with engine(model_of(family), **SMALL) as core:
        handle = ask(core, BASE, 20, n=3, sampling=WAYS["seeded"])
        drain(core)
        texts = [answer(handle, choice) for choice in range(3)]
        assert texts == [drawn_text(family, BASE, "seeded", choice) for choice in range(3)]
        assert len(set(map(tuple, texts))) == 3
        assert core.view.stats().prefilled_tokens == 64 + 3 * 5


def test_different_or_missing_seeds_give_different_text() -> None:
    with engine(model_of("llama"), **SMALL) as core:
        handles = [
            ask(core, BASE, 20, sampling=Sampling(temperature=0.9, seed=seed))
            for seed in (11, 12, None, None)
        ]
        drain(core)
        texts = [tuple(answer(handle)) for handle in handles]
        assert list(texts[0]) == drawn_text("llama", BASE, "seeded")
        assert len(set(texts)) == 4


# ---- the seam


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_attach_leaves_plain_mlx_lm_unchanged(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, name = model_of(family), "scaled_dot_product_attention"
    module = importlib.import_module(type(model).__module__)
    plain = getattr(module, name)
    monkeypatch.setattr(module, name, getattr(plain, "__wrapped__", plain))

    def logits() -> mx.array:
        caches = theirs.make_prompt_cache(model)
        model(mx.array([BASE]), cache=caches)
        return model(mx.array([[5]]), cache=caches)

    before, untouched = logits(), set(vars(module))
    assert module.__name__ in attach(model)
    once = getattr(module, name)
    assert set(vars(module)) == untouched
    assert mx.array_equal(logits(), before), "a plain loop computes something else"
    assert module.__name__ in attach(model)
    assert getattr(module, name) is once, "attached twice"


@every_kind
def test_plain_mlx_lm_loop_works_while_engine_runs(family: str) -> None:
    model = model_of(family)
    with engine(model, **SMALL) as core:
        handle = ask(core, BASE, 20)
        drain(core, 8)
        beside = generate(model, BASE, theirs.make_prompt_cache(model), 20)
        drain(core)
        assert_same([step.token for step in beside], plain_text(family, BASE, 20), "beside")
        check(family, handle)


# ---- who may share what


def test_other_salts_and_fingerprints_share_nothing() -> None:
    with engine(model_of("llama"), **SMALL) as core:
        check_salts(core)
    assert prefixes.root_hash("model") != prefixes.root_hash("another")


def check_salts(core: Core) -> None:
    """Send the same request with three salts, concurrently and again."""
    for hits in (0, 64):
        handles = [ask(core, BASE, 12, salt=salt) for salt in ("", "a", "b")]
        drain(core)
        check("llama", *handles)
        assert [cached(handle) for handle in handles] == [hits] * 3


# ---- negative controls: an engine at work is broken in one way, and the comparison sees it


def work(core: Core, family: str) -> None:
    """Run cold, warm, branching and fully cached requests."""
    changed = (*BASE[:31], BASE[31] ^ 1, *BASE[32:])
    fork = (*BASE[:40], *prompt_of(20, 3))
    for prompts in ((BASE,), (BASE, changed, BASE[:64]), (fork, changed, BASE[:50])):
        handles = [ask(core, prompt, 24) for prompt in prompts]
        drain(core)
        check(family, *handles)


@every_kind
def test_check_accepts_correct_engine(family: str) -> None:
    with engine(model_of(family), **SMALL) as core:
        work(core, family)


Break = Callable[[pytest.MonkeyPatch], None]


def mask_with_extra_column(patch: pytest.MonkeyPatch) -> None:
    def mask(attention_window: AttentionWindow, queries: mx.array, columns: mx.array) -> mx.array:
        near = columns[None] > queries[:, None] - (attention_window.window or 10**6) - 1
        return (columns[None] <= queries[:, None]) & near

    patch.setattr(AttentionWindow, "mask", mask)


def window_one_token_too_long(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        AttentionWindow,
        "starts_at",
        lambda attention_window, p: max(0, p - (attention_window.window or 10**6)),
    )


def tail_dropped(patch: pytest.MonkeyPatch) -> None:
    real = DecodeStep.of

    def of(device: Any, rows: Any, tails: Any, *settings: Any) -> DecodeStep:
        for row in rows:
            if row.tail:
                tails.wipe(row.slot)
        return real(device, rows, tails, *settings)

    patch.setattr(DecodeStep, "of", of)


def full_tail_dropped(patch: pytest.MonkeyPatch) -> None:
    def cut(self: Any, slot: int, stop: int, behind: Segment | None = None) -> Segment:
        found = real(self, slot, stop, behind)
        return Segment(tuple((keys, mx.zeros_like(values)) for keys, values in found.layers))

    real = Tails.cut
    patch.setattr(Tails, "cut", cut)


def span_one_token_short(patch: pytest.MonkeyPatch) -> None:
    def pieces(part: KVSpan, nearest: int, keep: int) -> list[tuple[int, int]]:
        return [(part.start, part.end - 1)]

    patch.setattr("penstock.attention.attention_plan.visible_ranges", pieces)
    patch.setattr("penstock.attention.joined_reads.visible_ranges", pieces)


def slots_reversed(patch: pytest.MonkeyPatch) -> None:
    real = DecodeStep.of

    def of(device: Any, rows: Any, tails: Any, *settings: Any) -> DecodeStep:
        step = real(device, rows, tails, *settings)
        step.slots = step.slots[::-1]
        return step

    patch.setattr(DecodeStep, "of", of)


def positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    real = DecodeStep.of

    def of(device: Any, rows: Any, tails: Any, *settings: Any) -> DecodeStep:
        step = real(device, rows, tails, *settings)
        step.offset = step.offset + 1
        return step

    patch.setattr(DecodeStep, "of", of)


def block_hash_skips_token(patch: pytest.MonkeyPatch) -> None:
    def keys(tokens: Any, block_size: int, root: bytes) -> list[bytes]:
        blurred = list(map(int, tokens))
        for last in range(block_size - 1, len(blurred), block_size):
            blurred[last] = 0
        return real(blurred, block_size, root)

    real = prefixes.hash_blocks
    patch.setattr(prefixes, "hash_blocks", keys)
    patch.setattr(PrefixTree, "check", lambda tree: None)


def block_hash_without_parent(patch: pytest.MonkeyPatch) -> None:
    """Hash each block without its parent, so that later blocks of other prompts match."""

    def keys(tokens: Any, block_size: int, root: bytes) -> list[bytes]:
        starts = range(0, len(tokens) - block_size + 1, block_size)
        blocks = [list(tokens[at : at + block_size]) for at in starts]
        return [real(block, block_size, bytes(16))[0] for block in blocks]

    real = prefixes.hash_blocks
    patch.setattr(prefixes, "hash_blocks", keys)
    patch.setattr(PrefixTree, "check", lambda tree: None)


def sinks_dropped(patch: pytest.MonkeyPatch) -> None:
    real = span_attention.merged
    patch.setattr(span_attention, "merged", lambda parts, sinks=None: real(parts))


@pytest.mark.parametrize(
    ("family", "broken"),
    [
        ("gemma3", mask_with_extra_column),
        ("gemma3", window_one_token_too_long),
        ("llama", tail_dropped),
        ("llama", full_tail_dropped),
        ("gemma2", full_tail_dropped),
        ("llama", span_one_token_short),
        ("gemma2", span_one_token_short),
        ("llama", slots_reversed),
        ("llama", positions_off_by_one),
        ("llama", block_hash_skips_token),
        ("llama", block_hash_without_parent),
        ("gpt_oss", sinks_dropped),
    ],
)
def test_check_detects_broken_engine(
    family: str, broken: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core(model_of(family), memory_limit="400MB", **SMALL)
    broken(monkeypatch)
    with pytest.raises(AssertionError, match="which led by"):
        work(core, family)
    core.close()


def test_check_detects_wrong_block_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(model_of("llama"), memory_limit="400MB", **SMALL)
    check = PrefixTree.check
    block_hash_skips_token(monkeypatch)
    monkeypatch.setattr(PrefixTree, "check", check)
    with pytest.raises(AssertionError, match="do not name its tokens"):
        work(core, "llama")
    core.close()


def test_check_detects_ignored_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = prefixes.root_hash
    monkeypatch.setattr(prefixes, "root_hash", lambda fingerprint, salt: real(fingerprint))
    core = Core(model_of("llama"), memory_limit="400MB", **SMALL)
    with pytest.raises(AssertionError, match=r"\[0, 64, 64\]"):
        check_salts(core)
    core.close()


def test_check_detects_duplicate_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "catch_up", lambda self: None)
    with pytest.raises(AssertionError):
        test_simultaneous_requests_prefill_shared_prefix_once("llama")
