"""Choice of the blocks that are encoded in fewer bits, and of the time.

    at-rest   finish  ──> changed ──> nodes without a reader  ──> between two steps one is encoded
                                      and takes the raw one's place
    active    commit    ──> committed: a whole block is encoded before it becomes part of a path

The first tokens of prompts and unfinished blocks stay in full precision; coded blocks are never
dequantized again.

At rest a node is due once some path through it is `least_tokens` long, answers included. Sequences
that stay shorter are raw as a whole, but for blocks that they share with a longer one. Raw blocks
of short paths are not written to cold tiers, whose blocks are coded. So a short prompt reads the
same numbers before and after a restart.

At rest an answer reads its own tokens in full precision, and reads codes of blocks that an earlier
answer left behind. With `active` a token reads its own block raw. From the first coded block on, it
reads every whole block in front of its own as codes. So the numbers that it reads are a function of
its position and the settings, and not of the cache. A prompt is then read block by block, and a hit
ends where the block of the last token begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from weakref import ref

from penstock.config import EngineSettings
from penstock.engine.retention.retention import Path, Retention
from penstock.kv.block_format import BlockFormat
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.quantization import QuantizationRule
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape, piece_bytes
from penstock.ledger import Kind
from penstock.prefix.node import Node, upwards
from penstock.prefix.prefixes import Prefixes


class Requantizer(Retention):
    """Holds nodes as a rule says. Not thread-safe: the engine's thread.

    Args:
        rule: which tokens and layers are held in which codecs.
        prefixes: of the engine.
        shapes: of one token in each layer.
        limits: the engine's settings.
        ops: compute codes.

    Raises:
        LedgerFull: there is no room for the codes that are made meanwhile.
        SettingError: the scheme cannot hold this model's heads, or is not read as it lies.
    """

    def __init__(
        self,
        rule: QuantizationRule,
        prefixes: Prefixes[Segment],
        shapes: Sequence[LayerShape],
        limits: EngineSettings,
        ops: CodeOps,
    ) -> None:
        self.rule = rule
        self._ops = ops
        self._token_bits, left = rule.token_bits(shapes)
        self.token_bytes = (self._token_bits + left) / 8
        """Bytes of one token's KV in all layers, encoded by the rule."""
        self._form = BlockFormat.of(shapes, rule.scheme, rule.raw_layers)
        self._prefixes = prefixes
        self._first = rule.first_tokens
        self._least = rule.least_tokens
        self._begins_long: set[int] = set()
        """Ids of nodes that end in front of `least_tokens`, but have a longer path through them."""
        self.active = limits.kv_cache_quantize_when == "active"
        """Whether blocks are encoded as soon as they are whole."""
        self._due: deque[ref[Node[Segment]]] = deque()
        """Nodes that the tree alone holds: one that is evicted meanwhile takes no memory."""
        self._looked = True
        self._left: set[int] = set()
        """Ids of nodes of which a part had to stay raw."""
        self._awaited: set[int] = set()
        """Ids of nodes that preempted answers will read again."""
        block = BlockFormat.of(shapes).nbytes(prefixes.block_size) if self.active else 0
        self._buffers = prefixes.ledger.reserve(
            Kind.BUFFERS, piece_bytes(shapes, ops.lanes) + block
        )

    @property
    def nbytes(self) -> int:
        """Bytes set aside for encoding."""
        return self._buffers.nbytes

    @property
    def codec_name(self) -> str:
        """Codec of the rule."""
        return self.rule.scheme.name

    def coded_token_bytes(self, nbytes: float) -> float:
        """Return the bytes of a token's KV, encoded by the rule."""
        return self.token_bytes

    @property
    def reads_blocks(self) -> bool:
        """Whether prompts are read block by block: with `active`."""
        return self.active

    @property
    def ends_blocks(self) -> bool:
        """Whether each block is committed alone: with `active`, as codes."""
        return self.active

    def changed(self) -> None:
        """Note that nodes have come, or are no longer read."""
        self._looked = False

    def committed(self, segment: Segment, start: int) -> Segment:
        """Return a whole block in the form that all tokens behind it read: with `active`, coded.

        Args:
            segment: the block, in full precision; not changed.
            start: its position.

        Raises:
            MemoryError, RuntimeError: MLX found no room.
        """
        if not self.active or start < self._first:
            return segment
        # An index is that of the codes, as it is where they were read from a tier.
        return replace(self.rule.encoded(segment, self._ops), index=())

    def exchange_one(self, awaited: Iterable[Path]) -> Node[Segment] | None:
        """Encode one node that is due and return it; None without one.

        None, too, without room for both its forms: it is tried again at the next step.

        Args:
            awaited: paths of answers that were preempted, which read them again.

        Raises:
            MemoryError, RuntimeError: MLX found no room; the node stays as it is.
        """
        if not self._looked:
            self._look(awaited)
        while self._due:
            node = self._due.popleft()()
            if node is None or node not in self._prefixes.tree or not self._is_due(node):
                continue
            if not self._exchange(node):
                self._looked = False  # with more room, another node may be due
                return None
            return node
        return None

    def release(self) -> None:
        """Release the bytes that were set aside."""
        self._buffers.release()

    # ---- parts

    def _look(self, awaited: Iterable[Path]) -> None:
        """Find the nodes that are due, each before those below it."""
        self._looked = True
        self._awaited = {node.id for path in awaited for node in path}
        self._begins_long = self._find_beginnings()
        self._due = deque(ref(node) for node in self._prefixes.tree if self._is_due(node))
        self._left &= {node.id for node in self._prefixes.tree}

    def _find_beginnings(self) -> set[int]:
        """Return the nodes, by their ids, in front of those that hold token `least_tokens`."""
        long = (node for node in self._prefixes.tree if node.start < self._least <= node.end)
        return {above.id for node in long for above in upwards(node.parent)}

    def _is_due(self, node: Node[Segment]) -> bool:
        if node.partial or node.end <= self._first or node.id in self._left:
            return False
        if node.end < self._least and node.id not in self._begins_long:
            return False
        if not self.active and (node.pins or node.id in self._awaited):
            return False
        return not self._form.holds(node.segment)

    def _exchange(self, node: Node[Segment]) -> bool:
        """Cut off the first tokens, which stay raw, and encode the rest; False without room."""
        blocks = (self._first - node.start) // self._prefixes.block_size
        try:
            if blocks > 0 and not self._prefixes.cut(node, blocks):
                return False
            if not self._prefixes.exchange(node, self._encoded, self._bytes_of(node)):
                return False
        except BaseException:
            self._left.add(node.id)
            raise
        if not self._form.holds(node.segment):
            self._left.add(node.id)
        return True

    def _encoded(self, segment: Segment) -> Segment:
        return self.rule.encoded(segment, self._ops)

    def _bytes_of(self, node: Node[Segment]) -> int:
        """Return the most bytes that a node's new form takes."""
        return len(node.tokens) * self._token_bits // 8
