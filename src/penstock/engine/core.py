"""The engine without a thread: one step at a time, everything in the caller's hands.

    submit ──> scheduler ──admit: a path is pinned, bytes are reserved, a slot is taken
                 │
    step:   decode all that run ──> choose ──> say; a full tail becomes a run, a full block a node
            prefill some chunks ──> commit at once, so that others share them meanwhile

A step that fails changes nothing that counts: what it wrote lies behind the visible ends.

Here an engine is made, asked and told when to do the next step. What a step does is elsewhere:
`admission` lets in and takes out, `executor` runs the model, `sequence_kv` makes nodes of what was
computed,
`restoring` reads from the disk; `budget` says what a sequence may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from copy import copy
from typing import Any
from weakref import finalize

from penstock.engine.handle import Handle
from penstock.engine.memory_pressure import bytes_over, give_back, share_mlx_cache
from penstock.engine.model.constraint import Grammars
from penstock.engine.model.executor import ModelExecutor
from penstock.engine.model.reasoning import ReasoningLimit
from penstock.engine.model.runner import Runner
from penstock.engine.model.sampling import Rule, TokenSampler
from penstock.engine.model.text import Detokenizer, TextStream
from penstock.engine.offload.prefill_rate import PrefillRate
from penstock.engine.offload.restoring import Restoring
from penstock.engine.offload.tier_group import TierGroup, open_tiers
from penstock.engine.ranks.process_group import Command, ProcessGroup, SingleProcess
from penstock.engine.request import Request
from penstock.engine.retention.requantize import Requantizer
from penstock.engine.retention.window_relief import WindowRelief
from penstock.engine.retention.windows import Windows, windows_of
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.budget import MemoryBudget, reserve_fixed, weight_bytes
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.scheduler import PLACED, Scheduler, State
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.engine.settings import checked, fitting, identity
from penstock.engine.stats import Cleared, Counters
from penstock.engine.view import EngineView
from penstock.errors import EngineStopped, LedgerFull, NeverFits, PenstockError, SettingError
from penstock.heap import keep_freed_memory
from penstock.kv import backend
from penstock.kv.block_format import BlockFormats
from penstock.kv.segment import Segment
from penstock.ledger import Kind, Ledger
from penstock.memory import format_bytes
from penstock.prefix.checkpoints import Checkpoints
from penstock.prefix.prefixes import MAX_MERGE_TOKENS, Prefixes, remembered_nodes

PRESSURE_SECONDS = 1.0
"""How often the machine's memory is looked at."""


class Core:
    """Sequences, tree and ledger around one model. Not thread-safe; see `Engine`.

    Args:
        model: mlx-lm's.
        tokenizer: mlx-lm's wrapper; None gives answers without text, and no end of sequence.
        clock: seconds, for deadlines and recency.
        group: who runs the same engine over the other parts of the model, if it was divided.
        fingerprint: what must be equal for KV to be reusable, besides the tokens.
        settings: see `config.EngineSettings`; `memory_limit` may be a text like "16GB".

    Raises:
        ModelError: the engine cannot run this model.
        NeverFits: weights and buffers alone are over the limit.
        SettingError: a setting is out of its range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        group: ProcessGroup | None = None,
        fingerprint: str = "",
        **settings: Any,
    ) -> None:
        self.limits = checked(settings)
        self.group = SingleProcess(clock) if group is None else group
        if backend.current().on_heap:
            keep_freed_memory(self.limits.memory_limit)
        self.tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        self.clock = self.group.clock
        self.counters = Counters()
        self.ledger = Ledger(self.limits.memory_limit)
        try:
            self._make(model, fingerprint)
        except LedgerFull as error:
            needed, limit = self.ledger.used_bytes + error.needed_bytes, self.ledger.limit_bytes
            raise NeverFits(
                f"weights, tails, the buffers of a step and the index need "
                f"{format_bytes(needed)} and more; the limit is {format_bytes(limit)}. Raise "
                f"memory_limit, or lower max_batch_size or prefill_chunk",
                needed,
                limit,
                limit,
            ) from None
        self._connect()
        self._next_id = 0
        self._draining = False
        self._closed = False
        self._settled: tuple[int, ...] = ()
        """After the last step, what must be equal on all ranks."""
        self._looked_seconds = -PRESSURE_SECONDS
        self.grammars = (
            None if tokenizer is None else Grammars(tokenizer, self.runner.vocabulary_size)
        )
        share_mlx_cache(id(self), self.budget.step_bytes)
        finalize(self, share_mlx_cache, id(self), None)  # also of a core that nobody closed

    # ---- making it

    def _make(self, model: Any, fingerprint: str) -> None:
        """Make what takes memory, each part after its bytes were reserved."""
        self.tiers: TierGroup | None = None
        weights = weight_bytes(model)
        # Who has the least room decides for all, who hold the same beside their weights.
        room = self.group.least(self.limits.memory_limit - weights)
        self.ledger.set_limit(max(0, weights + room))
        counted = self.ledger.reserve(Kind.WEIGHTS, weights)
        self.runner = Runner(
            model,
            max_kv_size=self.limits.max_kv_size,
            keep=self.limits.keep_tokens,
            ranks=self.group.size,
        )
        self.group.check_equal("what the layers of a part keep of a token", self.runner.keeps)
        self.limits = fitting(self.limits, self.runner)
        self.estimator = MemoryEstimator(self.runner, self.limits)
        aside, self.tails = reserve_fixed(
            counted, self.ledger, self.limits, self.runner, self.estimator, self.group
        )
        rule, fingerprint = identity(
            model, self.limits, self.runner, self.group, fingerprint=fingerprint
        )
        self._make_tree(fingerprint)
        self.requantizer = (
            None
            if rule is None
            else Requantizer(rule, self.prefixes, self.runner.shapes, self.limits)
        )
        self.prefill_rate = PrefillRate(self.group.mean(self.estimator.prefill_token_seconds))
        self.tiers = open_tiers(
            self.limits,
            self.prefixes,
            BlockFormats(self.runner.shapes, self.limits.block_size, rule),
            self.prefill_rate,
            in_place=not backend.current().own_memory,
            state_form=self.runner.state_form if self.runner.is_recurrent else None,
            group=self.group,
        )
        parts = (self.tiers, self.requantizer, self.windows)
        self.budget = MemoryBudget(
            aside,
            self.estimator,
            self.prefixes,
            copying=[part for part in parts if part is not None],
            token_bytes=self.runner.token_bytes,
        )

    def _make_tree(self, fingerprint: str) -> None:
        """Make the tree, and what minds the states and the windows in it."""
        coded = self.limits.kv_cache_quantization is not None
        self.prefixes: Prefixes[Segment] = Prefixes(
            self.ledger,
            block_size=self.limits.block_size,
            fingerprint=fingerprint,
            clock=self.clock,
            # Ranks whose weights differ have limits that do.
            remembered=remembered_nodes(self.group.least(self.ledger.limit_bytes)),
            # Of codes, more tokens: what takes time is the number of parts that are read.
            max_merge_bytes=MAX_MERGE_TOKENS * self.runner.token_bytes if coded else 0,
        )
        self.checkpoints = (
            Checkpoints(self.prefixes, self.runner.state_bytes)
            if self.runner.is_recurrent
            else None
        )
        windows = windows_of(self.runner.attention_windows, self.limits.max_kv_size)
        self.windows = None
        if windows:
            self.windows = Windows(self.prefixes, windows, self.runner.shapes)

    def _connect(self) -> None:
        """Make what runs sequences on the parts that there are."""
        size, most = self.limits.block_size, self.limits.max_kv_size
        self.scheduler: Scheduler[Sequence] = Scheduler(
            self.limits.max_batch_size, self.limits.step_tokens, size, self.limits.max_queue
        )
        shared = 0 if self.runner.fitness.whole else most // size * size
        self.stores = KVStores(
            prefixes=self.prefixes,
            checkpoints=self.checkpoints,
            windows=self.windows,
            requantizer=self.requantizer,
            tiers=self.tiers,
            tails=self.tails,
            runner=self.runner,
            counters=self.counters,
            shared_tokens=shared,
        )
        self.admission = Admission(
            self.scheduler,
            budget=self.budget,
            stores=self.stores,
            tiers=self.tiers,
            counters=self.counters,
        )
        if self.windows is not None:
            written = self.tiers if self.group.size == 1 else None
            self.prefixes.relief = WindowRelief(self.windows, self.admission, written)
        self.executor = ModelExecutor(
            self.runner,
            self.tails,
            admission=self.admission,
            prefixes=self.prefixes,
            group=self.group,
            prefill_rate=self.prefill_rate,
            counters=self.counters,
            ends=frozenset(() if self.tokenizer is None else self.tokenizer.eos_token_ids),
            by_block=self.stores.by_block,
        )
        self.restoring = None
        if self.tiers is not None:
            self.restoring = Restoring(
                self.tiers,
                self.prefixes,
                self.scheduler,
                admission=self.admission,
                stores=self.stores,
                budget=self.budget,
                clock=self.clock,
            )
        self.view = EngineView(
            limits=self.limits,
            stores=self.stores,
            scheduler=self.scheduler,
            admission=self.admission,
            budget=self.budget,
            estimator=self.estimator,
            tokenizer=self.tokenizer,
        )

    # ---- requests

    def submit(self, request: Request) -> Handle:
        """Take a request in.

        Raises:
            NeverFits: its prompt and its answers would not fit beside the weights.
            QueueFull: too many are waiting.
            SettingError: a token that the model does not have, or a grammar that is none.
            EngineStopped: it is being drained.
        """
        handle = Handle(request, self.cancel)
        self.enqueue(handle)
        return handle

    def enqueue(self, handle: Handle) -> None:
        """Take in the request of a handle; raises as `submit` does."""
        self.group.note("enqueue", request=handle.request)
        if self._draining:
            raise EngineStopped("the engine is shutting down and takes no more requests")
        request = handle.request
        size = self.runner.vocabulary_size
        self.check_tokens(request.prompt)
        sampling = request.sampling.with_seed()
        begun = handle.constraint or self.constraint(request)

        def sampler(choice: int) -> TokenSampler:
            constraint = None if begun is None else begun.copy()
            return TokenSampler(sampling, request.prompt, choice, size, constraint=constraint)

        first = self._sequence(handle, 0, sampler(0), list(request.prompt), [])
        first.kv.hash_blocks()
        self.budget.check_fits(first)
        self.scheduler.check_room(request.n)
        others = range(1, request.n)  # they share tokens and names until they are let in
        sequences = [
            first,
            *(
                self._sequence(handle, i, sampler(i), first.tokens, first.block_hashes)
                for i in others
            ),
        ]
        self.admission.add(sequences)
        if self.tiers is not None and first.block_hashes:
            on_disk = self.tiers.ask(first.block_hashes)
            for sequence in sequences:
                sequence.tier_lookup = on_disk
        self.counters.requests += len(sequences)

    def check_tokens(self, tokens: Items[int]) -> None:
        """Raise SettingError if the model does not know all of these tokens."""
        size = self.runner.vocabulary_size
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < size:
                raise SettingError(f"the prompt has token {token}; the model knows {size} tokens")

    def constraint(self, request: Request) -> Rule | None:
        """Return a new place at the beginning of what an answer must follow; any thread may ask.

        Raises:
            SettingError: the grammar is none, there is no tokenizer to follow it with, or the
                model does not have a token of the mark that ends reasoning.
        """
        if request.reasoning is not None:
            size = self.runner.vocabulary_size
            if max(request.reasoning.end) >= size:
                raise SettingError(
                    f"reasoning.end has token {max(request.reasoning.end)}; the model knows "
                    f"{size} tokens"
                )
            return ReasoningLimit(request.reasoning)
        if request.grammar is None:
            return None
        if self.grammars is None:
            raise SettingError("a grammar needs a tokenizer, and the engine has none")
        return self.grammars.constraint(request.grammar)

    def cancel(self, handle: Handle) -> None:
        """End a request's answers that have not ended; what was computed stays in the tree."""
        self._cancel([s.id for s in self.admission.sequences.values() if s.handle is handle])

    def _cancel(self, ids: Items[int]) -> None:
        self.group.note("cancel", ids=list(ids))
        for sequence_id in ids:
            self.admission.finish(
                self.admission.sequences[sequence_id], lambda s: s.end("cancelled")
            )

    def drain(self) -> None:
        """Take no more requests in; those that are open go on to their end."""
        self.group.note("drain")
        self._draining = True

    def close(self, error: PenstockError | None = None) -> None:
        """Cancel everything and let go of it; what stays counted are weights and empty index.

        Args:
            error: what open answers end with, if they were not cancelled but lost.
        """
        if error is None and not self._closed:  # else the end of this process tells the others
            self.group.note("close")
            self._begin()
        self._let_go(error)

    def _let_go(self, error: PenstockError | None) -> None:
        self._closed = True
        for sequence in list(self.admission.sequences.values()):
            if error is None:
                self.admission.finish(sequence, lambda s: s.end("cancelled"))
            else:
                self.admission.fail(sequence, error)
        if self.tiers is not None:
            self.tiers.close()
        if self.requantizer is not None:
            self.requantizer.release()
        if self.windows is not None:
            self.windows.release()
        self.prefixes.clear()
        self.tails.drop()
        self.budget.close()
        share_mlx_cache(id(self), None)

    # ---- the step

    def step(self) -> bool:
        """Run one step: let in, decode, prefill, restore. False if there was nothing to do."""
        self._begin()
        if self._closed:  # by rank 0
            return False
        try:
            return self._step()
        finally:
            self._settled = (
                self.ledger.used_bytes - self.budget.weights_bytes,
                self._next_id,
                len(self.admission.sequences),
                self.prefixes.tree.tokens,
            )

    def _begin(self) -> None:
        self.group.begin(self._settled, self._do)

    def _do(self, command: Command) -> None:
        """Do what was asked of rank 0."""
        given = command.arguments
        if command.name == "enqueue":
            with suppress(PenstockError):  # rank 0 has told who asked
                self.enqueue(Handle(Request(**given["request"]), self.cancel))
        elif command.name == "cancel":
            self._cancel(given["ids"])
        elif command.name == "close":
            self._let_go(None)
        else:
            {"drain": self.drain, "clear": self.clear}[command.name]()

    def _step(self) -> bool:
        self.admission.drop_overdue(self.clock())
        self._yield_to_others()
        self.admission.admit()
        if self.restoring is not None:
            self.restoring.take()
        self.admission.catch_up()
        if self.restoring is not None:
            self.restoring.begin()
        plan = self.scheduler.plan()
        if plan.decode:
            self.executor.decode(list(plan.decode))
        for chunk in plan.prefill:
            # A decode step that ran out of memory preempts sequences.
            if chunk.sequence.state is State.PREFILLING:
                self.executor.prefill(chunk.sequence, chunk.tokens)
        busy = bool(plan.decode or plan.prefill)
        if self.requantizer is not None:
            busy = self._quantize(self.requantizer) or busy
        if self.tiers is None:
            return busy
        # Who is told something by the disk just now is not let go on before the next step.
        restoring = bool(self.scheduler.sequences(State.RESTORING))
        return self.tiers.work(busy=busy) or busy or restoring

    def _quantize(self, requantizer: Requantizer) -> bool:
        """Hold a node in fewer bits that is due: one a step, so that nobody waits for more."""
        preempted = (
            s for s in self.admission.sequences.values() if s.was_preempted and s.kv.pin is None
        )
        try:
            node = requantizer.work(self.prefixes.match(s.block_hashes).path for s in preempted)
        except (MemoryError, RuntimeError):  # MLX found no room for the codes
            self.counters.out_of_memory += 1
            return True
        self.stores.tidy(node)
        return node is not None

    @property
    def closed(self) -> bool:
        """Whether it was closed, by its owner or by rank 0."""
        return self._closed

    def preload(self) -> int:
        """Read from the disk what is worth most, as long as there is free memory; nothing gives
        way for it. Returns the tokens that are held more than before."""
        if self.tiers is None or self.group.size > 1:  # each rank would wait for its own disk
            return 0
        return self.tiers.preload(self.checkpoints)

    # ---- limits

    def set_limit(self, limit_bytes: int) -> None:
        """Change the memory limit; what is over it goes at once: cold nodes, then preempted work.

        Raises:
            NeverFits: weights, tails and buffers alone are over it; nothing is changed then.
            SettingError: the model is divided among several processes.
        """
        if self.group.size > 1:
            raise SettingError("the memory limit of a model on several machines stays as it is")
        self.budget.check_limit(limit_bytes)
        over = self.ledger.set_limit(limit_bytes)
        over -= self.prefixes.shrink(over, "limit")
        for placed in [s for state in PLACED for s in self.scheduler.sequences(state)[::-1]]:
            over = self.ledger.used_bytes - limit_bytes
            if over <= 0:
                break
            self.admission.preempt(placed)
            self.prefixes.shrink(self.ledger.used_bytes - limit_bytes, "limit")
        for sequence in self.scheduler.in_line():
            try:
                self.budget.check_fits(sequence)
            except NeverFits as error:
                self.admission.fail(sequence, error)
        give_back()

    def clear(self) -> Cleared:
        """Evict all prefixes that no sequence reads, and return how much that was.

        Their memory goes back to the system. Blocks on the disk go when the cold tier's thread
        comes to it.
        """
        self.group.note("clear")
        tree = self.prefixes.tree
        nodes, nbytes = len(tree), tree.nbytes
        self.prefixes.clear()
        if self.tiers is not None:
            self.tiers.clear()
        give_back()
        return Cleared(nodes - len(tree), nbytes - tree.nbytes)

    # ---- parts

    def _sequence(
        self,
        handle: Handle,
        choice: int,
        sampler: TokenSampler,
        tokens: list[int],
        block_hashes: list[bytes],
    ) -> Sequence:
        request = handle.request
        text, deadline = None, None
        if request.timeout_seconds is not None:
            deadline = self.clock() + request.timeout_seconds
        if self.tokenizer is not None:
            text = TextStream(self._new_detokenizer(), request.stop)
        sequence = Sequence(
            id=self._next_id,
            request=request,
            choice=choice,
            handle=handle,
            sampler=sampler,
            text=text,
            deadline_seconds=deadline,
            kv=SequenceKV(
                self.stores,
                tokens,
                block_hashes,
                salt=request.salt,
                hold_tokens=request.held_tokens,
                hold_seconds=request.hold_seconds,
            ),
        )
        self._next_id += 1
        return sequence

    def _new_detokenizer(self) -> Detokenizer:
        """Return one for an answer. The first is made by mlx-lm, from the whole vocabulary, which
        takes long; the others are copies that share its tables."""
        if self._detokenizer is None:
            self._detokenizer = self.tokenizer.detokenizer
        made = copy(self._detokenizer)
        made.reset()
        return made

    def _yield_to_others(self) -> None:
        """Evict cold nodes while the whole machine uses more memory than it should."""
        now = self.clock()
        if now - self._looked_seconds < PRESSURE_SECONDS:
            return
        self._looked_seconds = now
        over = self.group.most(bytes_over(self.limits.memory_threshold))
        if over > 0 and self.prefixes.shrink(over, "pressure"):
            give_back()
