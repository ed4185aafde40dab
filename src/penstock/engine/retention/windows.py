"""Of which tokens the layers with windows hold keys and values: where somebody may go on.

    bytes are short ──> relieve: the nodes unused for longest drop what no retained place needs
    match           ──> resume: back to the deepest place at which all windows are whole
    read again      ──> fill: what was computed once more takes its place in the nodes

Retained are the ends of branches, the places where they part, held prefixes, where whoever runs
stands, and, while that will do, the ends of the newest turns. A node is named, and its other layers
are shared, as if nothing was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf

from penstock.kv import columns as col
from penstock.kv.attention import AttentionWindow
from penstock.kv.segment import Segment
from penstock.kv.states import Checkpoint
from penstock.kv.tails import LayerShape
from penstock.ledger import Kind
from penstock.prefix.node import NODE_BYTES, Node, upwards
from penstock.prefix.prefixes import Prefixes
from penstock.prefix.tree import Pin

TURN_ENDS = 2
"""Newest ends of turns of a branch that are retained: in models with states an answer's, too."""

Path = Sequence[Node[Segment]]
Reader = tuple[Path, int]
"""A path that is read, and how many tokens of it."""


class Windows:
    """Thins the nodes of a tree and fills them again. Not thread-safe: the engine's thread.

    Args:
        prefixes: of the engine.
        windows: see `windows_of`; not empty.
        shapes: of one token in each layer.
        readers: tells who runs.
        waiting: tells which nodes, by their ids, have blocks that wait to be written.

    Raises:
        LedgerFull: there is no room for the copy of one layer's window.
    """

    def __init__(
        self,
        prefixes: Prefixes[Segment],
        windows: Mapping[int, int],
        shapes: Sequence[LayerShape],
        readers: Callable[[], Iterable[Reader]],
        waiting: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.windows = dict(windows)
        self._layers = {
            window: [layer for layer, each in windows.items() if each == window]
            for window in set(windows.values())
        }
        self._prefixes = prefixes
        self._readers = readers
        self._waiting = waiting
        window = max(
            (tokens + prefixes.block_size) * shapes[layer].nbytes
            for layer, tokens in self.windows.items()
        )
        self._copy = prefixes.ledger.reserve(Kind.BUFFERS, window)

    @property
    def nbytes(self) -> int:
        """Bytes set aside for the copy of what a layer keeps."""
        return self._copy.nbytes

    def release(self) -> None:
        """Give back what was set aside."""
        self._copy.release()

    # ---- questions

    def resume(self, path: Path, max_kv_tokens: int) -> int:
        """Return the deepest position of a path, `max_kv_tokens` at most, at which a sequence can
        go
        on: every window in front of it is whole."""
        return resume(path, max_kv_tokens, self.windows)

    def is_useless(self, node: Node[Segment]) -> bool:
        """Tell whether nobody can go on anywhere in a node that nobody reads, nor behind it."""
        if node.children or node.pins or not node.segment.missing:
            return False
        return self.resume(node.path(), node.end) <= node.start

    def check(self, path: Path, read: int, position: int) -> None:
        """Raise AssertionError if a sequence at `position`, which reads the first tokens of a path,
        sees one that a layer does not hold."""
        for node in path:
            for layer, gone in enumerate(node.segment.missing):
                sees = position - self.windows.get(layer, position + 1) + 1
                if node.start < read and gone and min(node.start + gone, read) > sees:
                    raise AssertionError(
                        f"layer {layer} of {node} lacks {gone} tokens; it is seen from {sees} on"
                    )

    def droppable(self, *, turns: bool) -> dict[int, dict[int, int]]:
        """Return how many first tokens which layers of which nodes could drop: by node, by layer.

        O(nodes).

        Args:
            turns: whether the ends of turns are retained.
        """
        nearest = self._nearest(turns=turns)
        size = self._prefixes.block_size
        found = {}
        for node in self._prefixes.tree:
            missing = node.segment.missing
            gone: dict[int, int] = {}
            for window, layers in self._layers.items():
                needed = (int(nearest[node.id]) - window) // size * size
                count = min(needed - node.start, len(node.tokens))
                if count > 0:
                    lacks = (layer for layer in layers if not missing or missing[layer] < count)
                    gone |= dict.fromkeys(lacks, count)
            if gone:
                found[node.id] = gone
        return found

    @property
    def pinned_bytes(self) -> int:
        """Bytes that `relieve` frees of nodes that somebody reads, at least. O(nodes)."""
        droppable, found = self.droppable(turns=False), 0
        for node in self._prefixes.tree:
            if node.pins:
                for layer, count in droppable.get(node.id, {}).items():
                    dropped, stays = _sizes(node, layer, count)
                    found += dropped if stays <= self._copy.nbytes else 0
        return found

    # ---- acts

    def end_prompt(self, path: Path, position: int) -> None:
        """Retain the place where a prompt ends, until a later one does on the same branch: the
        next turn may leave out some of the answer, or ask for another one.

        Of models without states: of others a checkpoint says that a turn ends.
        """
        forks = [number for number, node in enumerate(path, 1) if len(node.children) > 1]
        shared = max(forks, default=0)
        for number, node in enumerate(path):
            before, at = node.segment.checkpoints, position - node.start
            after = [each for each in before if number < shared or each.at == at]
            if 0 < at <= len(node.tokens) and all(each.at != at for each in after):
                after.append(Checkpoint(at, (), turn_end=True))
            if [each.at for each in before] != sorted(each.at for each in after):
                made = node.segment.checkpointed(after)
                self._prefixes.tree.exchange(node, made)  # which holds the same arrays

    def relieve(self, nbytes: int) -> int:
        """Drop what no retained place needs until `nbytes` were freed, or nothing is left to drop;
        the nodes unused for longest come first, those with blocks that wait to be written last, and
        the ends of turns that are no ends of branches are retained while that will do. Return the
        bytes freed."""
        before, waiting = self._prefixes.nbytes, self._waiting()

        def order(node: Node[Segment]) -> tuple[bool, float, int]:
            return node.id in waiting, node.last_used_seconds, node.start

        try:
            for turns in (True, False):
                droppable = self.droppable(turns=turns)
                nodes = [node for node in self._prefixes.tree if node.id in droppable]
                for node in sorted(nodes, key=order):
                    for layer, count in droppable[node.id].items():
                        if before - self._prefixes.nbytes >= nbytes:
                            return before - self._prefixes.nbytes
                        self._drop(node, layer, count)
        except (MemoryError, RuntimeError):  # MLX found no room for a copy: nodes give way instead
            pass
        return before - self._prefixes.nbytes

    def fill(self, pin: Pin[Segment], keys: Sequence[bytes], segment: Segment, start: int) -> bool:
        """Let the nodes that have a segment's tokens hold them in all layers.

        Args:
            pin: a sequence's, which reads its path up to `start`.
            keys: the sequence's chain.
            segment: the blocks behind `start`, computed or read again.
            start: of the segment; between two blocks.

        Returns:
            False if there is no room; the pin is on what its sequence reads then.
        """
        prefixes, size = self._prefixes, self._prefixes.block_size
        chain = keys[: (start + segment.tokens) // size]
        match = prefixes.match(chain)
        if not _short(match.path, start):
            return True
        prefixes.follow(pin, chain, start // size)
        copies = max(node.copy_bytes + node.index_bytes for node in match.path)
        room = 2 * segment.kv_nbytes + copies + 2 * NODE_BYTES * (1 + len(match.path))
        if prefixes.make_room(room + prefixes.index_bytes(len(chain) - start // size)) and all(
            self._fill(node, segment, start, match.tokens) for node in _short(match.path, start)
        ):
            return True
        read = [node for node in pin.path if node.start < start]
        pin.withdraw(read[-1] if read else None)
        return False

    # ---- parts

    def _nearest(self, *, turns: bool) -> dict[int, float]:
        """Return, for every node, the first retained place in it or behind it."""
        nodes = sorted(self._prefixes.tree, key=lambda node: node.start, reverse=True)
        nearest = {node.id: _retained(node) for node in nodes}
        for node in nodes:
            if turns and not node.children:
                for above, at in islice(_turn_ends(node), TURN_ENDS):
                    nearest[above.id] = min(nearest[above.id], at)
        for path, read in self._readers():
            for node in path:
                if node.start < read <= node.end:
                    nearest[node.id] = min(nearest[node.id], read)
        for node in nodes:  # each before its parent
            if node.parent is not None:
                nearest[node.parent.id] = min(nearest[node.parent.id], nearest[node.id])
        return nearest

    def _drop(self, node: Node[Segment], layer: int, count: int) -> None:
        """Drop a layer's first tokens, if what stays can be copied."""
        _, stays = _sizes(node, layer, count)
        more = max(0, stays - self._copy.nbytes)
        self._prefixes.exchange(node, lambda segment: segment.thinned({layer: count}), more)

    def _fill(self, node: Node[Segment], segment: Segment, start: int, end: int) -> bool:
        """Fill the part start..end-1 of a node, cut out of it; False without room."""
        size = self._prefixes.block_size
        if node.start < start and not self._prefixes.cut(node, (start - node.start) // size):
            return False
        if node.end > end:
            if not self._prefixes.cut(node, (end - node.start) // size):
                return False
            assert node.parent is not None
            node = node.parent
        missing = node.segment.missing
        if not missing:
            return True
        layers = zip(segment.layers, missing, strict=True)
        nbytes = sum(col.nbytes(*layer) for layer, gone in layers if gone)
        at = node.start - start
        return self._prefixes.exchange(
            node,
            lambda short: short.filled(segment, at),
            nbytes * len(node.tokens) // segment.tokens,
        )


def windows_of(attention_windows: Sequence[AttentionWindow], max_kv_tokens: int) -> dict[int, int]:
    """Return the windows of the layers that see less than what may be shared, by their numbers.

    Args:
        attention_windows: of all layers. Those that also see the first tokens are not counted.
        max_kv_tokens: of a path.
    """
    return {
        layer: attention_window.window
        for layer, attention_window in enumerate(attention_windows)
        if attention_window.window is not None
        and not attention_window.keep
        and attention_window.window < max_kv_tokens
    }


def resume(path: Path, max_kv_tokens: int, windows: Mapping[int, int]) -> int:
    """Return the deepest position of a path, `max_kv_tokens` at most, in front of which every layer
    holds its window. Each node lacks first tokens alone, so that the search goes from the beginning
    of one node that lacks some to that of another."""
    position = max_kv_tokens
    for node in reversed(path):
        missing = node.segment.missing
        if missing and node.start < position:
            for layer, window in windows.items():
                if missing[layer] and node.start + missing[layer] > position - window + 1:
                    position = node.start
                    break
    return position


def _retained(node: Node[Segment]) -> float:
    """Return the first place of a node at which somebody may go on, whoever runs now."""
    if node.held_until_seconds is not None:
        return node.start
    return node.end if len(node.children) != 1 else inf


def _turn_ends(leaf: Node[Segment]) -> Iterator[tuple[Node[Segment], int]]:
    """Yield where turns of a branch ended, the newest first, each with its node."""
    for node in upwards(leaf):
        for each in reversed(node.segment.checkpoints):
            if each.turn_end:
                yield node, node.start + each.at


def _sizes(node: Node[Segment], layer: int, count: int) -> tuple[int, int]:
    """Return the bytes of a layer's tokens that it holds of its first `count`, and of the rest."""
    gone = node.segment.missing[layer] if node.segment.missing else 0
    held = col.nbytes(*node.segment.layers[layer])
    stays = held * (len(node.tokens) - count) // (len(node.tokens) - gone)
    return held - stays, stays


def _short(path: Path, start: int) -> list[Node[Segment]]:
    """Return the nodes of a path in which some layer lacks a token behind `start`."""
    return [node for node in path if node.start + max(node.segment.missing, default=-inf) > start]
