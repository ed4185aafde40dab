"""One answer in the making: its tokens, the places of their KV, and its reservations."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from penstock.attention.attention_plan import DecodeRow
from penstock.engine.handle import Handle, notify
from penstock.engine.model.proposals import Speculation
from penstock.engine.model.sampling import SampledToken, TokenSampler, without_frames
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
"""Most tokens of a prompt that mlx-lm's generate reads at once."""


class DraftedKV(Protocol):
    """KV of a sequence in a draft model, as its place in the batch sees it."""

    def release(self) -> None:
        """Give everything back."""


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One answer in the making. Changed by the engine's thread alone."""

    id: int
    request: Request
    choice: int
    handle: Handle
    sampler: TokenSampler
    text: TextStream
    kv: SequenceKV
    """Keys and values of its tokens."""
    owners: Path
    """Client, salt and request that it belongs to."""
    priority: int
    """Priority of the request; higher goes first."""
    deadline_seconds: float | None
    """Latest end of the answer, in seconds on the engine's clock; None for no limit."""
    state: State = State.WAITING
    """State in the scheduler, its only writer."""
    served_tokens: int = 0
    """Tokens that the model has prefilled for it."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed for this answer."""
    admitted: bool = False
    """Whether it ever had a place."""
    was_preempted: bool = False
    """Whether it lost its place: cached tokens found after that are its own work."""
    tier_lookup: TierLookup | None = None
    """Lookup of its chain in the cold tiers; None without one to wait for or to use."""
    restores: list[Restore] = field(default_factory=list)
    """Reads from the cold tiers that are under way for it, in order."""
    resumed_at: int | None = None
    """Cached tokens before the restore that still waits for its states; None without one."""
    restore_deadline: float = 0.0
    """Seconds on the engine's clock when it stops waiting for blocks and computes them."""
    speculation: Speculation = field(default_factory=Speculation)
    """Proposed tokens, where they pay."""
    draft_kv: DraftedKV | None = None
    """Its keys and values in the draft model; None where nothing was drafted."""
    step_reservation: Reservation | None = None
    """Bytes that its length adds to a step's buffers."""
    reserved_tokens: int = 0
    """Tokens for whose KV, and for whose step, bytes are reserved; set by the memory budget."""
    read_again: bool = False
    """Whether the last pass over it read tokens of its answer again, as those of a prompt."""
    stuck: bool = False
    """Whether it had no room for a token, alone, though it should fit: it gets all room at once."""

    unsent: list[SampledToken] = field(default_factory=list)
    """Tokens of the answer that are not posted yet."""
    fault: Exception | None = None
    """Why its text could not be told; its next token ends it."""

    @property
    def begins(self) -> bool:
        """Whether the answer has tokens, and none of them is posted."""
        return 0 < len(self.unsent) == self.generated_tokens

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
        """Number of tokens that the answer has so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def missing_tokens(self) -> int:
        """Number of tokens that the answer can still get."""
        return self.request.max_tokens + len(self.request.prompt) - len(self.kv.tokens)

    @property
    def reads_logits(self) -> bool:
        """Whether the logits of its prompt are read, not those of its last token alone."""
        return self.kv.prompt_logprobs is not None

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens with KV that it can ever read; the last token's KV is never needed."""
        return self.prompt_tokens + self.request.max_tokens - 1

    @property
    def needs_growth(self) -> bool:
        """Whether the KV of its next token is not reserved."""
        return len(self.tokens) > self.reserved_tokens

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self.kv.tokens

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the whole blocks of `tokens`, as far as they may be shared."""
        return self.kv.block_hashes

    @property
    def position(self) -> int:
        """Number of tokens with computed KV: the position of the next one to compute."""
        return self.kv.position

    @property
    def remaining_tokens(self) -> int:
        """Tokens to prefill; the last one is left to the decode step that needs its logits."""
        return len(self.tokens) - 1 - self.position

    @property
    def next_block_hash(self) -> bytes | None:
        """Hash of the block that the next chunk begins with; None if it shares with no other.

        While a restore waits for its states, the chunk is taken to begin where the restore did.
        """
        if not self.remaining_tokens:
            return None
        return self.kv.block_hash_at(self.position if self.resumed_at is None else self.resumed_at)

    @property
    def whole_stop(self) -> int:
        """Position at which mlx-lm's generate would end the chunk that begins here.

        It reads a prompt without its last token in equal chunks, and all others one at a time.
        """
        start, most = self.position, self.prompt_tokens - 1
        return min(start + WHOLE_CHUNK, most) if start < most else start + 1

    @property
    def follows_prompt(self) -> bool:
        """Whether the next token is chosen behind a prompt, or tokens that were read as one is."""
        return self.read_again or not self.generated_tokens

    def row(self) -> DecodeRow:
        """Return the parts and the slot with which the next token is decoded."""
        kv = self.kv
        assert kv.slot is not None
        return DecodeRow(kv.spans(), kv.position, kv.slot, kv.tail, self.follows_prompt)

    def note_prompt(self) -> None:
        """Tell the handle how much of the prompt is read; its first answer speaks for all."""
        if self.choice == 0:
            done = self.position if self.remaining_tokens else self.prompt_tokens
            self.handle.note_prompt(min(done, self.prompt_tokens), self.cached_tokens)

    def usage(self) -> Usage:
        """Return the token counts so far."""
        return Usage(
            self.prompt_tokens,
            self.cached_tokens,
            self.generated_tokens,
            self.speculation.accepted_tokens,
            self.speculation.rejected_tokens,
        )

    def emit(self, chosen: SampledToken) -> None:
        """Add a token to the answer, to be posted by `send`, or at once if its text may end it."""
        if self.fault is not None:
            raise self.fault
        self.tokens.append(chosen.token)
        self.unsent.append(chosen)
        if self.text.may_stop:
            self._post()

    def send(self) -> None:
        """Post the tokens that are not posted yet; the handle is notified afterwards.

        The answer may be in a pass that computes: a fault of its text waits for the next token.
        """
        try:
            self._post()
        # A boundary: a detokenizer's fault is this answer's, and the engine goes on.
        except Exception as fault:  # noqa: BLE001
            self.fault = without_frames(fault)  # they would keep the step's arrays

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
        """Tell the handle that the answer has ended, at a stop string or a token."""
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
            # A boundary: a detokenizer's fault is this answer's, and the engine goes on.
            except Exception as fault:  # noqa: BLE001
                without_frames(fault)  # they would keep the step's arrays
                error = StepFailed(f"the end of the text failed: {type(fault).__name__}: {fault}")
                reason, stop_at = "error", None
            if self.text.stopped is not None:
                reason, stop_at = "stop", self.text.stopped
        self.handle.post(Finish(self.choice, reason, text, stop_at, self.usage(), error, end_token))
        notify([self.handle])
