"""Queuing of requests: final checks, and one sequence per answer.

Handle ──> tokens and grammar checked ──> block hashes ──> fits at all? room in the queue?
──> sequences in the queue, and a lookup of their blocks in the cold tiers
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from penstock.engine.handle import Handle
from penstock.engine.model.min_tokens import MinTokens
from penstock.engine.model.prompt_logprobs import LastOutput, PromptLogprobs
from penstock.engine.model.reasoning import BehindReasoning, ReasoningLimit
from penstock.engine.model.sampling import NO_RULE, Rule, TokenSampler
from penstock.engine.model.span_inputs import Inputs, SpanFeatures
from penstock.engine.model.text_decoding import TokensOnly
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.request import Request
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.budget import MemoryBudget
from penstock.engine.schedule.fair_shares import Path
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.scheduler import Scheduler
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.errors import EngineStopped, SettingError
from penstock.plurals import counted


class Intake:
    """Creates and queues the sequences of requests. Engine thread only, except where noted.

    Args:
        clock: returns seconds, for deadlines.
    """

    def __init__(
        self,
        text: TokensOnly,
        *,
        stores: KVStores,
        tiers: TierGroup,
        scheduler: Scheduler[Sequence],
        admission: Admission,
        budget: MemoryBudget,
        features: SpanFeatures,
        clock: Callable[[], float],
    ) -> None:
        self.text = text
        self.next_id = 0
        self.draining = False
        """Whether new requests are refused."""
        self.vocabulary_size = stores.figures.vocabulary_size
        limit_bytes = stores.prefixes.ledger.limit_bytes
        self.grammars = text.grammars(self.vocabulary_size, limit_bytes)
        self._stores = stores
        self._tiers = tiers
        self._scheduler = scheduler
        self._admission = admission
        self._budget = budget
        self._features = features
        self._adapters = stores.figures.adapters
        self._clock = clock

    def enqueue(self, handle: Handle) -> list[bytes]:
        """Queue a sequence for each answer of a handle's request, all or none.

        Returns:
            Hashes of the prompt's whole blocks that may be shared.

        Raises:
            NeverFits: prompt and answer would not fit even if everything else were evicted.
            QueueFull: the queue is full.
            SettingError: a token is outside the vocabulary, or the grammar is invalid.
            EngineStopped: the engine is draining.
        """
        if self.draining:
            raise EngineStopped("the engine is shutting down and accepts no more requests")
        request = handle.request
        self.check_tokens(request.prompt)
        self.check_tokens(request.prediction)
        self.check_tokens(request.candidates)
        samplers = self._samplers(handle)
        # Only the first sequence computes the log-probabilities of the shared prompt.
        handle.prompt_logprobs = logprobs = self._prompt_logprobs(request)
        inputs = self._features.inputs_of(request)
        keyed = list(request.keyed_prompt)
        first = self._sequence(handle, 0, samplers[0], keyed, [], inputs[0], logprobs)
        first.kv.hash_blocks()
        self._budget.check_fits(first)
        self._admission.make_queue_room(first.owners, request.n)
        # The sequences share lists of tokens and hashes until they are admitted.
        others = [
            self._sequence(
                handle, choice, sampler, first.tokens, first.block_hashes, inputs[choice]
            )
            for choice, sampler in enumerate(samplers[1:], 1)
        ]
        sequences = [first, *others]
        self._admission.add(sequences)
        if self._tiers and first.block_hashes and request.cache_prompt:
            lookup = self._tiers.ask(self._restorable(first.block_hashes, request.prompt))
            for sequence in sequences:
                # Tiers store no logits: if they are needed, the prompt must be computed.
                sequence.tier_lookup = None if sequence.reads_logits else lookup
        self._stores.counters.requests += len(sequences)
        return first.block_hashes

    def keyed(self, request: Request) -> Request:
        """Return a request with a salt specific to its adapter. Callable from any thread.

        Raises:
            SettingError: there is no such adapter.
        """
        salt = self._adapters.salted(request.salt, request.adapter)
        return request if salt == request.salt else request.model_copy(update={"salt": salt})

    def check_queue(self, handles: Items[Handle]) -> None:
        """Raise QueueFull if the requests do not fit even by displacing waiting ones."""
        answers = sum(handle.request.n for handle in handles)
        self._scheduler.to_displace(self._owners(handles[0].request), answers)

    def _owners(self, request: Request, choice: int = 0) -> Path:
        """Return the client, the tenant's salt and the request group that own a sequence."""
        return (request.client, request.tenant, request.group or self.next_id - choice)

    def _restorable(self, block_hashes: Items[bytes], prompt: Items[int]) -> Items[bytes]:
        """Return the hashes of a prompt's blocks to look up in the cold tiers.

        With recurrent layers, blocks must end before the last token: it is always computed, so
        states after it cannot be used.
        """
        if not self._stores.figures.is_recurrent:
            return block_hashes
        num_blocks = self._stores.readable_tokens(len(prompt)) // self._stores.block_size
        return block_hashes[:num_blocks]

    def check_tokens(self, tokens: Items[int]) -> None:
        """Raise SettingError if a token is outside the vocabulary."""
        size = self.vocabulary_size
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < size:
                raise SettingError(
                    f"the prompt has token {token}; the model knows {counted(size, 'token')}"
                )

    def constraint(self, request: Request) -> Rule:
        """Return the initial constraint of a request's answers. Callable from any thread.

        Raises:
            SettingError: the grammar is invalid, the engine has no tokenizer, or a token of
                `reasoning.end` is outside the vocabulary.
        """
        limit = self._reasoning(request)
        if request.grammar is None:
            return limit or self._min_tokens(request)
        grammar = self.grammars.constraint(request.grammar)
        return grammar if limit is None else BehindReasoning(limit, grammar)

    def account_grammars(self, reserve: Callable[[int], None], *, alone: bool) -> None:
        """Reserve the memory of compiled grammars, and evict them if memory is short.

        With several ranks none are evicted, because all ranks must reserve the same bytes.
        """
        self.grammars.reserve = reserve
        if alone:
            self._budget.evict_grammars = self.grammars.evict

    def _reasoning(self, request: Request) -> ReasoningLimit | None:
        if request.reasoning is None:
            return None
        size, last = self.vocabulary_size, max(request.reasoning.end)
        if last >= size:
            raise SettingError(
                f"reasoning.end has token {last}; the model knows {counted(size, 'token')}"
            )
        return ReasoningLimit(request.reasoning)

    def _min_tokens(self, request: Request) -> Rule:
        if not request.min_tokens:
            return NO_RULE
        ends = () if request.ignore_eos else self.text.ends
        return MinTokens(request.min_tokens, frozenset((*ends, *request.stop_tokens)))

    def _prompt_logprobs(self, request: Request) -> PromptLogprobs | None:
        """Return an empty collector of a prompt's log-probabilities; None if not requested."""
        if request.embeds:
            return LastOutput(request.prompt)
        if request.prompt_logprobs is None:
            return None
        size = self.vocabulary_size
        top = size if request.prompt_logprobs == -1 else min(request.prompt_logprobs, size)
        start = max(0, request.logprobs_from - 1)
        return PromptLogprobs(request.prompt, top, start=start, candidates=request.candidates)

    def _samplers(self, handle: Handle) -> list[TokenSampler]:
        request, rule = handle.request, handle.constraint or self.constraint(handle.request)
        sampling = request.sampling.with_seed()
        return [
            TokenSampler(
                sampling,
                request.prompt,
                choice,
                self.vocabulary_size,
                constraint=rule.copy(),
            )
            for choice in range(request.n)
        ]

    def _sequence(
        self,
        handle: Handle,
        choice: int,
        sampler: TokenSampler,
        tokens: list[int],
        block_hashes: list[bytes],
        inputs: Inputs,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Sequence:
        request = handle.request
        deadline = None
        if request.timeout_seconds is not None:
            deadline = self._clock() + request.timeout_seconds
        sequence = Sequence(
            id=self.next_id,
            request=request,
            choice=choice,
            handle=handle,
            sampler=sampler,
            adapter=self._adapters.number(request.adapter),
            text=self.text.stream(request),
            owners=self._owners(request, choice),
            inputs=inputs,
            priority=request.priority,
            deadline_seconds=deadline,
            kv=SequenceKV(
                self._stores,
                tokens,
                block_hashes,
                salt=request.salt,
                hold_tokens=request.held_tokens,
                hold_seconds=request.hold_seconds,
                transient=not request.cache_prompt,
                prompt_logprobs=prompt_logprobs,
            ),
        )
        self.next_id += 1
        return sequence
