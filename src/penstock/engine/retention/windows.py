"""Retention of sliding-window layers: drops the KV of nodes outside every retained window.

    memory is short ──> relieve: least recently used nodes drop KV that no retained position needs
        match           ──> resume: the deepest position at which all windows are complete
        prefilled again ──> fill: recomputed KV is copied back into the nodes

To resume at a position, a sliding-window layer needs only the `window` tokens before it. Retained
positions are the ends of branches, the forks between them, held prefixes, and the positions of
running sequences. The ends of the newest turns are retained as well, as long as the rest frees
enough. A node keeps its block hashes, and its other layers stay shared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf

from penstock.attention.span_attention import AttentionWindow
from penstock.engine.retention.retention import Path, PathReader, Retention
from penstock.kv import columns as col
from penstock.kv.segment import Segment
from penstock.kv.states import Checkpoint
from penstock.kv.tails import LayerShape
from penstock.ledger import Kind
from penstock.prefix.node import NODE_BYTES, Node, upwards
from penstock.prefix.pin import Pin
from penstock.prefix.prefixes import Prefixes

TURN_ENDS = 2
"""Number of newest turn ends retained per branch; with recurrent layers also answers'
ends."""

Droppable = dict[int, dict[int, int]]
"""Number of leading tokens to drop, by node id and layer."""


class Windows(Retention):
    """Drops and refills KV of sliding-window layers. Not thread-safe: owned by the engine's thread.

    Args:
        windows: window of each layer, from `windows_of`; not empty.
        marks_prompts: whether the ends of prompts are retained; with recurrent layers, checkpoints
            mark the ends of turns instead.

    Raises:
        LedgerFull: no memory for the copy of one layer's window.
    """

    def __init__(
        self,
        prefixes: Prefixes[Segment],
        windows: Mapping[int, int],
        shapes: Sequence[LayerShape],
        *,
        marks_prompts: bool = True,
    ) -> None:
        self._marks_prompts = marks_prompts
        self.windows = dict(windows)
        self._layers: dict[int, list[int]] = {}
        for layer, tokens in windows.items():
            self._layers.setdefault(tokens, []).append(layer)
        self._prefixes = prefixes
        window = max(
            (tokens + prefixes.block_size) * shapes[layer].nbytes
            for layer, tokens in self.windows.items()
        )
        self._copy = prefixes.ledger.reserve(Kind.BUFFERS, window)

    @property
    def nbytes(self) -> int:
        """Bytes reserved for the copy of the tokens that a layer keeps."""
        return self._copy.nbytes

    def release(self) -> None:
        self._copy.release()

    def complete(self, path: Path, limit: int) -> int:
        return resume(path, limit, self.windows)

    def is_useless(self, node: Node[Segment]) -> bool:
        """Return whether no sequence reads a node, and none can resume in or after it."""
        if node.children or node.pins or not node.segment.missing:
            return False
        return self.resume(node.path(), node.end) <= node.start

    def check(self, path: Path, read: int, position: int) -> None:
        """Check that every layer has the tokens that a sequence sees.

        Args:
            read: number of leading tokens that it reads.

        Raises:
            AssertionError: a layer lacks a token.
        """
        for node in path:
            for layer, gone in enumerate(node.segment.missing):
                sees = position - self.windows.get(layer, position + 1) + 1
                if node.start < read and gone and min(node.start + gone, read) > sees:
                    raise AssertionError(
                        f"layer {layer} of {node} lacks {gone} tokens; it is seen from {sees} on"
                    )

    def droppable(self, readers: Iterable[PathReader], *, turns: bool) -> Droppable:
        """Return the leading tokens of nodes that no retained position needs. O(nodes)."""
        nearest = self._nearest(readers, turns=turns)
        droppable = {
            node.id: self._droppable_of(node, nearest[node.id]) for node in self._prefixes.tree
        }
        return {node_id: layers for node_id, layers in droppable.items() if layers}

    def _droppable_of(self, node: Node[Segment], nearest: float) -> dict[int, int]:
        """Return the leading tokens that each layer can drop, if `nearest` is retained."""
        missing, size = node.segment.missing, self._prefixes.block_size
        droppable: dict[int, int] = {}
        for window, layers in self._layers.items():
            needed = (int(nearest) - window) // size * size
            count = min(needed - node.start, len(node.tokens))
            if count > 0:
                lacking = (layer for layer in layers if not missing or missing[layer] < count)
                droppable |= dict.fromkeys(lacking, count)
        return droppable

    def pinned_bytes(self, readers: Iterable[PathReader]) -> int:
        """Return a lower bound of the bytes that `relieve` frees from pinned nodes. O(nodes)."""
        droppable, nbytes = self.droppable(readers, turns=False), 0
        for node in self._prefixes.tree:
            if node.pins:
                for layer, count in droppable.get(node.id, {}).items():
                    dropped, stays = _sizes(node, layer, count)
                    nbytes += dropped if stays <= self._copy.nbytes else 0
        return nbytes

    def end_prompt(self, path: Path, position: int) -> None:
        """Retain the position where a prompt ends, until a later prompt ends on the same branch."""
        if not self._marks_prompts:
            return
        forks = [number for number, node in enumerate(path, 1) if len(node.children) > 1]
        shared = max(forks, default=0)
        for number, node in enumerate(path):
            before, offset = node.segment.checkpoints, position - node.start
            after = [mark for mark in before if number < shared or mark.offset == offset]
            if 0 < offset <= len(node.tokens) and all(mark.offset != offset for mark in after):
                after.append(Checkpoint(offset, (), turn_end=True))
            if [mark.offset for mark in before] != sorted(mark.offset for mark in after):
                # The new segment holds the same arrays.
                self._prefixes.tree.exchange(node, node.segment.checkpointed(after))

    def relieve(
        self, nbytes: int, readers: Iterable[PathReader], waiting: Collection[int] = ()
    ) -> int:
        """Drop KV that no retained position needs, until `nbytes` are free.

        Drops from the least recently used nodes first. KV before the ends of turns is dropped only
        if the rest does not free enough.

        Args:
            waiting: ids of nodes with blocks still to be written, which come last.

        Returns:
            Bytes freed; less than `nbytes` if nothing is left to drop.
        """
        before, reading = self._prefixes.nbytes, list(readers)
        try:
            for turns in (True, False):
                for node, layer, count in self._in_order(reading, waiting, turns=turns):
                    if before - self._prefixes.nbytes >= nbytes:
                        return before - self._prefixes.nbytes
                    self._drop(node, layer, count)
        except (MemoryError, RuntimeError):  # MLX has no room for a copy: nodes are evicted instead
            pass
        return before - self._prefixes.nbytes

    def _in_order(
        self, readers: Iterable[PathReader], waiting: Collection[int], *, turns: bool
    ) -> Iterator[tuple[Node[Segment], int, int]]:
        """Yield node, layer and number of leading tokens to drop, least valuable first."""

        def order(node: Node[Segment]) -> tuple[bool, float, int]:
            return node.id in waiting, node.last_used_seconds, node.start

        droppable = self.droppable(readers, turns=turns)
        nodes = [node for node in self._prefixes.tree if node.id in droppable]
        for node in sorted(nodes, key=order):
            for layer, count in droppable[node.id].items():
                yield node, layer, count

    def fill(
        self, pin: Pin[Segment], block_hashes: Sequence[bytes], segment: Segment, start: int
    ) -> bool:
        """Copy KV into the nodes that lack some layers; see `Retention.fill`."""
        prefixes, size = self._prefixes, self._prefixes.block_size
        chain = block_hashes[: (start + segment.tokens) // size]
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

    def _nearest(self, readers: Iterable[PathReader], *, turns: bool) -> dict[int, float]:
        """Return the first retained position in or after every node, by node id."""
        nodes = sorted(self._prefixes.tree, key=lambda node: node.start, reverse=True)
        nearest = {node.id: _retained(node) for node in nodes}
        for node in nodes:
            if turns and not node.children:
                for above, position in islice(_turn_ends(node), TURN_ENDS):
                    nearest[above.id] = min(nearest[above.id], position)
        for path, read in readers:
            for node in path:
                if node.start < read <= node.end:
                    nearest[node.id] = min(nearest[node.id], read)
        for node in nodes:  # children before their parent
            if node.parent is not None:
                nearest[node.parent.id] = min(nearest[node.parent.id], nearest[node.id])
        return nearest

    def _drop(self, node: Node[Segment], layer: int, count: int) -> None:
        """Drop the leading tokens of a layer, if there is memory for a copy of the others."""
        _, stays = _sizes(node, layer, count)
        more = max(0, stays - self._copy.nbytes)
        self._prefixes.exchange(node, lambda segment: segment.thinned({layer: count}), more)

    def _fill(self, node: Node[Segment], segment: Segment, start: int, end: int) -> bool:
        """Fill tokens `start..end - 1` of a node, split off from it; False if out of memory."""
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
        offset = node.start - start
        return self._prefixes.exchange(
            node,
            lambda short: short.filled(segment, offset),
            nbytes * len(node.tokens) // segment.tokens,
        )


def windows_of(attention_windows: Sequence[AttentionWindow], max_kv_tokens: int) -> dict[int, int]:
    """Return the windows smaller than `max_kv_tokens`, in tokens, by layer index."""
    return {
        layer: attention_window.window
        for layer, attention_window in enumerate(attention_windows)
        if attention_window.window is not None
        and not attention_window.keep
        and attention_window.window < max_kv_tokens
    }


def resume(path: Path, max_kv_tokens: int, windows: Mapping[int, int]) -> int:
    """Return the deepest position of a path before which every layer has its window.

    Only leading tokens of a node can be missing, so only the starts of incomplete nodes are tried.
    """
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
    """Return the first position in a node that is retained regardless of running sequences."""
    if node.held_until_seconds is not None:
        return node.start
    whole = sum(not child.partial for child in node.children.values())
    return node.end if whole != 1 else inf


def _turn_ends(leaf: Node[Segment]) -> Iterator[tuple[Node[Segment], int]]:
    """Yield node and position of the ends of turns on a branch, newest first."""
    for node in upwards(leaf):
        for checkpoint in reversed(node.segment.checkpoints):
            if checkpoint.turn_end:
                yield node, node.start + checkpoint.offset


def _sizes(node: Node[Segment], layer: int, count: int) -> tuple[int, int]:
    gone = node.segment.missing[layer] if node.segment.missing else 0
    nbytes = col.nbytes(*node.segment.layers[layer])
    stays = nbytes * (len(node.tokens) - count) // (len(node.tokens) - gone)
    return nbytes - stays, stays


def _short(path: Path, start: int) -> list[Node[Segment]]:
    """Return the nodes of a path in which a layer lacks a token after `start`."""
    return [node for node in path if node.start + max(node.segment.missing, default=-inf) > start]


class WindowRelief:
    """Frees KV of windows, given the running sequences. See `prefix.beside.Relief`."""

    def __init__(
        self,
        windows: Windows,
        readers: Callable[[], Iterable[PathReader]],
        waiting: Callable[[], Collection[int]],
    ) -> None:
        self._windows = windows
        self._readers = readers
        self._waiting = waiting

    def relieve(self, nbytes: int) -> int:
        """Drop KV that no sequence can resume from, until `nbytes` are free; see `Windows`."""
        return self._windows.relieve(nbytes, self._readers(), self._waiting())

    @property
    def pinned_bytes(self) -> int:
        return self._windows.pinned_bytes(self._readers())

    def is_useless(self, node: Node[Segment]) -> bool:
        return self._windows.is_useless(node)
