"""Quantization of cached blocks: which blocks are encoded, and when.

    at-rest   finish  ──> changed ──> nodes without a reader  ──> between two steps one is encoded
    and replaces the raw one
    active    commit    ──> committed: a whole block is encoded before it becomes part of a path

The first tokens of prompts and partial blocks stay in full precision. Coded blocks are never
dequantized again.

At rest, a node is encoded once a path through it has `least_tokens` tokens, generated ones
included. Shorter sequences stay raw, except for blocks shared with a longer one. Cold tiers store
only coded blocks, so raw blocks of short paths are not written, and a short prompt reads the same
values before and after a restart.

At rest, an answer attends to its own tokens in full precision, and to the codes of cached blocks.
With `active`, a token attends to its own block raw and to all earlier blocks, except raw first
ones, as codes. The values then depend only on positions and settings, not on cache hits. Prompts
are prefilled block by block, and a cache hit ends before the block of the prompt's last token.
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
    """Quantizes nodes by a rule. Not thread-safe: owned by the engine's thread.

    Raises:
        LedgerFull: no memory for the codes being computed.
        SettingError: the scheme does not support this model's head size or its joined KV.
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
        """KV bytes per token over all layers, encoded by the rule."""
        self._form = BlockFormat.of(shapes, rule.scheme, rule.raw_layers)
        self._prefixes = prefixes
        self._first = rule.first_tokens
        self._least = rule.least_tokens
        self._begins_long: set[int] = set()
        """Ids of nodes that end before `least_tokens` but are part of a longer path."""
        self.active = limits.kv_cache_quantize_when == "active"
        self._due: deque[ref[Node[Segment]]] = deque()
        """Weak references to nodes to encode; the tree owns them."""
        self._looked = True
        self._left: set[int] = set()
        """Ids of nodes that could not be encoded completely; not retried."""
        self._awaited: set[int] = set()
        """Ids of nodes that preempted sequences will read again."""
        block = BlockFormat.of(shapes).nbytes(prefixes.block_size) if self.active else 0
        self._buffers = prefixes.ledger.reserve(
            Kind.BUFFERS, piece_bytes(shapes, ops.lanes) + block
        )

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes

    @property
    def codec_name(self) -> str:
        return self.rule.scheme.name

    def coded_token_bytes(self, nbytes: float) -> float:
        return self.token_bytes

    @property
    def reads_blocks(self) -> bool:
        return self.active

    @property
    def ends_blocks(self) -> bool:
        return self.active

    def changed(self) -> None:
        self._looked = False

    def committed(self, segment: Segment, start: int) -> Segment:
        """Return a whole block in the format that later tokens attend to: quantized with `active`.

        Args:
            segment: the block in full precision; not changed.

        Raises:
            MemoryError, RuntimeError: MLX is out of memory.
        """
        if not self.active or start < self._first:
            return segment
        # The key index is computed from the codes, as it is after a restore from a tier.
        return replace(self.rule.encoded(segment, self._ops), index=())

    def exchange_one(self, awaited: Iterable[Path]) -> Node[Segment] | None:
        """Encode one node and return it; None if no node is due.

        Also None if memory cannot hold both formats; the next step retries.

        Args:
            awaited: paths of preempted sequences, which will read them again.

        Raises:
            MemoryError, RuntimeError: MLX is out of memory; the node is unchanged.
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
        self._buffers.release()

    def _look(self, awaited: Iterable[Path]) -> None:
        self._looked = True
        self._awaited = {node.id for path in awaited for node in path}
        self._begins_long = self._find_beginnings()
        self._due = deque(ref(node) for node in self._prefixes.tree if self._is_due(node))
        self._left &= {node.id for node in self._prefixes.tree}

    def _find_beginnings(self) -> set[int]:
        """Return the ids of the nodes before those that contain token `least_tokens`."""
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
        """Split off the tokens that stay raw, and encode the rest; False if out of memory."""
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
        return len(node.tokens) * self._token_bits // 8
