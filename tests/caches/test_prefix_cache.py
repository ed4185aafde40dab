"""PrefixCache: longest shared prefix, stored once, fetched as copies, within the limit."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.server
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as theirs

from penstock import KVCache, PrefixCache, QuantizedKVCache, RotatingKVCache, make_kv_cache
from penstock.errors import SettingError
from penstock.prefix import PrefixCounts
from penstock.recall import MODEL_PATH
from penstock_bench.recall import dialogue

BLOCK = 16


@pytest.fixture(scope="module")
def loaded() -> Any:
    return mlx_lm.load(str(MODEL_PATH))


def tokens_of(loaded: Any, seed: int = 1, tokens: int = 400) -> list[int]:
    told = dialogue(seed, tokens=tokens, facts=6)
    return list(
        loaded[1].apply_chat_template(told.ask(told.questions[0]), add_generation_prompt=True)
    )


def text(model: Any, prompt: list[int], caches: list[Any]) -> list[int]:
    steps = generate_step(mx.array(prompt), model, prompt_cache=caches, max_tokens=12)
    return [int(token) for token, _ in steps]


FORMS = {
    "mlx-lm's": theirs.make_prompt_cache,
    "growing": lambda model: [KVCache() for _ in model.layers],
    "windows": lambda model: make_kv_cache(model, max_kv_size=2_048, keep=16, capacity=500),
    "quantized windows": lambda model: make_kv_cache(model, 2_048, 16, kv_bits=8),
}


@pytest.mark.parametrize("form", FORMS)
def test_text_after_hit_matches_cold(loaded: Any, form: str) -> None:
    """Equal, shorter, longer and partly common prompts, for every supported class."""
    model, _ = loaded
    first = tokens_of(loaded)
    prefix = PrefixCache("50MB", block_size=BLOCK)
    caches = FORMS[form](model)
    said = text(model, first, caches)
    assert prefix.store([*first, *said], caches).refused is None
    prefix.check()
    other = tokens_of(loaded, seed=2)
    prompts = {
        "equal": first,
        "longer": [*first, *said, *other[:40]],
        "shorter": first[:201],
        "partly common": [*first[:150], *other[:60]],
    }
    for name, prompt in prompts.items():
        caches, rest = prefix.fetch(prompt, capacity=len(prompt) + 12)
        assert caches is not None, name
        assert 0 < len(rest) <= BLOCK + 60, name
        assert type(caches[0]) is type(FORMS[form](model)[0])
        cold = text(model, prompt, FORMS[form](model))
        assert text(model, rest, caches) == cold, name
        if hasattr(caches[0], "growths"):
            assert caches[0].growths == 0
        prefix.check()


def test_wrong_prefix_changes_text(loaded: Any) -> None:
    """Negative control: another prompt's KV is stored under this prompt."""
    model, _ = loaded
    prompt, other = tokens_of(loaded), tokens_of(loaded, seed=3)
    caches = theirs.make_prompt_cache(model)
    cold = text(model, prompt, caches)
    wrong = theirs.make_prompt_cache(model)
    text(model, other, wrong)
    prefix = PrefixCache("50MB", block_size=BLOCK)
    prefix.store(prompt, wrong)
    caches, rest = prefix.fetch(prompt)
    assert text(model, rest, caches) != cold


def test_fetched_caches_are_writable_copies(loaded: Any) -> None:
    model, _ = loaded
    prompt = tokens_of(loaded)
    prefix = PrefixCache("50MB", block_size=BLOCK)
    caches = theirs.make_prompt_cache(model)
    cold = text(model, prompt, caches)
    prefix.store(prompt, caches)
    for _ in range(3):
        caches, rest = prefix.fetch(prompt)
        assert text(model, rest, caches) == cold
        for layer in caches:
            layer.keys[...] = 7.0
            mx.eval(layer.keys)


def marked(tokens: list[int], kind: Any = KVCache) -> list[Any]:
    """Return two layers whose keys are the token numbers."""
    keys = mx.array(tokens, dtype=mx.float32).reshape(1, 1, -1, 1)
    caches = [kind(), kind()]
    for cache in caches:
        cache.update_and_fetch(keys, keys)
        mx.eval(cache.keys, cache.values)
    return caches


def read_off(caches: list[Any]) -> list[int]:
    sides = [side for cache in caches for side in cache.keys_and_values()]
    rows = {tuple(side[0, 0, :, 0].tolist()) for side in sides}
    assert len(rows) == 1, "layers or sides differ"
    return [int(token) for token in rows.pop()]


TOKEN_BYTES = 2 * 2 * 4


def test_conversation_is_stored_once() -> None:
    """Ten turns, each stored whole: mlx-lm's server would hold 5.5 times as much."""
    prefix = PrefixCache("10MB", block_size=BLOCK)
    turns = list(range(1_600))
    for end in range(160, 1_601, 160):
        stored = prefix.store(turns[:end], marked(turns[:end]))
        assert (stored.new_tokens, stored.held_tokens) == (160, end)
    assert sum(node.segment.nbytes for node in prefix.tree) == 1_600 * TOKEN_BYTES
    assert prefix.store(turns, marked(turns)).new_tokens == 0
    prefix.check()


def test_counts_match_hits_stores_and_evictions() -> None:
    prefix = PrefixCache("1MB", block_size=BLOCK)
    prompt = list(range(100))
    assert prefix.fetch(prompt)[0] is None
    prefix.store(prompt, marked(prompt))
    prefix.store(prompt, marked(prompt))
    prefix.fetch(prompt[:50])
    prefix.store(prompt, [KVCache()])
    assert prefix.counts == PrefixCounts(hits=1, fetched_tokens=48, stored_tokens=96, refused=1)
    prefix.clear()
    assert (prefix.counts.evicted_nodes, prefix.counts.evicted_bytes) == (1, 96 * TOKEN_BYTES)
    assert PrefixCounts() == PrefixCounts(0, 0, 0, 0, 0, 0, 0)


def test_mlx_memory_stays_within_limit() -> None:
    prefix = PrefixCache(400_000, block_size=BLOCK)
    before = mx.get_active_memory()
    for start in range(0, 100_000, 2_000):
        prompt = list(range(start, start + 2_000))
        caches = marked(prompt)
        mx.reset_peak_memory()
        own = mx.get_active_memory()
        assert prefix.store(prompt, caches).refused is None
        del caches
        assert prefix.nbytes <= 400_000
        assert mx.get_peak_memory() - own <= 400_000
        prefix.check()
    assert prefix.counts.evicted_nodes > 30
    assert mx.get_active_memory() - before <= 400_000
    prefix.clear()
    assert (len(prefix), prefix.nbytes) == (0, prefix.prefixes.fixed_bytes)
    assert mx.get_active_memory() - before <= 4_096


def test_oversized_entry_is_refused_without_eviction() -> None:
    prefix = PrefixCache(100_000, block_size=BLOCK)
    small = list(range(1_000))
    prefix.store(small, marked(small))
    large = list(range(5_000, 15_000))
    stored = prefix.store(large, marked(large))
    assert stored.new_tokens == 0
    assert "do not fit in the limit of 100" in str(stored.refused)
    assert read_off(prefix.fetch([*small, 1])[0] or []) == small[: 1_000 - 1_000 % BLOCK]
    assert prefix.counts.evicted_nodes == 0


def test_tenants_are_isolated() -> None:
    prefix = PrefixCache("1MB", block_size=BLOCK)
    prompt = list(range(100))
    prefix.store(prompt, marked(prompt), salt="a")
    assert prefix.fetch(prompt, salt="b")[0] is None
    told = prefix.explain([*prompt[:20], 7, 7, 7], salt="b")
    assert (told.held_tokens, told.diverges_at, told.held_token) == (0, None, None)
    assert prefix.explain([*prompt[:20], 7, 7, 7], salt="a").diverges_at == 20


def of_shape(
    kind: Any = KVCache,
    *,
    rows: int = 1,
    heads: int = 2,
    dims: tuple[int, int] = (32, 32),
    dtype: mx.Dtype = mx.float32,
    layers: int = 2,
) -> list[Any]:
    """Caches of 100 tokens."""
    caches = [kind() for _ in range(layers)]
    for cache in caches:
        cache.update_and_fetch(*(mx.ones((rows, heads, 100, dim)).astype(dtype) for dim in dims))
    return caches


def miscounted(kind: Any, offset: int) -> list[Any]:
    """Return caches of 100 tokens of which the second has another offset."""
    caches = marked(list(range(100)), kind)
    caches[1].offset = offset
    return caches


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"heads": 4}, "layer 0 is a KVCache .4 heads of 32.*, not a KVCache .2 heads of 32"),
    "key width": ({"dims": (64, 32)}, "2 heads of 64, 2 heads of 32"),
    "value width": ({"dims": (32, 64)}, "2 heads of 32, 2 heads of 64"),
    "dtype": ({"dtype": mx.float16}, "float16"),
    "integers": ({"dtype": mx.int32}, "int32"),
    "layers": ({"layers": 3}, "3 layers with keys and values, not 2"),
    "class": ({"kind": lambda: QuantizedKVCache(32, 8)}, "a QuantizedKVCache"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_incompatible_caches_on_one_path_are_refused(other: str) -> None:
    """Caches of 2 and of 4 heads on one path would make later fetches fail."""
    prefix = PrefixCache("1MB", block_size=BLOCK)
    prompt = list(range(100))
    assert prefix.store(prompt[:64], of_shape()).refused is None
    changes, words = OTHERS[other]
    assert re.search(words, str(prefix.store(prompt, of_shape(**changes)).refused))
    assert prefix.store(prompt, of_shape()).held_tokens == 96
    caches, rest = prefix.fetch(prompt)
    assert caches is not None
    assert len(rest) == 4
    assert {cache.keys.shape[1] for cache in caches} == {2}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.int32, mx.uint8])
def test_all_dtypes_are_stored_and_fetched(dtype: mx.Dtype) -> None:
    prefix = PrefixCache("1MB", block_size=BLOCK)
    prompt = list(range(100))
    caches = of_shape(dtype=dtype)
    assert prefix.store(prompt, caches).refused is None
    revived, _ = prefix.fetch(prompt)
    assert revived is not None
    assert mx.array_equal(revived[0].keys_and_values()[0], caches[0].keys[:, :, :96])
    assert revived[0].keys.dtype == dtype


@pytest.mark.parametrize("limit", [1.5, None, True, [], b"1GB", 0, -1, float("nan")])
def test_invalid_memory_limit_is_refused(limit: Any) -> None:
    with pytest.raises(SettingError, match="memory_limit must be a whole number of bytes"):
        PrefixCache(limit)


@pytest.mark.parametrize("size", [0, "32", 1.5])
def test_invalid_block_size_is_refused(size: Any) -> None:
    with pytest.raises(SettingError, match="block_size must be"):
        PrefixCache("1MB", block_size=size)


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        (
            lambda: marked(list(range(100)), lambda: RotatingKVCache(50)),
            "window of 50 tokens has wrapped around",
        ),
        (lambda: [theirs.ArraysCache(2)], "a recurrent layer's cache is empty"),
        (lambda: [KVCache()], "layer 0 is empty"),
        (lambda: [KVCache.merge(marked(list(range(100))))], "BatchKVCache holds a batch"),
        *(
            (
                functools.partial(miscounted, kind, offset),
                rf"layer 1: .*offset of {offset:,} tokens",
            )
            for kind in (KVCache, theirs.KVCache)
            for offset in (-3, -100, 1_025)
        ),
        (lambda: of_shape(rows=2), "layer 0: KVCache holds 2 rows"),
        (lambda: of_shape(theirs.KVCache, rows=3), "layer 0: KVCache holds 3 rows"),
        (lambda: of_shape(lambda: QuantizedKVCache(32, 8), rows=2), "holds 2 rows"),
    ],
)
def test_caches_without_sliceable_kv_are_refused_with_reason(caches: Any, reason: str) -> None:
    prefix = PrefixCache("1MB", block_size=BLOCK)
    stored = prefix.store(list(range(100)), caches())
    assert re.search(reason, str(stored.refused))
    assert len(prefix) == 0


def test_caches_of_other_classes_are_refused() -> None:
    prefix = PrefixCache("1MB", block_size=BLOCK)
    prompt = list(range(100))
    prefix.store(prompt, marked(prompt))
    assert "differ in class" in str(prefix.store(prompt, marked(prompt, theirs.KVCache)).refused)


@pytest.mark.parametrize(
    ("asked", "held", "diverges_at", "reason"),
    [
        (list(range(96)), 96, None, "all whole blocks"),
        ([*range(70), 5, 5, *range(72, 100)], 64, 70, "token 70 differs"),
        ([5, *range(1, 100)], 0, 0, "token 0 differs"),
        (list(range(200)), 96, None, "never cached"),
    ],
)
def test_explain_reports_divergence_and_reason(
    asked: list[int], held: int, diverges_at: int | None, reason: str
) -> None:
    prefix = PrefixCache("1MB", block_size=BLOCK)
    assert prefix.explain(asked).reason == "the cache is empty: all of this prompt is new"
    prefix.store(list(range(100)), marked(list(range(100))))
    told = prefix.explain(asked)
    assert (told.held_tokens, told.diverges_at) == (held, diverges_at)
    assert reason in told.reason
    if diverges_at is not None:
        assert (told.held_token, told.given_token) == (diverges_at, 5)


def test_implements_mlx_lm_server_cache_methods() -> None:
    used = set(re.findall(r"self\.prompt_cache\.(\w+)", inspect.getsource(mlx_lm.server)))
    assert {"fetch_nearest_cache", "insert_cache"} <= used
    assert [name for name in used if not hasattr(PrefixCache, name)] == []
    prefix = PrefixCache("1MB", block_size=BLOCK)
    prompt = list(range(100))
    assert prefix.fetch_nearest_cache(("model", None), prompt) == (None, prompt)
    prefix.insert_cache(("model", None), prompt, marked(prompt), cache_type="user")
    caches, rest = prefix.fetch_nearest_cache(("model", None), prompt)
    assert (read_off(caches or []), rest) == (prompt[:96], prompt[96:])
    assert prefix.fetch_nearest_cache(("other", None), prompt)[0] is None
    assert prefix.stats_by_type() == {
        "prefixes": {"n_sequences": len(prefix), "n_bytes": prefix.nbytes}
    }
    prefix.trim_to(n_sequences=0)
    assert (len(prefix), prefix.nbytes) == (0, prefix.prefixes.fixed_bytes)


class Machine(RuleBasedStateMachine):
    """Random prompts over two tokens, so that prefixes are shared, against all prompts stored."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.prefix = PrefixCache(22_000, block_size=2, clock=self.clock)
        self.stored: list[list[int]] = []

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)

    @rule(prompt=prompts)
    def store(self, prompt: list[int]) -> None:
        done = self.prefix.store(prompt, marked(prompt))
        if done.refused is None:
            assert done.held_tokens == len(prompt) - len(prompt) % 2
            self.stored.append(prompt)

    @rule(prompt=prompts)
    def fetch(self, prompt: list[int]) -> None:
        promised = self.prefix.explain(prompt[:-1]).held_tokens
        caches, rest = self.prefix.fetch(prompt)
        count = len(prompt) - len(rest)
        assert rest and count == promised
        if caches is None:
            assert count == 0
            return
        assert read_off(caches) == prompt[:count]
        assert any(old[:count] == prompt[:count] for old in self.stored)
        for cache in caches:
            cache.keys[...] = -1.0
            mx.eval(cache.keys)

    @rule()
    def shrink(self) -> None:
        self.prefix.trim_to(n_bytes=self.prefix.nbytes // 2)

    @invariant()
    def counts_are_right(self) -> None:
        self.prefix.check()
        assert self.prefix.nbytes <= 22_000
        assert self.prefix.tree.pins == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
