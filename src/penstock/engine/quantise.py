"""Which nodes are held in fewer bits, and when: between two steps, one node after the other.

    seal    ──> changed ──> nodes that are due ──> one is encoded and takes the raw one's place
    finish  ──> changed

The first tokens of prompts, unfinished blocks and, if that is asked for, the most recent tokens of
whoever runs stay in full precision; what is coded is never widened again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from penstock.config import EngineSettings
from penstock.kv.forms import Form
from penstock.kv.quantisation import Quantisation, piece_bytes
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape
from penstock.ledger import Kind
from penstock.prefix.node import Node
from penstock.prefix.prefixes import Prefixes

Reader = tuple[Sequence[Node[Segment]], int]
"""A path that is read, and the position of who reads it."""


class Quantiser:
    """Holds nodes as a rule says. Not thread-safe: the engine's thread.

    Args:
        rule: which tokens and layers are held in which codecs.
        prefixes: of the engine.
        shapes: of one token in each layer.
        limits: the engine's settings.

    Raises:
        LedgerFull: there is no room for what is encoded meanwhile.
        SettingError: the scheme cannot hold this model's heads, or is not read as it lies.
    """

    def __init__(
        self,
        rule: Quantisation,
        prefixes: Prefixes[Segment],
        shapes: Sequence[LayerShape],
        limits: EngineSettings,
    ) -> None:
        rule.check_in_place()
        self.rule = rule
        self._token_bits, left = rule.token_bits(shapes)
        self.token_bytes = (self._token_bits + left) / 8
        """Of one token in all layers, held so."""
        self._form = Form.of(shapes, rule.scheme, rule.raw_layers)
        self._prefixes = prefixes
        self._first = rule.first_tokens
        self._recent = limits.kv_cache_residual
        self._at_rest = limits.kv_cache_quantize == "at-rest"
        self._due: deque[Node[Segment]] = deque()
        self._looked = True
        self._left: set[int] = set()
        """Nodes of which something had to stay raw."""
        self._buffers = prefixes.ledger.reserve(Kind.BUFFERS, piece_bytes(shapes))

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
            if not self._prefixes.exchange(node, self.rule.encoded, self._bytes_of(node)):
                return False
        except BaseException:
            self._left.add(node.id)
            raise
        if not self._form.holds(node.segment):
            self._left.add(node.id)
        return True

    def _bytes_of(self, node: Node[Segment]) -> int:
        """Return what a node's new form takes, at most."""
        return len(node.tokens) * self._token_bits // 8
