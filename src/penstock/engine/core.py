"""Engine core: runs one step at a time, on the caller's thread.

    enqueue ──> intake ──> the queue
    step    ──> plan = schedule: time out, preempt, restore, admit, choose chunks
                output = run: decode rows, prefill chunks, sample
                postprocess: commit, emit, requantize, offload

A failed step leaves all sequences unchanged: the columns it wrote are past their visible ends.
`parts` constructs the components of a core; `view` answers queries.
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
from penstock.ledger import Kind, Ledger


class Core(EngineParts):
    """The sequences, prefix tree and ledger of one model. Not thread-safe; see `Engine`.

    Args:
        model: model, as loaded by mlx-lm.
        tokenizer: mlx-lm's tokenizer wrapper; None disables text output and end-of-sequence tokens.
        clock: returns the time in seconds, for deadlines and recency.
        group: process group of the ranks among which the model is divided; None for one process.
        fingerprint: identifies everything besides the tokens that KV depends on.
        draft_model: folder, file or name of a draft model, a pair of model and tokenizer, or
            "mtp" for the head of `model`.
        ledger: memory ledger, which several models may share; None creates one.
        settings: fields of `config.EngineSettings`; `memory_limit` may be a string like "16GB".

    Raises:
        ModelError: the engine cannot run this model.
        NeverFits: weights and buffers alone exceed the memory limit.
        SettingError: a setting is out of range.
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
        ledger: Ledger | None = None,
        **settings: Any,
    ) -> None:
        group = ProcessGroup(clock) if group is None else group
        limits = checked(settings, drafts=draft_model is not None)
        super().__init__(model, tokenizer, limits, group, fingerprint, draft_model, ledger)
        self._closed = False
        self._settled: tuple[int, ...] = ()
        """State after the last step that must be equal on all ranks."""
        weights = self.ledger.whole.by_class()[Kind.WEIGHTS]
        self._other_bytes = max(0, mx.get_active_memory() - weights)
        """Bytes of MLX arrays outside the engine."""
        self._share_mlx()
        self.intake.account_grammars(self.reserve_grammars, alone=group.size == 1)
        finalize(self, mlx_limits.share, id(self), None)  # also if the core is never closed
        give_back()  # what loading, packing and measuring have freed

    def _share_mlx(self) -> None:
        whole = self.ledger.whole
        limit = self._other_bytes + whole.limit_bytes
        mlx_limits.share(id(self), MLXShare(self.budget.step_bytes, limit, id(whole)))

    # ---- requests

    def submit(self, request: Request) -> Handle:
        handle = Handle(self.intake.keyed(request), self.cancel)
        self.enqueue(handle)
        return handle

    def enqueue(self, handle: Handle) -> list[bytes]:
        self.group.note("enqueue", request=handle.request)
        return self.intake.enqueue(handle)

    def set_aside_prompts(self, nbytes: int) -> int:
        """Resize the reservation for prompts, up to half of the free bytes; return its size."""
        self.group.note("set_aside_prompts", nbytes=nbytes)
        return self.budget.set_aside_prompts(nbytes)

    def reserve_grammars(self, nbytes: int) -> None:
        if self.group.rank == 0:  # which notifies the others
            self.group.note("reserve_grammars", nbytes=nbytes)
            self.budget.reserve_grammars(nbytes)

    def cancel(self, handle: Handle) -> None:
        self._cancel([s.id for s in self.admission.sequences.values() if s.handle is handle])

    def _cancel(self, ids: Items[int]) -> None:
        self.group.note("cancel", ids=list(ids))
        for sequence_id in ids:
            sequence = self.admission.sequences[sequence_id]
            self.admission.finish(sequence, lambda s: s.end("cancelled"))

    def drain(self) -> None:
        """Stop accepting requests; open requests run to completion."""
        self.group.note("drain")
        self.intake.draining = True

    # ---- the step

    def step(
        self,
        *,
        send_later: bool = False,
        shared: bool = False,
        pending: Callable[[], bool] | None = None,
    ) -> bool:
        """Run one step. Return False if there was nothing to do.

        Args:
            send_later: whether tokens other than an answer's first are delivered during the next
                step, which the caller must then run at once.
            shared: whether other models wait for the device.
            pending: whether anything waits for the step to end; see `ModelExecutor.run`.
        """
        self._begin()
        if self._closed:  # by rank 0
            return False
        try:
            plan = self.planner.schedule(self.clock(), shared=shared)
            output = self.executor.run(plan, self.postprocessor.send, pending=pending)
            return self.postprocessor.postprocess(plan, output, send_later=send_later)
        finally:
            if self.group.size > 1:
                self._settled = (
                    self.ledger.used_bytes - self.budget.weights_bytes,
                    self.intake.next_id,
                    len(self.admission.sequences),
                    self.prefixes.tree.tokens,
                )

    def send(self) -> None:
        """Deliver the tokens that were held back for the next step."""
        self.postprocessor.send()

    # ---- commands

    def _begin(self) -> None:
        self.group.begin(self._settled, self._do)

    def _do(self, command: Command) -> None:
        """Execute a command of rank 0 on this rank."""
        arguments = command.arguments
        if command.name == "enqueue":
            with suppress(PenstockError):  # rank 0 has raised it to its caller
                self.enqueue(Handle(Request(**arguments["request"]), self.cancel))
        elif command.name == "cancel":
            self._cancel(arguments["ids"])
        elif command.name in ("set_aside_prompts", "reserve_grammars"):
            with suppress(PenstockError):
                getattr(self.budget, command.name)(arguments["nbytes"])
        elif command.name == "close":
            self._let_go(None)
        else:
            {"drain": self.drain, "clear": self.clear}[command.name]()

    def evict_prefixes(self, nbytes: int) -> int:
        """Evict the least valuable prefixes not in use; return the bytes freed."""
        freed = self.prefixes.shrink(nbytes, "limit")
        give_back()
        return freed

    def preload(self) -> int:
        """Restore the most valuable prefixes from the cold tiers; return the number of tokens."""
        if self.group.size > 1:  # each rank would wait for its own disk
            return 0
        return self.tiers.preload(self.stores.capture)

    def flush_tiers(self, timeout_seconds: float) -> bool:
        return self.tiers.flush(timeout_seconds)

    def set_limit(self, limit_bytes: int) -> None:
        """Change the memory limit; evict cold nodes and preempt sequences until it is met.

        Raises:
            NeverFits: weights, tails and buffers alone exceed the new limit; nothing is changed.
            SettingError: the model is divided among several processes.
        """
        if self.group.size > 1:
            raise SettingError("the memory limit of a model on several machines cannot change")
        self.budget.check_limit(limit_bytes)
        self.admission.fit(limit_bytes)
        self._share_mlx()
        give_back()

    def bound_process(self) -> None:
        """Evict cold nodes whenever the memory of the whole process exceeds its bound."""
        self.pressure.bound_process()

    def clear(self) -> tuple[Cleared, dict[str, Future[int | None]]]:
        """Evict all prefixes not in use; return what was evicted, and a future for each tier."""
        self.group.note("clear")
        tree = self.prefixes.tree
        nodes, nbytes = len(tree), tree.nbytes
        # Tiers first: otherwise conversation ends would be written to them when evicted.
        removed = self.tiers.clear()
        self.prefixes.clear()
        self.speculator.forget()
        give_back()
        return Cleared(nodes - len(tree), nbytes - tree.nbytes), removed

    # ---- the end

    @property
    def closed(self) -> bool:
        """Whether the core was closed, by its owner or by rank 0."""
        return self._closed

    def close(self, error: PenstockError | None = None) -> None:
        """Cancel all requests, or end them with an error, and free all memory but the weights'."""
        if error is None and not self._closed:  # otherwise the others see this process end
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
        self.features.close()
        self.draft.close()
        self.stores.close()
        self.budget.close()
        mlx_limits.share(id(self), None)
