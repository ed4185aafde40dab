"""Which nodes are held in fewer bits, and when: between two steps, one node after the other.

    seal    ──> changed ──> nodes that are due ──> one is encoded and takes the raw one's place
    finish  ──> changed

The first tokens of prompts, unfinished blocks and, if that is asked for, the most recent tokens of
whoever runs stay in full precision; what is coded is never widened again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import mlx.core as mx

from penstock.config import EngineSettings
from penstock.errors import SettingError
from penstock.kv.codecs import parse_scheme
from penstock.kv.forms import Coding, Form, Forms
from penstock.kv.segment import PIECE_TOKENS, Segment
from penstock.kv.tails import LayerShape
from penstock.ledger import Kind
from penstock.prefix.node import Node
from penstock.prefix.prefixes import Prefixes

PIECE_BUFFERS = 10
"""Arrays of float32 that are alive together while a piece of one side is encoded; measured: 8."""
Reader = tuple[Sequence[Node[Segment]], int]
"""A path that is read, and the position of who reads it."""


class Quantiser:
    """Holds nodes as a coding says. Not thread-safe: the engine's thread.

    Args:
        forms: how blocks are to be held.
        prefixes: of the engine.
        shapes: of one token in each layer.
        limits: the engine's settings.

    Raises:
        LedgerFull: there is no room for what is encoded meanwhile.
    """

    def __init__(
        self,
        forms: Forms,
        prefixes: Prefixes[Segment],
        shapes: Sequence[LayerShape],
        limits: EngineSettings,
    ) -> None:
        assert forms.coding is not None
        self.coding = forms.coding
        self._form = forms.coded
        self._prefixes = prefixes
        self._first = forms.raw_tokens
        self._recent = limits.kv_cache_residual
        self._at_rest = limits.kv_cache_quantize == "at-rest"
        self._due: deque[Node[Segment]] = deque()
        self._looked = True
        self._left: set[int] = set()
        """Nodes of which something had to stay raw."""
        numbers = max(shape.kv_heads * max(shape.key_dim, shape.value_dim) for shape in shapes)
        piece = PIECE_TOKENS * numbers * mx.float32.size * PIECE_BUFFERS
        self._buffers = prefixes.ledger.reserve(Kind.BUFFERS, piece)

    @property
    def nbytes(self) -> int:
        """Bytes set aside for what is encoded."""
        return self._buffers.nbytes

    def changed(self) -> None:
        """Note that nodes have come, or are no longer read."""
        self._looked = False

    def work(self, readers: Iterable[Reader]) -> bool:
        """Encode one node that is due; False if there is none, or no room for both its forms: it
        is tried again at the next step.

        Args:
            readers: who runs.

        Raises:
            MemoryError, RuntimeError: MLX found no room; the node stays as it is.
        """
        if not self._looked:
            self._look(readers)
        while self._due:
            node = self._due.popleft()
            if not self._prefixes.tree.has(node):
                continue
            if not self._exchange(node):
                self._looked = False  # who is due may be another one when there is room
                return False
            return True
        return False

    def release(self) -> None:
        """Give back what was set aside."""
        self._buffers.release()

    # ---- parts

    def _look(self, readers: Iterable[Reader]) -> None:
        """Find the nodes that are due, each before those below it."""
        self._looked = True
        nearest: dict[int, int] = {}
        for path, position in readers:
            for node in path:
                nearest[node.id] = min(position, nearest.get(node.id, position))
        self._due = deque(
            node for node in self._prefixes.tree if self._is_due(node, nearest.get(node.id))
        )
        self._left &= {node.id for node in self._prefixes.tree}

    def _is_due(self, node: Node[Segment], position: int | None) -> bool:
        if node.end <= self._first or node.id in self._left:
            return False
        if self._at_rest and node.pins:
            return False
        if self._recent and position is not None and node.end > position - self._recent:
            return False
        return not self._form.holds(node.segment)

    def _exchange(self, node: Node[Segment]) -> bool:
        """Cut off the first tokens, which stay raw, and encode the rest; False without room."""
        blocks = (self._first - node.start) // self._prefixes.block_size
        try:
            if blocks > 0 and not self._prefixes.cut(node, blocks):
                return False
            if not self._prefixes.exchange(node, self.coding.encoded, self._bytes_of(node)):
                return False
        except BaseException:
            self._left.add(node.id)
            raise
        if not self._form.holds(node.segment):
            self._left.add(node.id)
        return True

    def _bytes_of(self, node: Node[Segment]) -> int:
        """Return what a node's new form takes, at most."""
        return self._form.coded_nbytes(len(node.tokens))


def coding_of(shapes: Sequence[LayerShape], limits: EngineSettings) -> Coding | None:
    """Return the coding that an engine's settings name; None if all stays as it is.

    Raises:
        SettingError: it cannot hold this model's heads, or blocks of this size, or is not read as
            it lies.
    """
    if limits.kv_cache_quantization is None:
        return None
    try:
        scheme = parse_scheme(limits.kv_cache_quantization)
    except ValueError as error:
        raise SettingError(f"kv_cache_quantization: {error}") from None
    if scheme.keys is None and scheme.values is None:
        return None
    for codec in (scheme.keys, scheme.values):
        if codec is not None and not codec.in_place:
            raise SettingError(
                f"kv_cache_quantization {scheme.name}: {codec.name} is widened whenever it is "
                f"read, and is there to be compared with"
            )
        if codec is not None and limits.block_size % codec.span:
            raise SettingError(
                f"kv_cache_quantization {scheme.name}: {codec.name} encodes {codec.span} "
                f"tokens together, which do not divide a block_size of {limits.block_size}"
            )
    raw_layers = frozenset(limits.kv_cache_skip_layers)
    if unknown := sorted(raw_layers - set(range(len(shapes)))):
        raise SettingError(
            f"kv_cache_skip_layers {unknown}: the model's layers are 0 to {len(shapes) - 1}"
        )
    for number, layer in enumerate(Form.of(shapes, scheme, raw_layers).layers):
        try:
            sum(side.token_bits for side in layer)
        except ValueError as error:
            raise SettingError(
                f"kv_cache_quantization {scheme.name}: layer {number}: {error}"
            ) from None
    size = limits.block_size
    return Coding(scheme, raw_layers, -(-limits.raw_first_tokens // size) * size)
