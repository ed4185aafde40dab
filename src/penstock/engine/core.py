"""The engine without a thread: one step at a time, on the caller's thread.

    enqueue ──> intake ──> the queue
    step    ──> plan = schedule: time out, preempt, restore, admit, choose chunks
                output = run: decode rows, prefill chunks, sample
                postprocess: commit, emit, requantize, offload

A step that fails changes nothing that counts: its columns lie behind the visible ends.
`parts` makes the parts of a core; `view` answers questions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from weakref import finalize

import mlx.core as mx

from penstock.engine.handle import Handle
from penstock.engine.memory_pressure import MLXShare, give_back, mlx_limits
from penstock.engine.parts import EngineParts
from penstock.engine.ranks.process_group import Command, ProcessGroup
from penstock.engine.request import Request
from penstock.engine.settings import checked
from penstock.engine.stats import Cleared
from penstock.errors import PenstockError, SettingError


class Core(EngineParts):
    """Sequences, tree and ledger around one model. Not thread-safe; see `Engine`.

    Args:
        model: mlx-lm's.
        tokenizer: mlx-lm's wrapper; None gives answers without text, and no end of sequence.
        clock: seconds, for deadlines and recency.
        group: the processes that run the same engine over the other parts of a divided model.
        fingerprint: identity of everything but the tokens that KV depends on.
        draft_model: folder, file or name of a draft model, or the model and its tokenizer.
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
        draft_model: Any = None,
        **settings: Any,
    ) -> None:
        group = ProcessGroup(clock) if group is None else group
        limits = checked(settings, drafts=draft_model is not None)
        super().__init__(model, tokenizer, limits, group, fingerprint, draft_model)
        self._closed = False
        self._settled: tuple[int, ...] = ()
        """Figures after the last step that must be equal on all ranks."""
        self._other_bytes = max(0, mx.get_active_memory() - self.budget.weights_bytes)
        """Bytes of arrays that are not the engine's."""
        self._share_mlx()
        self.intake.account_grammars(self.reserve_grammars, alone=group.size == 1)
        finalize(self, mlx_limits.share, id(self), None)  # also of a core that is never closed

    def _share_mlx(self) -> None:
        limit = self._other_bytes + self.ledger.limit_bytes
        mlx_limits.share(id(self), MLXShare(self.budget.step_bytes, limit))

    # ---- requests

    def submit(self, request: Request) -> Handle:
        """Put a request into the queue, and return the handle of its answers.

        Raises:
            NeverFits: its prompt and its answers would not fit beside the weights.
            QueueFull: too many are waiting.
            SettingError: a token that the model does not have, or an invalid grammar.
            EngineStopped: the engine is being drained.
        """
        handle = Handle(request, self.cancel)
        self.enqueue(handle)
        return handle

    def enqueue(self, handle: Handle) -> list[bytes]:
        """Put the request of a handle into the queue; see `Intake.enqueue`."""
        self.group.note("enqueue", request=handle.request)
        return self.intake.enqueue(handle)

    def set_aside_prompts(self, nbytes: int) -> int:
        """Set aside bytes for prompts, at most half of the free ones; return how many."""
        self.group.note("set_aside_prompts", nbytes=nbytes)
        return self.budget.set_aside_prompts(nbytes)

    def reserve_grammars(self, nbytes: int) -> None:
        """Reserve memory for all compiled grammars; see `MemoryBudget.reserve_grammars`."""
        if self.group.rank == 0:  # it tells the others
            self.group.note("reserve_grammars", nbytes=nbytes)
            self.budget.reserve_grammars(nbytes)

    def cancel(self, handle: Handle) -> None:
        """End a request's answers that have not ended; their KV stays in the tree."""
        self._cancel([s.id for s in self.admission.sequences.values() if s.handle is handle])

    def _cancel(self, ids: Items[int]) -> None:
        self.group.note("cancel", ids=list(ids))
        for sequence_id in ids:
            sequence = self.admission.sequences[sequence_id]
            self.admission.finish(sequence, lambda s: s.end("cancelled"))

    def drain(self) -> None:
        """Take no more requests in; those that are open go on to their end."""
        self.group.note("drain")
        self.intake.draining = True

    # ---- the step

    def step(self, *, send_later: bool = False) -> bool:
        """Run one step. Return False if there was nothing to do.

        Args:
            send_later: whether tokens behind an answer's first are posted while the next step
                computes, which then must follow at once.
        """
        self._begin()
        if self._closed:  # by rank 0
            return False
        try:
            plan = self.planner.schedule(self.clock())
            output = self.executor.run(plan, meanwhile=self.postprocessor.send)
            return self.postprocessor.postprocess(plan, output, send_later=send_later)
        finally:
            if self.group.size > 1:
                self._settled = (
                    self.ledger.used_bytes - self.budget.weights_bytes,
                    self.intake.next_id,
                    len(self.admission.sequences),
                    self.prefixes.tree.tokens,
                )

    # ---- commands

    def _begin(self) -> None:
        self.group.begin(self._settled, self._do)

    def _do(self, command: Command) -> None:
        """Execute a command of rank 0 on this rank."""
        given = command.arguments
        if command.name == "enqueue":
            with suppress(PenstockError):  # rank 0 has raised it to its caller
                self.enqueue(Handle(Request(**given["request"]), self.cancel))
        elif command.name == "cancel":
            self._cancel(given["ids"])
        elif command.name in ("set_aside_prompts", "reserve_grammars"):
            with suppress(PenstockError):
                getattr(self.budget, command.name)(given["nbytes"])
        elif command.name == "close":
            self._let_go(None)
        else:
            {"drain": self.drain, "clear": self.clear}[command.name]()

    def preload(self) -> int:
        """Restore the most valuable prefixes from the cold tiers, as far as memory is free.

        Returns:
            Tokens that the prefix tree has more than before.
        """
        if self.group.size > 1:  # each rank would wait for its own disk
            return 0
        return self.tiers.preload(self.stores.capture)

    def flush_tiers(self, timeout_seconds: float) -> bool:
        """Wait until the cold tiers have written all blocks offered; return whether they have."""
        return self.tiers.flush(timeout_seconds)

    def set_limit(self, limit_bytes: int) -> None:
        """Change the memory limit; the excess goes at once: cold nodes, then preempted work.

        Raises:
            NeverFits: weights, tails and buffers alone are over it; nothing is changed then.
            SettingError: the model is divided among several processes.
        """
        if self.group.size > 1:
            raise SettingError("the memory limit of a model on several machines stays as it is")
        self.budget.check_limit(limit_bytes)
        self.admission.fit(limit_bytes)
        self._share_mlx()
        give_back()

    def bound_process(self) -> None:
        """Evict cold nodes whenever this process is too large for the memory limit."""
        self.pressure.bound_process()

    def clear(self) -> tuple[Cleared, dict[str, Future[int | None]]]:
        """Evict all prefixes that no sequence reads; their memory goes back to the system.

        Returns:
            The nodes and bytes evicted, and the bytes that each cold tier will remove.
        """
        self.group.note("clear")
        tree = self.prefixes.tree
        nodes, nbytes = len(tree), tree.nbytes
        # First the tiers: ends of conversations would else be written as they are evicted.
        removed = self.tiers.clear()
        self.prefixes.clear()
        self.speculator.forget()
        give_back()
        return Cleared(nodes - len(tree), nbytes - tree.nbytes), removed

    # ---- the end

    @property
    def closed(self) -> bool:
        """Whether it was closed, by its owner or by rank 0."""
        return self._closed

    def close(self, error: PenstockError | None = None) -> None:
        """Cancel everything and let go of it; weights and the empty index stay counted.

        Args:
            error: the end of open answers, if they were not cancelled but lost.
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
        self.draft.close()
        self.stores.close()
        self.budget.close()
        mlx_limits.share(id(self), None)
