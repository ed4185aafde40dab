"""Sequence: one answer being generated, with its tokens, KV and reservations."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from penstock.attention.attention_plan import DecodeRow
from penstock.engine.handle import Handle, notify
from penstock.engine.model.proposals import Speculation
from penstock.engine.model.sampling import SampledToken, TokenSampler, without_frames
from penstock.engine.model.span_inputs import TOKENS_ONLY, Inputs
from penstock.engine.model.text import TextStream
from penstock.engine.offload.engine_tier import Restore
from penstock.engine.offload.tier_group import TierLookup
from penstock.engine.request import Finish, Reason, Request, Token, Usage
from penstock.engine.schedule.fair_shares import Path
from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.errors import PenstockError, StepFailed
from penstock.ledger import Reservation

WHOLE_CHUNK = 2_048
"""Maximum number of prompt tokens that mlx-lm's generate prefills at once."""


class DraftedKV(Protocol):
    def release(self) -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One answer being generated. Changed only by the engine's thread."""

    id: int
    request: Request
    choice: int
    handle: Handle
    sampler: TokenSampler
    text: TextStream
    kv: SequenceKV
    owners: Path
    """Client, salt and request to which the sequence belongs."""
    priority: int
    deadline_seconds: float | None
    """Time on the engine's clock at which the answer times out; None means never."""
    adapter: int = 0
    """Number of the adapter to apply; 0 means none."""
    inputs: Inputs = TOKENS_ONLY
    """Model inputs for the tokens, such as embeddings of images."""
    ready: bool = True
    """Whether the inputs of the next chunk are available."""
    state: State = State.WAITING
    """State, written only by the scheduler."""
    served_tokens: int = 0
    """Number of tokens prefilled so far, including recomputed ones."""
    cached_tokens: int = 0
    """Number of prompt tokens read from the cache."""
    admitted: bool = False
    """Whether the sequence was ever admitted."""
    was_preempted: bool = False
    """Whether the sequence was ever preempted; it then finds its own tokens in the cache."""
    tier_lookup: TierLookup | None = None
    """Lookup of the blocks in the cold tiers; None if not needed."""
    restores: list[Restore] = field(default_factory=list)
    """Pending reads from cold tiers, in order."""
    resumed_at: int | None = None
    """Number of cached tokens before a restore whose states have not arrived; else None."""
    restore_deadline: float = 0.0
    """Time on the engine's clock after which blocks that have not arrived are computed."""
    speculation: Speculation = field(default_factory=Speculation)
    """Controls the number of proposed tokens."""
    draft_kv: DraftedKV | None = None
    """KV of the draft model; None if nothing was drafted."""
    step_reservation: Reservation | None = None
    reserved_tokens: int = 0
    """Number of tokens whose bytes are reserved; set by the memory budget."""
    read_again: bool = False
    """Whether the last pass recomputed generated tokens as part of a prefill."""
    unmixed: bool = False
    """Whether the sequence is excluded from shared passes, because one failed.

    If it fails again, in a pass of its own, only its answer fails.
    """
    stuck: bool = False
    """Out of memory while it was the only sequence; readmitted without a shared path."""

    unsent: list[SampledToken] = field(default_factory=list)
    """Generated tokens not delivered yet."""
    fault: Exception | None = None
    """Error of the detokenizer; raised at the next token."""

    @property
    def begins(self) -> bool:
        """Whether tokens were generated and none delivered."""
        return 0 < len(self.unsent) == self.generated_tokens

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> Items[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def missing_tokens(self) -> int:
        return self.request.max_tokens + len(self.request.prompt) - len(self.kv.tokens)

    @property
    def reads_logits(self) -> bool:
        """Whether the logits of all prompt tokens are needed."""
        return self.kv.prompt_logprobs is not None

    @property
    def step_room(self) -> int:
        """Maximum number of tokens that a step may add."""
        reserved = self.reserved_tokens - self.position
        return min(self.kv.free_columns, reserved, self.missing_tokens)

    def ends_with(self, token: int, ends: Container[int]) -> bool:
        """Return whether a generated token ends the answer.

        Args:
            ends: tokens that end answers unless the request ignores them.
        """
        request = self.request
        if token in ends and (not request.ignore_eos or request.grammar is not None):
            return True
        return token in request.stop_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Maximum number of tokens with KV; the last token's KV is never needed."""
        return self.prompt_tokens + self.request.max_tokens - 1

    @property
    def needs_growth(self) -> bool:
        """Whether the KV of its next token is still unreserved."""
        return len(self.tokens) > self.reserved_tokens

    @property
    def tokens(self) -> list[int]:
        return self.kv.tokens

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the whole blocks of `tokens` that may be shared."""
        return self.kv.block_hashes

    @property
    def position(self) -> int:
        """Number of tokens with computed KV; the position of the next one."""
        return self.kv.position

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens to prefill; the last one is left to the decode step."""
        return len(self.tokens) - 1 - self.position

    @property
    def next_block_hash(self) -> bytes | None:
        """Hash of the block at which the next chunk starts; None if it cannot be shared."""
        if not self.remaining_tokens:
            return None
        return self.kv.block_hash_at(self.position if self.resumed_at is None else self.resumed_at)

    @property
    def whole_stop(self) -> int:
        """Position at which mlx-lm's generate would end the chunk that starts here."""
        start, last = self.position, self.prompt_tokens - 1
        return min(start + WHOLE_CHUNK, last) if start < last else start + 1

    @property
    def follows_prompt(self) -> bool:
        """Whether the next token is sampled right after a prefill."""
        return self.read_again or not self.generated_tokens

    def row(self) -> DecodeRow:
        """Return the row of the decode batch for the next token."""
        kv = self.kv
        assert kv.slot is not None
        shift = self.inputs.shift
        follows = self.follows_prompt
        return DecodeRow(
            kv.spans(), kv.position, kv.slot, kv.tail, follows, shift=shift, adapter=self.adapter
        )

    def note_phase(self) -> None:
        if self.choice == 0:
            self.handle.note_phase(self.state.value)

    def note_prompt(self) -> None:
        if self.choice == 0:
            done = self.position if self.remaining_tokens else self.prompt_tokens
            self.handle.note_prompt(min(done, self.prompt_tokens), self.cached_tokens)

    def usage(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.cached_tokens,
            self.generated_tokens,
            self.speculation.accepted_tokens,
            self.speculation.rejected_tokens,
        )

    def emit(self, chosen: SampledToken) -> None:
        """Append a token; it is delivered by `send`, or at once if its text may stop the answer."""
        if self.fault is not None:
            raise self.fault
        self.tokens.append(chosen.token)
        self.unsent.append(chosen)
        if self.text.may_stop:
            self._post()

    def send(self) -> None:
        """Deliver the pending tokens; the caller notifies the handle afterwards."""
        try:
            self._post()
        # An error of the detokenizer fails only this answer.
        except Exception as fault:  # noqa: BLE001
            self.fault = without_frames(fault)  # they would keep the step's arrays alive

    def _post(self) -> None:
        unsent, self.unsent = self.unsent, []
        for chosen in unsent:
            text = self.text.push(chosen.token)
            self.handle.post(Token(self.choice, chosen.token, text, chosen.logprob, chosen.top))

    def end(
        self,
        reason: Reason,
        *,
        stop: str | SampledToken | None = None,
        error: PenstockError | None = None,
    ) -> None:
        """Deliver the end of the answer to the handle, and notify the handle.

        Args:
            reason: finish reason.
            stop: stop string or token that ended the answer, if any.
            error: error of a failed answer.
        """
        self.send()
        text, end_token = "", None
        if isinstance(stop, SampledToken):
            if stop.logprob is not None:
                end_token = Token(self.choice, stop.token, "", stop.logprob, stop.top)
            stop_at: str | int | None = stop.token
        else:
            stop_at = stop
        if error is None:
            try:
                if self.fault is not None:
                    raise self.fault
                if stop_at in self.request.stop_tokens and self.request.keep_stop:
                    text = self.text.push(int(stop_at))
                text += self.text.finish(cut=reason != "stop")
            # An error of the detokenizer fails only this answer.
            except Exception as fault:  # noqa: BLE001
                without_frames(fault)  # they would keep the step's arrays alive
                error = StepFailed(f"the end of the text failed: {type(fault).__name__}: {fault}")
                reason, stop_at = "error", None
            if self.text.stopped is not None:
                reason, stop_at = "stop", self.text.stopped
        self.handle.post(Finish(self.choice, reason, text, stop_at, self.usage(), error, end_token))
        notify([self.handle])
