"""With an active codec an answer is independent of what was cached."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cold_engine
import mlx.core as mx
import pytest
from cold_engine import files, settle, ssd
from combinations import pairs
from core_parts import cached_match, hash_prompt

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Sampling
from penstock.kv import columns as col
from penstock.kv.segment import Segment
from penstock_bench.models import LlamaShape, ModelChoice, bench_model

SHAPE = LlamaShape(
    layers=3, hidden_size=128, intermediate_size=128, query_heads=4, kv_heads=2, head_dim=64
)
NEW = 12
SUMS = 1e-4
"""By which the order of a sum may change a log-probability; 4 bits change it by 0.05 and more."""
FLIPS = 1e-2
"""By which some codes may that are rounded the other way: generated tokens are computed one at a
time, and together where they are read again."""


@dataclass(frozen=True)
class Case:
    """Engine settings that decide which tokens are read quantized."""

    codec: str
    block_size: int
    chunk: int
    first_tokens: int
    least_tokens: int


CASES = [
    Case(*values)
    for values in pairs(
        ("turbo4", "k8v4", "kivi4/turbo3.5", "raw/4"),
        (24, 64, 128),
        (16, 96, 512),
        (0, 100),
        (0, 150),
    )
    if values[1] % 64 == 0 or not values[0].startswith("kivi")
]


@functools.cache
def model() -> Any:
    return bench_model(ModelChoice.RANDOM, SHAPE).model


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    drawn: list[int] = mx.random.randint(0, 512, (tokens,), key=mx.random.key(seed)).tolist()
    return tuple(drawn)


ASKED = prompt(384)
"""A whole number of blocks of every size."""
SHORT = ASKED[:333]
BRANCH = (*ASKED[:230], *prompt(70, 1))


pytestmark = pytest.mark.usefixtures("patient")


@contextmanager
def engine(case: Case, folder: Path | None = None, **settings: Any) -> Iterator[Core]:
    given = {
        "block_size": case.block_size,
        "prefill_chunk": case.chunk,
        "kv_cache_quantization": case.codec,
        "kv_cache_raw_first_tokens": case.first_tokens,
        "kv_cache_min_quantize_tokens": case.least_tokens,
        "kv_cache_quantize_when": "active",
        **settings,
    }
    with cold_engine.running(folder, model=model(), **given) as core:
        yield core


def submit(core: Core, tokens: Sequence[int]) -> Handle:
    sampling = Sampling(logprobs=True, top_logprobs=2)
    return cold_engine.submit(core, tokens, max_tokens=NEW, sampling=sampling)


Said = list[tuple[int, float, float]]
"""Tokens, how likely each was, and how much likelier than the next one."""


def said(handle: Handle) -> Said:
    (found,) = handle.result(0.0)
    return [
        (token, each.logprob, each.top[0][1] - each.top[1][1])
        for token, each in zip(found.tokens, found.logprobs, strict=True)
    ]


def ask(core: Core, tokens: Sequence[int]) -> Said:
    handle = submit(core, tokens)
    settle(core)
    return said(handle)


def same(found: Said, expected: Said, within: float = SUMS) -> None:
    for at, ((token, logprob, _), (wanted, likely, gap)) in enumerate(
        zip(found, expected, strict=True)
    ):
        if token != wanted:
            assert gap < within, f"token {at}: {token} and not {wanted}, {gap} likelier"
            return
        assert abs(logprob - likely) < within, f"token {at}: {logprob} and not {likely}"


def blocks(core: Core, tokens: Sequence[int]) -> list[list[bytes]]:
    """Return the bytes of every whole block before a prompt's last token."""
    size, found = core.limits.block_size, []
    for node in cached_match(core, list(tokens)).path:
        for at in range(0, len(node.tokens), size):
            layers = Segment.views(node.segment.layers, at, at + size).layers
            found.append([bytes(mx.contiguous(a)) for pair in layers for a in col.arrays(*pair)])
    return found[: (len(tokens) - 1) // size]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantized_text_is_equal_cold_warm_restored_and_after_damage(
    case: Case, tmp_path: Path
) -> None:
    with engine(case) as core:
        expected = ask(core, ASKED)
        held = blocks(core, ASKED)
    with engine(case) as core:
        branch = ask(core, BRANCH)
    turn = (*ASKED, *(token for token, _, _ in expected), *prompt(40, 2))
    with engine(case) as core:
        later = ask(core, turn)
    with engine(case, tmp_path) as core:
        for tokens, wanted in ((BRANCH, branch), (SHORT, None), (ASKED, expected)):
            found = ask(core, tokens)
            if wanted is not None:
                same(found, wanted)
        assert blocks(core, ASKED) == held, "they are the same to the bit"
        assert core.view.stats().hit_tokens > 0
        same(ask(core, ASKED), expected)
        together = [submit(core, tokens) for tokens in (ASKED, BRANCH, ASKED)]
        settle(core)
        for handle, wanted in zip(together, (expected, branch, expected), strict=True):
            same(said(handle), wanted)
        same(ask(core, turn), later, FLIPS)
    with engine(case, tmp_path) as core:
        same(ask(core, ASKED), expected)
        assert blocks(core, ASKED) == held
        assert core.view.stats().restored_tokens == len(held) * case.block_size
        key = hash_prompt(core, list(ASKED))[len(held) // 2]
    (damaged,) = [file for file in files(tmp_path) if key.hex() in file.name]
    raw = bytearray(damaged.read_bytes())
    raw[-50] ^= 1
    damaged.write_bytes(raw)
    with engine(case, tmp_path) as core:
        same(ask(core, ASKED), expected)
        assert blocks(core, ASKED) == held
        assert ssd(core).counts.damaged_blocks == 1
        same(ask(core, turn), later, FLIPS)
