"""A prefix-tree reference built on a dict of prefixes."""

from __future__ import annotations

from dataclasses import dataclass, field

from text_segment import Text

from penstock.prefix import PrefixTree

BLOCK = 2
BYTES_A_TOKEN = Text.token_bytes
HALF_LIFE = 10.0
PAIR_COST = 0.25
REMEMBERED = 3
MOST_MERGED = 4 * BLOCK

Prefix = tuple[int, ...]


@dataclass
class Run:
    """A node that ends at its key in `Reference.runs`."""

    start: int
    uses: float
    """Each use halved every half life; as of `at`."""
    at: float
    last_used: float
    hits: int = 0

    def uses_at(self, now: float) -> float:
        return self.uses * 0.5 ** ((now - self.at) / HALF_LIFE)


@dataclass
class Reference:
    """Nodes and pins by the prompt up to their end."""

    runs: dict[Prefix, Run] = field(default_factory=dict)
    pins: list[Prefix] = field(default_factory=list)
    remembered: list[tuple[Prefix, Run]] = field(default_factory=list)
    now: float = 0.0
    latest_use: float = 0.0
    idle: float | None = None

    def known(self, prompt: Prefix) -> int:
        """Return the number of tokens in the longest cached prefix of whole blocks."""
        whole = len(prompt) - len(prompt) % BLOCK
        for count in range(whole, 0, -BLOCK):
            if any(end[:count] == prompt[:count] for end in self.runs):
                return count
        return 0

    def path(self, end: Prefix) -> list[Prefix]:
        return [other for other in sorted(self.runs, key=len) if end[: len(other)] == other]

    def children(self, end: Prefix) -> list[Prefix]:
        return [
            other
            for other, run in self.runs.items()
            if run.start == len(end) and other[: len(end)] == end
        ]

    def pinned(self, end: Prefix) -> int:
        return sum(pin[: len(end)] == end for pin in self.pins)

    def use(self, run: Run) -> None:
        idle = 2 * HALF_LIFE if self.idle is None else min(self.idle, 2 * HALF_LIFE)
        most = 2 ** (4 - 2 * idle / HALF_LIFE)
        run.uses, run.at = min(run.uses_at(self.now) + 1, most), self.now
        run.last_used = self.latest_use = self.now

    def pin(self, end: Prefix) -> None:
        for each in self.path(end):
            self.read(each)
        self.pins.append(end)

    def read(self, end: Prefix) -> None:
        self.use(self.runs[end])
        self.runs[end].hits += 1

    def insert(self, end: Prefix, start: int) -> None:
        run = Run(start, 0.0, self.now, self.now)
        first = end[: start + BLOCK]
        for old in [old for old in self.remembered if old[0] == first]:
            self.remembered.remove(old)
            run.uses = old[1].uses_at(self.now)
        self.use(run)
        self.runs[end] = run

    def split(self, end: Prefix, at: int) -> None:
        run = self.runs[end]
        self.runs[end[:at]] = Run(run.start, run.uses, run.at, run.last_used, run.hits)
        run.start = at

    def can_merge(self, end: Prefix) -> bool:
        children = self.children(end)
        small = len(children) == 1 and len(children[0]) - self.runs[end].start <= MOST_MERGED
        return small and end not in self.pins

    def merge(self, end: Prefix) -> None:
        (child,) = self.children(end)
        head, rest = self.runs.pop(end), self.runs[child]
        sizes = len(end) - head.start, len(child) - len(end)
        uses = [head.uses_at(self.now), rest.uses_at(self.now)]
        rest.uses = sum(size * use for size, use in zip(sizes, uses, strict=True)) / sum(sizes)
        rest.at, rest.start = self.now, head.start
        rest.hits = max(rest.hits, head.hits)
        rest.last_used = max(rest.last_used, head.last_used)

    def worth(self, end: Prefix) -> float:
        start = self.runs[end].start
        seconds = sum(1 + PAIR_COST * (token + 0.5) for token in range(start, len(end)))
        return self.runs[end].uses_at(self.now) * seconds / (len(end) - start)

    def evictable(self) -> list[Prefix]:
        return [end for end in self.runs if not self.children(end) and not self.pinned(end)]

    def remove(self, end: Prefix) -> None:
        run = self.runs.pop(end)
        waited = self.latest_use - run.last_used
        before = waited if self.idle is None else self.idle
        self.idle = before + (waited - before) / 256
        first = end[: run.start + BLOCK]
        self.remembered = [old for old in self.remembered if old[0] != first]
        self.remembered = [*self.remembered, (first, run)][-REMEMBERED:]


def table(tree: PrefixTree[Text]) -> dict[Prefix, tuple[int, int, int, float, Prefix]]:
    """Return every node of a tree: end -> start, pins, hits, last use, hold."""
    return {
        tuple(t for each in node.path() for t in each.tokens.tolist()): (
            node.start,
            node.pins,
            node.hits,
            node.last_used_seconds,
            node.segment.content,
        )
        for node in tree
    }


def wanted(reference: Reference) -> dict[Prefix, tuple[int, int, int, float, Prefix]]:
    """Return the same table of the reference."""
    return {
        end: (run.start, reference.pinned(end), run.hits, run.last_used, end[run.start :])
        for end, run in reference.runs.items()
    }
