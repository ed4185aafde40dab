"""Teacher forcing: a pass of many blocks matches a pass per block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from penstock.engine.core import Core
from penstock.engine.request import Request, Sampling
from penstock.kv.numpy_arrays import Floats
from penstock.models.loading import load
from penstock.models.mlx_lm import plain_caches, render
from penstock.recall import MODEL_PATH
from penstock_bench import evaluate as bench
from penstock_bench import forcing
from penstock_bench.cli.bench_options import ProgressLines
from penstock_bench.eval_load import EvalLoad, KVSetting
from penstock_bench.eval_texts import EvalPiece
from penstock_bench.forcing import BlockReads, Reading, Way
from penstock_bench.recall import dialogue
from support.engine_faults import model_of

BLOCK = 64
CODECS = ("4", "kivi4/turbo3", "k8v4", "turbo2.5")


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    _, tokenizer = load(MODEL_PATH)
    said = render(tokenizer, dialogue(5, tokens=700, facts=4).messages, answer=False)
    return said[: 10 * BLOCK + 17]  # more than one pass, and a rest


def way_of(setting: KVSetting, raw_first_tokens: int = 0, model: Any = None) -> Way:
    model = load(MODEL_PATH)[0] if model is None else model
    return bench._way(model, setting, EvalLoad(raw_first_tokens=raw_first_tokens))


def read(way: Way, tokens: Sequence[int], pass_tokens: int = forcing.PASS_TOKENS) -> Floats:
    """Return the log-probabilities after every token."""
    return Reading(way, pass_tokens).read(tokens)


def off(logs: Floats, wanted: Floats) -> float:
    """Return the KL divergence from the expected distribution at the worst position."""
    return float((np.exp(wanted) * (wanted - logs)).sum(axis=-1).max())


def shares(logs: Floats, wanted: Floats, raw: Floats) -> tuple[float, float]:
    """Return how far off log-probabilities are, as shares of what the codec loses on average: the
    mean of all positions, and the worst position.

    Two ways to compute the same keys differ by rounding, and so do a few codes that lie on the edge
    of a step: how many is up to the BLAS, and each is off by a whole step. The codec moves *all*
    numbers, by steps of the same size. So means are compared.
    """
    off_by_position = np.abs(logs - wanted).mean(axis=-1)
    loss = np.abs(raw - wanted).mean()
    return float(off_by_position.mean() / loss), float(off_by_position.max() / loss)


SAME, SAME_AT_WORST = 0.01, 0.5
"""What the shares are below where only rounding differs; a mistake is beyond both."""


def agree(logs: Floats, wanted: Floats, raw: Floats) -> bool:
    """Return whether only rounding differs, on average and at every position."""
    mean, worst = shares(logs, wanted, raw)
    return mean < SAME and worst < SAME_AT_WORST


def at_once(model: Any, tokens: Sequence[int]) -> Floats:
    """Return the logits of a text computed in one pass on mlx-lm's own caches."""
    return forcing.log_probabilities(model(mx.array([tokens]), cache=plain_caches(model))[0])


def test_full_precision_forcing_matches_single_pass(tokens: list[int]) -> None:
    way = way_of(KVSetting("raw"))
    wanted, coded = at_once(way.runner.model, tokens), read(way_of(KVSetting("8")), tokens)
    assert agree(read(way, tokens), wanted, coded)
    assert agree(read(way, tokens, BLOCK), wanted, coded)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("raw_first_tokens", [0, 100])
def test_multi_block_pass_matches_block_by_block(
    codec: str, raw_first_tokens: int, tokens: list[int]
) -> None:
    way = way_of(KVSetting(codec), raw_first_tokens)
    one, many = Reading(way, BLOCK), Reading(way)
    wanted, logs = one.read(tokens), many.read(tokens)
    raw = read(way_of(KVSetting("raw")), tokens)
    assert off(raw, wanted) > 1e-4, "the codec loses something"
    assert agree(logs, wanted, raw)
    at = np.abs(raw - wanted).mean(axis=-1).argmax()
    logs[at] = raw[at]
    assert not agree(logs, wanted, raw), "one position that is wrong is noticed"
    assert many.coded == one.coded
    assert many.coded[1] == 10 * BLOCK - (2 * BLOCK if raw_first_tokens else 0)


def test_windowed_multi_block_pass_matches_block_by_block(tokens: list[int]) -> None:
    for keep in (0, 70):
        way = way_of(KVSetting("4", 150, keep))
        wanted = read(way, tokens, BLOCK)
        raw = read(way_of(KVSetting("raw", 150, keep)), tokens)
        assert agree(read(way, tokens), wanted, raw)
        assert off(read(way_of(KVSetting("4")), tokens), wanted) > 1e-2


def test_check_detects_block_reading_its_own_codes(
    tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the error is far above the rounding that other tests allow."""
    way = way_of(KVSetting("4"))
    wanted, raw = read(way, tokens, BLOCK), read(way_of(KVSetting("raw")), tokens)
    rounded = BlockReads.joined

    def coded(self: BlockReads, *window: Any) -> Any:
        *own, columns = rounded(self, *window)
        return *(mx.round(side * 4) / 4 for side in own), columns

    monkeypatch.setattr(BlockReads, "joined", coded)
    assert shares(read(way, tokens), wanted, raw)[0] > 0.5


@pytest.mark.parametrize("family", ["falcon_h1", "gemma2"])
def test_forcing_supports_recurrent_and_custom_attention_models(
    family: str, tokens: list[int]
) -> None:
    """Recurrent layers resume from states; custom attention takes a block per pass."""
    model = model_of(family)
    few = [token % 40 for token in tokens[: 3 * BLOCK + 9]]
    full, coded = (way_of(KVSetting(codec), model=model) for codec in ("raw", "turbo4"))
    wanted = at_once(model, few)
    for pass_tokens in (BLOCK, forcing.PASS_TOKENS):
        assert np.abs(read(full, few, pass_tokens) - wanted).max() < 1e-3
    lossy = read(coded, few, BLOCK)
    assert agree(read(coded, few), lossy, wanted)
    assert np.abs(lossy - wanted).max() > 5e-3


@pytest.mark.parametrize("codec", ["4", "kivi4/turbo3"])
def test_teacher_forcing_matches_engine(codec: str, tokens: list[int]) -> None:
    """The engine decodes after the same codes; full precision is far from both."""
    model, tokenizer = load(MODEL_PATH)
    settings = EvalLoad(raw_first_tokens=64).engine(KVSetting(codec))
    core = Core(model, tokenizer, prefill_chunk=64, **settings)
    try:
        for _ in range(2):  # the second one finds all whole blocks coded
            sampling = Sampling(logprobs=True, top_logprobs=20)
            handle = core.submit(Request(prompt=tuple(tokens), max_tokens=1, sampling=sampling))
            bench.drain(core)
    finally:
        core.close()
    (token,) = handle.result(0.0)[0].logprobs

    def worst(logs: Floats) -> float:
        return max(abs(float(logs[-1, number]) - log) for number, log in token.top)

    far = worst(read(way_of(KVSetting("raw")), tokens))
    assert far > 5e-2
    assert worst(read(way_of(KVSetting(codec), 64), tokens)) < min(1e-2, SAME * far)


def test_interrupt_keeps_results_of_finished_pieces(tokens: list[int]) -> None:
    ways = [way_of(KVSetting("raw")), way_of(KVSetting("4"))]
    text = [EvalPiece(tuple(tokens[:128]), (True,) * 128)] * 3
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == 4:  # raw has read the second piece
            raise KeyboardInterrupt

    whole = forcing.force(ways, text[:1], BLOCK, lambda: None)
    cut = forcing.force(ways, text, BLOCK, step)
    assert cut == whole
    assert len(cut[1].kl) == 1 and len(cut[1].kl[0]) == 127 and sum(cut[1].kl[0]) > 0
    steps = 3
    with pytest.raises(KeyboardInterrupt):  # nothing was read
        forcing.force(ways, text, BLOCK, step)


def test_progress_is_logged_once_a_minute() -> None:
    now, lines = 0.0, list[str]()
    tell = ProgressLines(lines.append, lambda: now)
    for done in range(10):
        tell("reading", done, 10)
        now += 25.0
    assert lines == [
        "reading: 30%, about 3 min left",
        "reading: 60%, about 2 min left",
        "reading: 90%, about 0 min left",
    ]
