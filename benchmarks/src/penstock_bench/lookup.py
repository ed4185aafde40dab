"""`penstock bench lookup`: time to find the cached prefix of a prompt."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock import config
from penstock.plurals import counted
from penstock.prefix import Node, PrefixTree, hash_blocks, root_hash
from penstock_bench import rivals
from penstock_bench.blank import Blank
from penstock_bench.report import Line, Report

CLAIM = "A look-up is linear in the prompt, whatever the tree looks like"
RIVAL = "mlx-lm"
VOCABULARY = 150_000


@dataclass(frozen=True, slots=True)
class LookupLoad:
    """Sizes of prompts and trees."""

    prompt_tokens: int = 131_072
    block_size: int = config.BLOCK_SIZE
    branches: int = 256
    branch_tokens: int = 256
    path_nodes: int = 1_000
    early_tokens: int = 10
    """Length of the shared prefix in the last shape, in tokens."""
    rounds: int = 15
    rival_rounds: int = 1
    """Rounds of mlx-lm, which takes many seconds for the last shape."""


@dataclass(frozen=True, slots=True)
class LookupShape:
    """Stored prompts, and one to look up."""

    name: str
    stored: Sequence[list[int]]
    piece_tokens: int
    """Maximum tokens of a node, as if committed by separate prefills."""
    prompt: list[int]
    known_tokens: int
    """Tokens of the prompt that are stored."""


class BlankCache:
    """Cache without arrays, with the methods that mlx-lm's prompt cache calls."""

    nbytes = 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        return tokens


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of all rounds of one shape, and the cached tokens."""

    found_tokens: int
    round_ms: Sequence[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.round_ms)

    @property
    def worst_ms(self) -> float:
        return max(self.round_ms)


def shapes(load: LookupLoad) -> list[LookupShape]:
    """Return the shapes: prompts of random tokens, deterministic."""
    draw = random.Random(0)

    def some(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    size = load.block_size
    prompt = some(load.prompt_tokens - load.prompt_tokens % size)
    common = prompt[: len(prompt) - load.branch_tokens]
    branches = [common + some(load.branch_tokens) for _ in range(load.branches)]
    blocks = len(prompt) // size
    piece = size * max(1, blocks // load.path_nodes)
    early = prompt[: load.early_tokens] + some(len(prompt) - load.early_tokens)
    return [
        LookupShape("all of it known", [prompt], len(prompt), prompt, len(prompt)),
        LookupShape(
            f"a common prefix, {load.branches} branches",
            branches,
            len(prompt),
            common + some(load.branch_tokens),
            len(common) - len(common) % size,
        ),
        LookupShape(
            f"a path of {counted(-(-len(prompt) // piece), 'node')}",
            [prompt],
            piece,
            prompt,
            len(prompt),
        ),
        LookupShape(
            f"another prompt after token {load.early_tokens}", [prompt], len(prompt), early, 0
        ),
    ]


def our_lookup(shape: LookupShape, block_size: int) -> Callable[[], int]:
    """Store the shape in a tree; return a look-up that counts the cached tokens."""
    root = root_hash("lookup")
    tree: PrefixTree[Blank] = PrefixTree(block_size)
    for tokens in shape.stored:
        block_hashes = hash_blocks(tokens, block_size, root)
        match = tree.match(block_hashes)
        node: Node[Blank] | None = match.path[-1] if match.path else None
        if node is not None and match.ends_inside:
            node = tree.split(node, match.blocks_in_last)
        for start in range(match.tokens, len(block_hashes) * block_size, shape.piece_tokens):
            end = min(start + shape.piece_tokens, len(block_hashes) * block_size)
            node_hashes = block_hashes[start // block_size : end // block_size]
            node = tree.insert(node, node_hashes, tokens[start:end], Blank(end - start), 0.0)

    def look_up() -> int:
        return tree.match(hash_blocks(shape.prompt, block_size, root)).tokens

    return look_up


def their_lookup(shape: LookupShape) -> Callable[[], int]:
    """Do the same with mlx-lm's prompt cache.

    It stores whole prompts, and drops prompts that are prefixes of longer ones, so a path of many
    nodes is a single entry.
    """
    cache = rivals.LRUPromptCache(max_size=len(shape.stored) + 1)
    for tokens in shape.stored:
        cache.insert_cache("model", tokens, [BlankCache()])

    def look_up() -> int:
        _, rest = cache.fetch_nearest_cache("model", shape.prompt)
        return len(shape.prompt) - len(rest)

    return look_up


def timed(look_up: Callable[[], int], rounds: int) -> Times:
    """Time `look_up` for `rounds` rounds, after a warm-up if there are several."""
    gc.collect()
    if rounds > 1:
        look_up()
    found_tokens, round_ms = 0, []
    for _ in range(rounds):
        began = time.perf_counter()
        found_tokens = look_up()
        round_ms.append(1e3 * (time.perf_counter() - began))
    return Times(found_tokens, round_ms)


def measure(load: LookupLoad) -> Report:
    """Look up every shape in our tree and in mlx-lm's cache."""
    times: dict[str, dict[str, Times]] = {}
    for shape in shapes(load):
        ours = timed(our_lookup(shape, load.block_size), load.rounds)
        if ours.found_tokens != shape.known_tokens:
            raise AssertionError(f"{shape.name}: {ours.found_tokens} of {shape.known_tokens} found")
        times[shape.name] = {
            "penstock": ours,
            RIVAL: timed(their_lookup(shape), load.rival_rounds),
        }
    return report(load, times)


def report(load: LookupLoad, times: dict[str, dict[str, Times]]) -> Report:
    """Judge the slowest round of the slowest shape."""
    goal = {"worst_ms": 10.0}
    worst = {side: max(of[side].worst_ms for of in times.values()) for side in ("penstock", RIVAL)}
    return Report(
        name="lookup",
        claim=CLAIM,
        rival=RIVAL,
        penstock=_figures(times, "penstock"),
        rival_figures=_figures(times, RIVAL),
        ratio={
            "worst_ms": round(worst[RIVAL] / worst["penstock"], 3),
            **{
                shape: round(of[RIVAL].median_ms / of["penstock"].median_ms, 3)
                for shape, of in times.items()
            },
        },
        goal=goal,
        met=worst["penstock"] < goal["worst_ms"],
        lines=[
            *(_line(f"{shape}: median ms", of, "median_ms") for shape, of in times.items()),
            Line(
                "worst of all, ms",
                f"{worst['penstock']:.2f}",
                f"{worst[RIVAL]:,.2f}",
                f"< {goal['worst_ms']:g}",
                worst["penstock"] < goal["worst_ms"],
            ),
        ],
        raw={
            "load": asdict(load),
            "times": {
                shape: {side: asdict(times) for side, times in of.items()}
                for shape, of in times.items()
            },
        },
        dtype="none",
    )


def _figures(times: dict[str, dict[str, Times]], side: str) -> dict[str, Any]:
    return {
        "worst_ms": round(max(of[side].worst_ms for of in times.values()), 3),
        "median_ms": {shape: round(of[side].median_ms, 3) for shape, of in times.items()},
    }


def _line(figure: str, of: dict[str, Times], name: str) -> Line:
    return Line(figure, f"{getattr(of['penstock'], name):.2f}", f"{getattr(of[RIVAL], name):,.2f}")
