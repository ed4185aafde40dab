"""Stores of keys and values that outlive a sequence, and the questions to several of them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

from penstock.engine.model.prompt_logprobs import ScoredBlocks
from penstock.engine.model.runner import Runner
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.retention.requantize import Requantizer
from penstock.engine.retention.spilling import Spilling
from penstock.engine.retention.windows import Windows
from penstock.engine.stats import Counters
from penstock.kv.attention_plan import KVSpan
from penstock.kv.block_spans import span_tokens
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState
from penstock.kv.tails import Tails
from penstock.prefix.checkpoints import Checkpoints, Path
from penstock.prefix.node import Node
from penstock.prefix.prefixes import Prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStores:
    """All parts of an engine that hold or compute KV; None for a part that it does without."""

    prefixes: Prefixes[Segment]
    checkpoints: Checkpoints | None
    windows: Windows | None
    requantizer: Requantizer | None
    tiers: TierGroup | None
    spilling: Spilling | None
    scored: ScoredBlocks = field(init=False)
    """Scores of the tokens of prompts, by block."""
    limit_bytes: InitVar[int]
    """Memory limit of the rank that has least."""
    tails: Tails
    runner: Runner
    counters: Counters
    shared_tokens: int
    """Position up to which KV depends on the tokens alone, not on the window; a multiple of the
    block size."""

    def __post_init__(self, limit_bytes: int) -> None:
        scored = ScoredBlocks(self.prefixes, limit_bytes)
        object.__setattr__(self, "scored", scored)
        self.prefixes.spare = scored

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.prefixes.block_size

    @property
    def by_block(self) -> bool:
        """Whether prompts are read block by block.

        Later blocks then read a block as codes; its own tokens read it as it was computed.
        """
        active = self.requantizer is not None and self.requantizer.active
        return active and self.shared_tokens > 0

    @property
    def whole_blocks(self) -> bool:
        """Whether a chunk of a prompt may not end inside a block."""
        runner = self.runner
        return self.by_block or bool(runner.layout.rows) or runner.fitness.whole

    @property
    def commit_tokens(self) -> int:
        """Tokens that are committed together while decoding.

        Several blocks make one part to read where no block's end needs work of its own.
        """
        single = self.runner.layout.rows or self.checkpoints is not None or self.by_block
        return self.block_size if single else span_tokens(self.block_size)

    def own_bytes(self, spans: Iterable[KVSpan]) -> int:
        """Return the bytes of sequences' own spans, but those that are a leaf of the tree, too.

        What several sequences resumed from counts once, also when its leaf has been evicted.
        """
        nbytes_by_id = {id(span.segment.layers): span.segment.nbytes for span in spans}
        for node in self.prefixes.tree:
            if node.partial:
                nbytes_by_id.pop(id(node.segment.layers), None)
        return sum(nbytes_by_id.values())

    def resume(self, path: Path, max_kv_tokens: int) -> tuple[int, RecurrentState | None]:
        """Return the last position of a path at which a sequence can resume, and its states.

        All windows in front of it are complete, and all recurrent layers have states there.

        Args:
            path: nodes from the root on.
            max_kv_tokens: the position is no later than this.
        """
        while True:
            if self.windows is not None:
                max_kv_tokens = self.windows.resume(path, max_kv_tokens)
            if self.checkpoints is None:
                return max_kv_tokens, None
            position, recurrent_state = self.checkpoints.resume(path, max_kv_tokens)
            if self.windows is None or position in (0, max_kv_tokens):
                return position, recurrent_state
            max_kv_tokens = position

    def readable_tokens(self, tokens: int) -> int:
        """Return the most first tokens of so many that a sequence can read from the cache.

        The last token is always computed, for its logits; read block by block, so is its block.
        """
        last = max(0, tokens - 1)
        return last // self.block_size * self.block_size if self.by_block else last

    def matched(self, block_hashes: Items[bytes]) -> int:
        """Return how many first tokens of a chain are cached."""
        return self.prefixes.match(block_hashes).tokens

    def explain(
        self, tokens: Items[int], block_hashes: Items[bytes], salt: str = ""
    ) -> tuple[int | None, str]:
        """Return the position at which a prompt could resume, and why no later one.

        None if that is the end of the cached tokens, but for the last token of the prompt.

        Args:
            tokens: the prompt.
            block_hashes: those of its whole blocks.
            salt: the tenant's.
        """
        if self.checkpoints is None and self.windows is None and not self.by_block:
            return None, ""
        match = self.prefixes.match(block_hashes)
        cached = min(match.tokens, max(0, len(tokens) - 1))
        most = min(cached, self.readable_tokens(len(tokens)))
        blocks = match.tokens // self.block_size
        root = block_hashes[blocks - 1] if blocks else self.prefixes.root(salt)
        leaf = self.prefixes.find_partial(match, root, tokens[match.tokens : len(tokens) - 1])
        if leaf is not None and self.resume((*match.path, leaf), leaf.end)[0] == leaf.end:
            return None if self.checkpoints is None else leaf.end, ""
        resumes, _ = self.resume(match.path, most)
        whole = most if self.windows is None else self.windows.resume(match.path, most)
        if self.checkpoints is None and whole == cached:
            return None, ""
        return resumes, _resume_reason(match.tokens, cached, most, whole, resumes)

    def coded(self, segment: Segment, start: int) -> Segment:
        """Return whole blocks in the form in which later blocks read them.

        The form does not depend on the tree's room. They stay raw if MLX found no room for codes.
        """
        if self.requantizer is None:
            return segment
        try:
            coded = self.requantizer.committed(segment, start)
            if coded is segment:
                return segment
            # The index is that of the codes, as it is where they were read from a tier.
            return self.runner.indexed(replace(coded, index=()), start)
        except (MemoryError, RuntimeError):
            self.counters.out_of_memory += 1
            return segment

    def cut_tail(self, slot: int, stop: int, start: int, behind: Segment | None = None) -> Segment:
        """Copy the first columns of a slot of the pool, behind a segment if there is one.

        Args:
            slot: of the sequence.
            stop: columns to copy.
            start: position of the first of them, or of the segment.
            behind: what they come behind.
        """
        if self.runner.selection is None:
            return self.tails.cut(slot, stop, behind)
        own = start + (0 if behind is None else behind.tokens)
        tail = self.runner.indexed(self.tails.cut(slot, stop), own)
        return tail if behind is None else self.runner.indexed(behind, start).join(tail)

    def index(self, path: Path) -> None:
        """Index the keys of nodes that came without: from a tier, or before there was an index.

        A node for whose index there is no room is read whole.
        """
        selection, runner = self.runner.selection, self.runner
        if selection is None:
            return
        for node in path:
            if selection.index.complete(node.segment):
                continue
            nbytes = len(node.tokens) * runner.index_token_bytes
            with suppress(MemoryError, RuntimeError):
                if self.prefixes.make_room(nbytes):
                    indexed = partial(runner.indexed, start=node.start)
                    self.prefixes.exchange(node, indexed, nbytes)

    def tidy(self, node: Node[Segment] | None) -> None:
        """Merge small nodes of a path that a sequence has left; a failure loses nothing."""
        try:
            self.prefixes.tidy(node)
        except (MemoryError, RuntimeError):  # MLX found no room for the copy
            self.counters.out_of_memory += 1

    def close(self) -> None:
        """Free all KV that is not read; tiers write their pending blocks if there is time."""
        if self.tiers is not None:
            self.tiers.close()
        if self.requantizer is not None:
            self.requantizer.release()
        if self.spilling is not None:
            self.spilling.release()
        if self.windows is not None:
            self.windows.release()
        self.prefixes.clear()
        self.tails.drop()

    def shrink_after(self, error: Exception) -> bool:
        """Evict half of the cold nodes if MLX ran out of memory; tell whether it did."""
        if not out_of_memory(error):
            return False
        self.counters.out_of_memory += 1
        self.prefixes.shrink(max(1, self.prefixes.evictable_bytes // 2), "pressure")
        return True


def out_of_memory(error: Exception) -> bool:
    """Tell whether MLX could not allocate; each back end says so in its own words."""
    text = str(error).lower()
    words = ("malloc", "unable to allocate", "out of memory", "bad_alloc", "attempting to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def _resume_reason(held: int, cached: int, readable: int, complete: int, resumes: int) -> str:
    """Return why a prompt can resume no later than at some position.

    Args:
        held: cached tokens of the prompt.
        cached: of these, all but the prompt's last token.
        readable: of these, those that are read as they lie.
        complete: of these, those behind which all windows are complete.
        resumes: the position.
    """
    why = ""
    if readable < cached:
        why = (
            f". The tokens from {readable:,} on are computed again: with kv_cache_quantize_when "
            f"active the block of a prompt's last token is read as it was computed"
        )
    if complete < readable:
        why += (
            f". Sliding-window layers can resume only at token {complete:,} of the {held:,} "
            f"cached: under memory pressure their KV was evicted except at conversation ends and "
            f"branch points. Computing it again caches it again"
        )
    if resumes < complete:
        why += (
            f". Recurrent layers can resume only at token {resumes:,} of the {held:,} cached, "
            f"their deepest checkpoint: checkpoints lie at the ends of turns and chunks, and fewer "
            f"further back"
        )
    return why
