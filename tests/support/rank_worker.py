"""One rank of a group, over its part of a tiny model: `python rank_worker.py SCENARIO JSON`.

Every rank ends with a line of JSON: what it holds, and on rank 0 what was said. A scenario is
what rank 0 asks for; `on_rank` does something to one rank alone, which the others must survive.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import penstock  # noqa: F401 - before mlx: it loads a fast BLAS on a Linux CPU

import mlx.core as mx  # isort: skip

import tiny_families
from small_models import BASE, build

import penstock.engine.memory_pressure as pressure_module
import penstock.engine.run.executor as passes_module
from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.ranks.process_group import ProcessGroup, RankGroup
from penstock.engine.ranks.watch import Watch
from penstock.engine.request import Request, Sampling
from penstock.errors import PenstockError
from penstock.ledger import Kind

BLOCK = 8
SETTINGS: dict[str, Any] = {
    "memory_limit": "60MB",
    "block_size": BLOCK,
    "prefill_chunk": 32,
    "max_batch_size": 4,
    "max_kv_size": 512,
}
SOON = 10.0
"""For a disk."""


def main(scenario: str, told: dict[str, Any]) -> None:
    group = mx.distributed.init()
    ranks = RankGroup(group) if group.size() > 1 else None
    watch = None if ranks is None else Watch(ranks, gone)
    model = made(told.get("family", "llama"))
    if ranks is not None:
        divide(model, group, told)
    mx.eval(model.parameters())
    settings = {**SETTINGS, **told.get("settings", {})}
    rank = 0 if ranks is None else ranks.rank
    if "folder" in told:
        settings["ssd_cache_dir"] = str(Path(told["folder"]) / str(rank))
    settings["memory_limit"] = told.get("limits", {}).get(str(rank), settings["memory_limit"])
    pressure_module.PRESSURE_SECONDS = 0.0  # all look as often
    core = Core(model, group=ranks or ProcessGroup(), **settings)
    if core.tiers is not None:
        core.prefill_rate.prefill_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
    if told.get("on_rank", -1) == rank:
        HARMS[told["harm"]](core)
    found: dict[str, Any] = {"rank": rank}
    if rank == 0:
        found["said"] = SCENARIOS[scenario](core)
        found.update(held(core))
        core.close()
    else:
        before: dict[str, Any] = {}
        while not core.closed:
            before = held(core)
            core.step()
        found.update(before)
    core.view.check()
    found["weight_bytes"] = weight_bytes(model)
    if watch is not None:
        watch.close()
    sys.stdout.write(json.dumps(found) + "\n")  # in one piece, beside the others'
    sys.stdout.flush()


def divide(model: Any, group: mx.distributed.Group, told: dict[str, Any]) -> None:
    if not told.get("pipeline"):
        return model.shard(group)
    uneven = [1, len(model.layers) - 1] if told.get("uneven") else None
    return model.model.pipeline(group, split=uneven)


def gone(why: str) -> None:
    print(f"the group has ended: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def made(family: str) -> Any:
    """Return a random model in float32, the same on every rank."""
    if family != "llama":
        return tiny_families.build(family)
    mx.random.seed(3)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    size = {"num_hidden_layers": 2, "vocab_size": 96}
    return build({**BASE, **heads, **size, "model_type": family, "torch_dtype": "float32"})


def held(core: Core) -> dict[str, Any]:
    """Return what is cached; the ledger must be exact."""
    core.view.check()
    assert core.ledger.used_bytes <= core.ledger.limit_bytes
    by_kind = core.ledger.by_class()
    return {
        "node_bytes": by_kind[Kind.NODES],
        "tokens": core.view.stats().held_tokens,
        "limit_bytes": core.ledger.limit_bytes,
        "hit_tokens": core.counters.hit_tokens,
        "restored_tokens": core.counters.restored_tokens,
        "evicted_nodes": core.view.stats().evicted_nodes,
        "preemptions": core.counters.preemptions,
    }


# ---- what rank 0 asks for


def ask(core: Core, prompt: list[int], **more: Any) -> Handle:
    asked = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
    return core.submit(Request(**asked))


def run(core: Core) -> None:
    while core.step() or not core.view.idle:
        core.view.check()
    if core.tiers is not None:
        assert core.tiers.flush(SOON)


def answer(handle: Handle) -> list[list[int]]:
    return [choice.tokens for choice in handle.result(0.0)]


def texts(core: Core) -> list[Any]:
    """Prompts with common prefixes: alone, together, joining, and again."""
    prompts = [
        tiny_families.prompt_of(40) + tiny_families.prompt_of(9 + i, 5 + i) for i in range(4)
    ]
    said = []
    first = ask(core, prompts[0])
    run(core)
    said.append(answer(first))
    handles = [ask(core, prompt) for prompt in prompts[:2]]
    core.step()
    core.step()
    handles += [
        ask(core, prompt, n=2, sampling=Sampling(temperature=0.9, seed=4)) for prompt in prompts[2:]
    ]
    run(core)
    said += [answer(handle) for handle in handles]
    long = tiny_families.prompt_of(150, 9)
    for _ in range(2):
        handle = ask(core, long, max_tokens=20)
        run(core)
        said.append(answer(handle))
    return said


def soak(core: Core, requests: int = 1_000) -> list[Any]:
    """Many requests in little memory; some are cancelled, timed out or refused."""
    draw = random.Random(5)
    shared = [tiny_families.prompt_of(16 * (1 + i), 50 + i) for i in range(6)]
    open_handles: list[Handle] = []
    ends: dict[str, int] = {}
    for number in range(requests):
        prompt = [*draw.choice(shared), *tiny_families.prompt_of(1 + draw.randrange(24), number)]
        with suppress(PenstockError):
            more: dict[str, Any] = {"max_tokens": 1 + draw.randrange(12)}
            if draw.random() < 0.05:
                more["timeout_seconds"] = 0.001
            if draw.random() < 0.02:
                prompt = [*prompt, 10_000]  # a token that the model does not have
            if draw.random() < 0.2:
                more["sampling"] = Sampling(temperature=0.8, top_p=0.9)
            if draw.random() < 0.1:
                more["n"] = 2
            open_handles.append(ask(core, prompt, priority=draw.randrange(3), **more))
        if open_handles and draw.random() < 0.1:
            draw.choice(open_handles).cancel()
        if draw.random() < 0.01:
            core.clear()
        while len(open_handles) > 6:
            core.step()
            for handle in open_handles:
                handle.events()
            for handle in [h for h in open_handles if h.done]:
                for choice in handle.choices:
                    assert choice.finish is not None
                    ends[choice.finish.reason] = ends.get(choice.finish.reason, 0) + 1
                open_handles.remove(handle)
    run(core)
    core.clear()
    core.step()
    assert core.view.stats().held_tokens == 0
    return [ends]


def wait(core: Core) -> list[Any]:
    """Answer until ended."""
    print("ready", flush=True)
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if core.view.idle:
            ask(core, tiny_families.prompt_of(20), max_tokens=200)
        core.step()
    return []


def some(core: Core) -> list[Any]:
    return soak(core, 60)


SCENARIOS: dict[str, Callable[[Core], list[Any]]] = {
    each.__name__: each for each in (texts, soak, some, wait)
}


# ---- what happens to one rank


def nan_chunk_on_one_rank(core: Core) -> None:
    """The third chunk of one rank is NaN."""
    read, count = core.runner.prefill, iter(range(1_000_000))

    def spoilt(*args: Any, **more: Any) -> Any:
        chunk = read(*args, **more)
        if next(count) != 2:
            return chunk
        layers = [(keys * float("nan"), values) for keys, values in chunk.segment.layers]
        return type(chunk)(type(chunk.segment)(tuple(layers)), chunk.states)

    core.runner.prefill = spoilt  # type: ignore[method-assign]


def low_memory_on_one_rank(core: Core) -> None:
    """Other programs on one rank's machine use its memory."""
    pressure_module.bytes_over = lambda threshold: 4_000


def sampler_error_on_one_rank(core: Core) -> None:
    """The sampler of one rank raises."""
    count = iter(range(1_000_000))

    def failing(choose: Any) -> Any:
        def chosen(*given: Any) -> Any:
            found = choose(*given)
            return [ValueError("a bug"), *found[1:]] if next(count) == 1 else found

        return chosen

    for name in ("verified", "verified_greedy"):
        setattr(passes_module, name, failing(getattr(passes_module, name)))


def no_disk(core: Core) -> None:
    """One rank has lost its blocks."""
    assert core.tiers is not None
    core.tiers.tiers["disk"].tier.clear().result(SOON)


def out_of_memory_on_one_rank(core: Core) -> None:
    """One rank runs out of memory in the middle of a layer."""
    count = iter(range(1_000_000))
    decode = core.runner.decode

    def failing(*args: Any, **more: Any) -> Any:
        if next(count) == 5:
            raise MemoryError("no memory is left on this machine")
        return decode(*args, **more)

    core.runner.decode = failing  # type: ignore[method-assign]


def extra_request_on_one_rank(core: Core) -> None:
    """One rank runs a request that the others do not have."""
    ask(core, tiny_families.prompt_of(30))


HARMS: dict[str, Callable[[Core], None]] = {
    each.__name__: each
    for each in (
        nan_chunk_on_one_rank,
        low_memory_on_one_rank,
        sampler_error_on_one_rank,
        no_disk,
        out_of_memory_on_one_rank,
        extra_request_on_one_rank,
    )
}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
