"""One answer in the making: its tokens, what of their KV it reads where, and what it may hold."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from penstock.engine.handle import Handle, notify
from penstock.engine.model.sampling import SampledToken, TokenSampler
from penstock.engine.model.text import TextStream
from penstock.engine.offload.engine_tier import Restore
from penstock.engine.offload.tier_group import TierLookup
from penstock.engine.request import Finish, Reason, Request, Token, Usage
from penstock.errors import PenstockError, StepFailed
from penstock.kv.reads import DecodeRow, KVSpan
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState
from penstock.ledger import Reservation
from penstock.prefix.prefixes import Prefixes
from penstock.prefix.tree import Pin

WHOLE_CHUNK = 2_048
"""Tokens of a prompt that mlx-lm's generate reads at once."""


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """What the engine knows of one answer. Changed by the engine's thread alone.

    Its KV lies in three places, one behind the other: the first `cut` tokens of the pinned
    path, its own `runs`, and `tail` columns of a slot in the pool. Nothing of the last two
    outlives its place in the batch.
    """

    id: int
    request: Request
    choice: int
    handle: Handle
    sampler: TokenSampler
    text: TextStream | None
    tokens: list[int]
    """The prompt, and what was generated."""
    block_hashes: list[bytes]
    """Names of the whole blocks of `tokens`, as far as they may be shared."""
    cached_tokens: int = 0
    """Of the prompt, what was not computed for this answer."""
    admitted: bool = False
    """Whether it ever had a place."""
    was_preempted: bool = False
    """Whether it was taken out: what it finds after that is its own work."""
    pin: Pin[Segment] | None = None
    num_cached_tokens: int = 0
    own_spans: list[KVSpan] = field(default_factory=list)
    slot: int | None = None
    tail: int = 0
    recurrent_state: RecurrentState | None = None
    """What the recurrent layers keep of the tokens up to `position`; None if there are no such
    layers, or no such tokens."""
    matched_tokens: int = 0
    """How many tokens the tree held when it was let in: others may part there, too."""
    tier_lookup: TierLookup | None = None
    """How many blocks of its chain the cold tiers have; None if nobody asked."""
    restores: list[Restore] = field(default_factory=list)
    """What is being read for it, in order."""
    resumed_at: int | None = None
    """Where it could go on before something was read for it; `cut` is where the blocks end that
    came, until the states are there as well. None while nothing is read, or without states."""
    restore_deadline: float = 0.0
    """When it begins to compute what is not restored by then, on the engine's clock."""
    kv_reservation: Reservation | None = None
    """Bytes of runs, and of all that it may still compute."""
    step_reservation: Reservation | None = None
    """Bytes that its length adds to a step's buffers."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def generated(self) -> Items[int]:
        """The answer so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def generated_tokens(self) -> int:
        """How many tokens the answer has so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def hold_tokens(self) -> int:
        """First tokens of the prompt that stay held for a while; 0 if that is not asked for."""
        request = self.request
        if not request.hold_seconds:
            return 0
        asked = self.prompt_tokens if request.hold_tokens is None else request.hold_tokens
        return min(asked, self.prompt_tokens)

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV it can ever read; the last one's is never needed."""
        return self.prompt_tokens + self.request.max_tokens - 1

    @property
    def committed_end(self) -> int:
        """Position behind what is read in front of the tail."""
        return self.own_spans[-1].end if self.own_spans else self.num_cached_tokens

    @property
    def position(self) -> int:
        """Tokens whose KV it reads: the position of the next one to compute."""
        return self.committed_end + self.tail

    @property
    def left(self) -> int:
        """Tokens to prefill; the last one is left to the decode step that needs its logits."""
        return len(self.tokens) - 1 - self.position

    @property
    def whole_stop(self) -> int:
        """Where mlx-lm's generate would end the chunk that begins here: it reads a prompt without
        its last token in equal chunks, and all others one at a time."""
        start, most = self.position, self.prompt_tokens - 1
        return min(start + WHOLE_CHUNK, most) if start < most else start + 1

    def last_boundary(self, block_size: int) -> int:
        """Return where its last whole block ends in front of its last token."""
        return (len(self.tokens) - 1) // block_size * block_size

    def parts(self) -> tuple[KVSpan, ...]:
        """Return what lies in front of the tail, in order."""
        path = self.pin.path if self.pin is not None else ()
        shared = [
            KVSpan(node.segment, node.start, min(node.end, self.num_cached_tokens) - node.start)
            for node in path
            if node.start < self.num_cached_tokens
        ]
        return (*shared, *self.own_spans)

    def row(self) -> DecodeRow:
        """Return where the next token is decoded."""
        assert self.slot is not None
        return DecodeRow(self.parts(), self.position, self.slot, self.tail)

    def hash_blocks(self, prefixes: Prefixes[Segment], max_kv_tokens: int) -> None:
        """Extend the chain of names to the whole blocks that there are now."""
        size = prefixes.block_size
        blocks = min(len(self.tokens), max_kv_tokens) // size
        if blocks > len(self.block_hashes):
            rest = self.tokens[len(self.block_hashes) * size : blocks * size]
            after = self.block_hashes[-1] if self.block_hashes else None
            self.block_hashes += prefixes.block_hashes(rest, self.request.salt, after=after)

    def spare(self, nbytes: int) -> None:
        """Give back so many bytes of what it may still compute."""
        assert self.kv_reservation is not None
        self.kv_reservation.resize(max(0, self.kv_reservation.nbytes - nbytes))

    def usage(self) -> Usage:
        """Return what it took so far."""
        return Usage(self.prompt_tokens, self.cached_tokens, self.generated_tokens)

    def emit(self, chosen: SampledToken) -> None:
        """Add a token to the answer and post it; who listens is told after the step."""
        self.tokens.append(chosen.token)
        text = self.text.push(chosen.token) if self.text is not None else ""
        self.handle.post(Token(self.choice, chosen.token, text, chosen.logprob, chosen.top))

    def end(
        self,
        reason: Reason,
        *,
        stop: str | int | None = None,
        error: PenstockError | None = None,
    ) -> None:
        """Tell the handle that the answer has ended."""
        text = ""
        if self.text is not None and error is None:
            try:
                text = self.text.finish()
            # A boundary: a detokenizer's fault is this answer's, and the engine goes on.
            except Exception as fault:  # noqa: BLE001
                error = StepFailed(f"the end of the text failed: {type(fault).__name__}: {fault}")
                reason, stop = "error", None
            if self.text.stopped is not None:
                reason, stop = "stop", self.text.stopped
        self.handle.post(Finish(self.choice, reason, text, stop, self.usage(), error))
        notify([self.handle])
