"""The engine without a thread: one step at a time, everything in the caller's hands.

    submit ──> scheduler ──admit: a path is pinned, bytes are reserved, a slot is taken
                 │
    step:   decode all that run ──> choose ──> say; a full tail becomes a run, a full block a node
            prefill some chunks ──> seal at once, so that others share them meanwhile

A step that fails changes nothing that counts: what it wrote lies behind the visible ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import finalize

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten

from penstock import config
from penstock.blas import one_thread
from penstock.engine.cold import Cold, open_cold
from penstock.engine.constraint import Constraint, Grammars
from penstock.engine.handle import Handle, tell
from penstock.engine.needs import Needs
from penstock.engine.pace import Pace
from penstock.engine.quantise import Quantiser
from penstock.engine.ranks import Alone, Command, Peers
from penstock.engine.request import Request
from penstock.engine.sampling import (
    Chooser,
    Chosen,
    choose_all,
    greedy_only,
    likeliest,
    without_frames,
)
from penstock.engine.scheduler import PLACED, Job, Scheduler, State
from penstock.engine.sequence import WHOLE_CHUNK, Sequence
from penstock.engine.stats import Stats, StepTimes, Tally
from penstock.engine.step import Runner
from penstock.engine.text import Detokenizer, TextStream
from penstock.engine.tier import EngineTier, Restore
from penstock.engine.windows import Reader, Windows, windows_of
from penstock.errors import (
    EngineStopped,
    LedgerFull,
    NeverFits,
    PenstockError,
    SettingError,
    StepFailed,
)
from penstock.heap import give_back_freed_memory, keep_freed_memory
from penstock.kv.compressed import completed
from penstock.kv.forms import Forms
from penstock.kv.quantisation import Quantisation
from penstock.kv.reads import Part, in_order
from penstock.kv.segment import Segment
from penstock.kv.states import Live, nbytes
from penstock.kv.tails import Tails
from penstock.ledger import Kind, Ledger, Reservation
from penstock.memory import format_bytes, parse_bytes
from penstock.memory.machine import read_machine_memory
from penstock.models.fingerprint import fingerprint as fingerprint_of
from penstock.models.fingerprint import with_settings
from penstock.prefix.checkpoints import Checkpoints
from penstock.prefix.explanation import Explanation
from penstock.prefix.node import Node, NodeView
from penstock.prefix.prefixes import Prefixes, remembered_nodes
from penstock.prefix.ssd.host import Landing, StateLanding

TAIL_TOKENS = 8
"""Least columns of a tail. More are copied out less often, and leave fewer parts to be read; fewer
waste less."""
MOST_TAIL_TOKENS = 32
POOL_TOKENS = 64
"""Columns that few places may share out among them: those of eight."""
ASK_SECONDS = 0.5
"""How long a prompt waits to be told how much of it is on the disk."""
PRESSURE_SECONDS = 1.0
"""How often the machine's memory is looked at."""


def has_own_memory() -> bool:
    """Tell whether the device has memory of its own: to give it up helps no other program."""
    return mx.default_device() != mx.cpu and not mx.metal.is_available()


def checked(settings: dict[str, Any]) -> config.EngineSettings:
    """Check an engine's settings, as its constructor takes them.

    Raises:
        SettingError: a number is out of its range, or a name is none of a setting's.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name in ("memory_limit", "ssd_cache_limit", "ssd_write_budget"):
        if isinstance(size := given.get(name), str):
            given[name] = parse_bytes(size)
    if isinstance(folder := given.get("ssd_cache_dir"), str):
        given["ssd_cache_dir"] = Path(folder).expanduser()
    if has_own_memory():
        given.setdefault("memory_threshold", 1.0)
    if not {"memory_limit", "memory_threshold"} <= set(given):
        machine = read_machine_memory(mx.device_info())
        given.setdefault("memory_limit", machine.default_limit_bytes)
        given.setdefault("memory_threshold", machine.default_threshold)
    return config.parse(config.EngineSettings, flags=False, **given)


class Core:
    """Sequences, tree and ledger around one model. Not thread-safe; see `Engine`.

    Args:
        model: mlx-lm's.
        tokenizer: mlx-lm's wrapper; None gives answers without text, and no end of sequence.
        clock: seconds, for deadlines and recency.
        peers: who runs the same engine over the other parts of the model, if it was divided.
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
        peers: Peers | None = None,
        fingerprint: str = "",
        **settings: Any,
    ) -> None:
        self.limits = checked(settings)
        self.peers = Alone(clock) if peers is None else peers
        if mx.default_device() == mx.cpu:
            keep_freed_memory(self.limits.memory_limit)
        self.tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        self.clock = self.peers.clock
        self.tally = Tally()
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
        self.scheduler = Scheduler(
            self.limits.max_batch_size,
            self.limits.prefill_chunk,
            self.limits.block_size,
            self.limits.max_queue,
        )
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._draining = False
        self._closed = False
        self._settled: tuple[int, ...] = ()
        """After the last step, what must be equal on all ranks."""
        self._oom_in_a_row = 0
        self._looked_seconds = -PRESSURE_SECONDS
        self.grammars = (
            None if tokenizer is None else Grammars(tokenizer, self.runner.vocabulary_size)
        )
        self._ends = frozenset(() if tokenizer is None else tokenizer.eos_token_ids)
        _share_mlx_cache(id(self), self._buffers.nbytes)
        finalize(self, _share_mlx_cache, id(self), None)  # also of a core that nobody closed

    def _make(self, model: Any, fingerprint: str) -> None:
        """Make what takes memory, each part after its bytes were reserved."""
        self.cold: Cold | None = None
        weights = weight_bytes(model)
        # Who has the least room decides for all, who hold the same beside their weights.
        room = self.peers.least(self.limits.memory_limit - weights)
        self.ledger.set_limit(max(0, weights + room))
        self._weights = self.ledger.reserve(Kind.WEIGHTS, weights)
        self.runner = Runner(
            model,
            max_kv_size=self.limits.max_kv_size,
            keep=self.limits.keep_tokens,
            ranks=self.peers.size,
        )
        self.peers.check_equal("what the layers of a part keep of a token", self.runner.keeps)
        if self.runner.divided and self.limits.kv_cache_skip_layers:
            raise SettingError(
                "kv_cache_skip_layers does not work with whole layers for each rank, which would "
                "not hold the same; leave it out, or divide the model by heads"
            )
        self.limits = _fitting(self.limits, self.runner)
        self.needs = Needs(self.runner, self.limits)
        slots, block_size = self.limits.max_batch_size, self.limits.block_size
        columns = min(MOST_TAIL_TOKENS, POOL_TOKENS // slots, block_size // 2)
        columns = min(max(TAIL_TOKENS, columns), block_size)
        self._pool = self.ledger.reserve(Kind.TAILS, slots * columns * self.runner.token_bytes)
        self.tails = Tails(slots, columns, self.runner.shapes)
        step = self.peers.most(self.needs.measure_step(self.tails))
        self._buffers = self.ledger.reserve(Kind.BUFFERS, step)
        self.tails.drop()  # until somebody decodes
        self._chunk = self.ledger.reserve(Kind.BUFFERS, 0)
        if self.limits.has_cold_tier and not fingerprint:
            fingerprint = fingerprint_of(
                model, keep=self.limits.keep_tokens, window=self.limits.max_kv_size
            )
            if self.peers.size > 1:
                part = f"{self.peers.rank} of {self.peers.size}{self.runner.divided}"
                fingerprint = with_settings(fingerprint, part=part)
        rule = Quantisation.of(
            self.limits.kv_cache_quantization,
            block_size=block_size,
            first_tokens=self.limits.raw_first_tokens,
            skip_layers=self.limits.kv_cache_skip_layers,
        )
        if rule is not None:
            rule = rule.scaled(self.runner.key_scales)
            fingerprint = with_settings(fingerprint, codec=rule.identity)
        self.prefixes: Prefixes[Segment] = Prefixes(
            self.ledger,
            block_size=self.limits.block_size,
            fingerprint=fingerprint,
            clock=self.clock,
            # Ranks whose weights differ have limits that do.
            remembered=remembered_nodes(self.peers.least(self.ledger.limit_bytes)),
        )
        self.checkpoints = (
            Checkpoints(self.prefixes, self.runner.state_bytes)
            if self.runner.is_recurrent
            else None
        )
        windows = windows_of(self.runner.sights, self.limits.max_kv_size)
        self.windows = None
        if windows:
            self.windows = Windows(
                self.prefixes, windows, self.runner.shapes, self._readers, self._waiting_nodes
            )
            self.prefixes.relief = self.windows
        self.quantiser = (
            None
            if rule is None
            else Quantiser(rule, self.prefixes, self.runner.shapes, self.limits)
        )
        self.pace = Pace(self.peers.mean(self.needs.prefill_token_seconds))
        self.cold = open_cold(
            self.limits,
            self.prefixes,
            Forms(self.runner.shapes, block_size, rule),
            self.pace,
            in_place=not has_own_memory(),
            state_form=self.runner.state_form if self.runner.is_recurrent else None,
            peers=self.peers,
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
        self.peers.note("enqueue", request=handle.request)
        if self._draining:
            raise EngineStopped("the engine is shutting down and takes no more requests")
        request = handle.request
        size = self.runner.vocabulary_size
        self.check_tokens(request.prompt)
        sampling = request.sampling.with_seed()
        now = self.clock()

        def chooser(choice: int) -> Chooser:
            constraint = self.constraint(request)
            return Chooser(sampling, request.prompt, choice, size, constraint=constraint)

        first = self._sequence(handle, 0, chooser(0), list(request.prompt), [])
        first.name_blocks(self.prefixes, self._sealable())
        self._check_fits(first)
        self.scheduler.check_room(request.n)
        others = range(1, request.n)  # they share tokens and names until they are let in
        sequences = [
            first,
            *(self._sequence(handle, i, chooser(i), first.tokens, first.keys) for i in others),
        ]
        deadline = None if request.timeout_seconds is None else now + request.timeout_seconds
        self.scheduler.add(
            *(
                Job(
                    id=sequence.id,
                    priority=request.priority,
                    arrived=sequence.id,
                    deadline_seconds=deadline,
                    left=sequence.left,
                )
                for sequence in sequences
            )
        )
        self._sequences.update((sequence.id, sequence) for sequence in sequences)
        if self.cold is not None and first.keys:
            on_disk = self.cold.ask(first.keys)
            for sequence in sequences:
                sequence.on_disk = on_disk
        self.tally.requests += len(sequences)

    def check_tokens(self, tokens: Items[int]) -> None:
        """Raise SettingError if the model does not know all of these tokens."""
        size = self.runner.vocabulary_size
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < size:
                raise SettingError(f"the prompt has token {token}; the model knows {size} tokens")

    def constraint(self, request: Request) -> Constraint | None:
        """Return a new place at the beginning of a request's grammar; any thread may ask.

        Raises:
            SettingError: the grammar is none, or there is no tokenizer to follow it with.
        """
        if request.grammar is None:
            return None
        if self.grammars is None:
            raise SettingError("a grammar needs a tokenizer, and the engine has none")
        return self.grammars.constraint(request.grammar)

    def cancel(self, handle: Handle) -> None:
        """End a request's answers that have not ended; what was computed stays in the tree."""
        self._cancel([s.id for s in self._sequences.values() if s.handle is handle])

    def _cancel(self, ids: Items[int]) -> None:
        self.peers.note("cancel", ids=list(ids))
        for sequence_id in ids:
            self._finish(self._sequences[sequence_id], lambda s: s.end("cancelled"))

    def drain(self) -> None:
        """Take no more requests in; those that are open go on to their end."""
        self.peers.note("drain")
        self._draining = True

    def close(self, error: PenstockError | None = None) -> None:
        """Cancel everything and let go of it; what stays counted are weights and empty index.

        Args:
            error: what open answers end with, if they were not cancelled but lost.
        """
        if error is None and not self._closed:  # else the end of this process tells the others
            self.peers.note("close")
            self._begin()
        self._let_go(error)

    def _let_go(self, error: PenstockError | None) -> None:
        self._closed = True
        for sequence in list(self._sequences.values()):
            if error is None:
                self._finish(sequence, lambda s: s.end("cancelled"))
            else:
                self._fail(sequence, error)
        if self.cold is not None:
            self.cold.close()
        if self.quantiser is not None:
            self.quantiser.release()
        if self.windows is not None:
            self.windows.release()
        self.prefixes.clear()
        self.tails.drop()
        self._pool.resize(0)
        self._buffers.resize(0)
        _share_mlx_cache(id(self), None)

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
                self.ledger.used_bytes - self._weights.nbytes,
                self._next_id,
                len(self._sequences),
                self.prefixes.tree.tokens,
            )

    def _begin(self) -> None:
        self.peers.begin(self._settled, self._do)

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
        self._drop_overdue()
        self._yield_to_others()
        self._admit()
        if self.cold is not None:
            self._take_restored(self.cold)
        self._catch_up()
        if self.cold is not None:
            self._restore(self.cold)
        plan = self.scheduler.plan()
        if plan.decode:
            self._decode([self._sequences[job_id] for job_id in plan.decode])
        for chunk in plan.prefill:
            # A decode step that ran out of memory parks everybody.
            if chunk.id in self._sequences and self._state(chunk.id) is State.PREFILLING:
                self._prefill(self._sequences[chunk.id], chunk.tokens)
        busy = bool(plan.decode or plan.prefill)
        if self.quantiser is not None:
            busy = self._quantise(self.quantiser) or busy
        if self.cold is None:
            return busy
        # Who is told something by the disk just now is not let go on before the next step.
        restoring = bool(self.scheduler.jobs(State.RESTORING))
        return self.cold.work(busy=busy) or busy or restoring

    def _quantise(self, quantiser: Quantiser) -> bool:
        """Hold in fewer bits what is due; all of it, so that no chunk reads a raw block that the
        same chunk reads coded when it is asked for again."""
        found = False
        running = [s for s in self._sequences.values() if s.pin is not None]
        try:
            while quantiser.work((s.pin.path, s.position) for s in running if s.pin is not None):
                found = True
        except (MemoryError, RuntimeError):  # MLX found no room for the codes
            self.tally.out_of_memory += 1
        for sequence in running if found else ():
            if sequence.pin is not None:
                self._tidy(sequence.pin.node)
        return found

    @property
    def closed(self) -> bool:
        """Whether it was closed, by its owner or by rank 0."""
        return self._closed

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return not self._sequences

    def preload(self) -> int:
        """Read from the disk what is worth most, as long as there is free memory; nothing gives
        way for it. Returns the tokens that are held more than before."""
        if self.cold is None or self.peers.size > 1:  # each rank would wait for its own disk
            return 0
        return self.cold.preload(self.checkpoints)

    # ---- questions

    def stats(self) -> Stats:
        """Return what there is to tell, in O(open sequences)."""
        tally, tree, counts = self.tally, self.prefixes.tree, self.prefixes.counts
        states = {state: len(self.scheduler.jobs(state)) for state in State}
        tiers = {} if self.cold is None else self.cold.stats()
        return Stats(
            limit_bytes=self.ledger.limit_bytes,
            used_bytes=self.ledger.used_bytes,
            held_bytes=self.held_bytes,
            by_kind={kind.value: n for kind, n in self.ledger.by_class().items()},
            active_bytes=mx.get_active_memory(),
            waiting=states[State.WAITING],
            prefilling=states[State.PREFILLING],
            restoring=states[State.RESTORING],
            running=states[State.RUNNING],
            parked=states[State.PARKED],
            requests=tally.requests,
            finished=tally.finished,
            failed=tally.failed,
            prompt_tokens=tally.prompt_tokens,
            hit_tokens=tally.hit_tokens,
            restored_tokens=tally.restored_tokens,
            prefilled_tokens=tally.prefilled_tokens,
            generated_tokens=tally.generated_tokens,
            nodes=len(tree),
            held_tokens=tree.tokens,
            evicted_nodes=counts.evicted_nodes,
            evicted_bytes=counts.evicted_bytes,
            parkings=tally.parkings,
            out_of_memory=tally.out_of_memory,
            copied_bytes=counts.copied_bytes,
            decode=StepTimes.of(tally.decode_steps, tally.decode_seconds),
            prefill=StepTimes.of(tally.prefill_steps, tally.prefill_seconds),
            ssd=tiers.get("ssd"),
            remote=tiers.get("remote"),
        )

    @property
    def held_bytes(self) -> int:
        """Bytes in arrays between two steps: weights, nodes, runs and the pool of tails."""
        runs = sum(run.segment.nbytes for s in self._sequences.values() for run in s.runs)
        held = self._weights.nbytes + self.prefixes.tree.nbytes + runs + self.tails.nbytes
        return held + self._live_bytes()

    def _live_bytes(self) -> int:
        """Return the bytes of running sequences' states, but for those that are a checkpoint's."""
        lives = [s.live.states for s in self._sequences.values() if s.live is not None]
        if not lives:
            return 0
        found = {id(states): nbytes(states) for states in lives}
        for node in self.prefixes.tree:
            for each in node.segment.checkpoints:
                found.pop(id(each.states), None)
        return sum(found.values())

    def explain(self, tokens: Items[int], salt: str = "", *, ask_disk: bool = False) -> Explanation:
        """Say how far a prompt would match now, and what stands in the way of more.

        Args:
            tokens: the prompt.
            salt: the tenant's.
            ask_disk: whether to wait for the cold tier to say what it has of it.
        """
        found = self.prefixes.explain(list(tokens), salt)
        on_disk = None
        if ask_disk and self.cold is not None:
            on_disk = self.cold.on_disk(self.prefixes.keys(list(tokens), salt), ASK_SECONDS)
        reason, resumes = found.reason, None
        if self.runner.fitness.whole:
            reason = (
                "nothing of this model is shared: what it keeps of a token depends on how the "
                "prompt is cut, so each is read as mlx-lm reads it"
            )
        if self.checkpoints is not None or self.windows is not None:
            resumes, why = self._explain_resume(list(tokens), salt)
            reason += why
        if self.cold is not None and on_disk is not None and on_disk > found.held_tokens:
            where = self.cold.where
            reason += f"; {on_disk:,} tokens are {where}, from where they would be read back"
        return replace(
            found,
            reason=reason,
            resume_tokens=resumes,
            on_disk_tokens=on_disk,
            held_text=self._text(found.held_token),
            given_text=self._text(found.given_token),
        )

    def _explain_resume(self, tokens: list[int], salt: str) -> tuple[int | None, str]:
        """Return from where a prompt would go on, and why not from the end of what is held; None
        if from there, in a model in which that is so until memory is short."""
        match = self.prefixes.find(tokens, salt)
        most = min(match.tokens, max(0, len(tokens) - 1))
        resumes, _ = self._resume(match.path, most)
        whole = most if self.windows is None else self.windows.resume(match.path, most)
        if self.checkpoints is None and whole == most:
            return None, ""
        why = ""
        if whole < most:
            why = (
                f"; layers with windows go on from token {whole:,} at most, of {match.tokens:,} "
                f"held: when memory was short they dropped what goes on neither at the end of a "
                f"conversation nor where some part; what is read again is held again"
            )
        if resumes < whole:
            why += (
                f"; recurrent layers go on from token {resumes:,}, the deepest of the "
                f"{match.tokens:,} held at which their states were kept: they are at the ends "
                f"of turns and chunks, and fewer further back"
            )
        return resumes, why

    def note_checkpoints(self, keys: Items[bytes]) -> None:
        """Have the checkpoints of a chain written, if there is a cold tier."""
        if self.cold is None or self.checkpoints is None:
            return
        for node in self.prefixes.match(keys).path:
            for found in node.segment.checkpoints:
                blocks = (node.start + found.at) // self.limits.block_size
                if blocks <= len(keys):
                    self.cold.note_checkpoint(keys[:blocks], seen=True)

    def tree(self) -> list[NodeView]:
        """Show every node of the tree, parents before their children. O(nodes)."""
        return self.prefixes.views()

    def _text(self, token: int | None) -> str | None:
        if token is None or self.tokenizer is None:
            return None
        return str(self.tokenizer.decode([token]))

    def set_limit(self, limit_bytes: int) -> None:
        """Change the memory limit; what is over it goes at once: cold nodes, then parked work.

        Raises:
            NeverFits: weights, tails and buffers alone are over it; nothing is changed then.
            SettingError: the model is divided among several processes.
        """
        if self.peers.size > 1:
            raise SettingError("the memory limit of a model on several machines stays as it is")
        fixed = self._fixed_bytes()
        if fixed > limit_bytes:
            raise NeverFits(
                f"weights, tails, buffers and index take {format_bytes(fixed)}; "
                f"the limit cannot be {format_bytes(limit_bytes)}",
                fixed,
                limit_bytes,
                limit_bytes,
            )
        over = self.ledger.set_limit(limit_bytes)
        over -= self.prefixes.shrink(over, "limit")
        for job in [job for state in PLACED for job in self.scheduler.jobs(state)[::-1]]:
            over = self.ledger.used_bytes - limit_bytes
            if over <= 0:
                break
            self._park(self._sequences[job.id])
            self.prefixes.shrink(self.ledger.used_bytes - limit_bytes, "limit")
        for job in [*self.scheduler.jobs(State.WAITING), *self.scheduler.jobs(State.PARKED)]:
            sequence = self._sequences[job.id]
            try:
                self._check_fits(sequence)
            except NeverFits as error:
                self._fail(sequence, error)
        _give_back()

    def clear(self) -> None:
        """Give up all prefixes that nobody reads, on the disk too, and their memory to the system.

        Those on the disk go when the cold tier's thread comes to it.
        """
        self.peers.note("clear")
        self.prefixes.clear()
        if self.cold is not None:
            self.cold.clear()
        _give_back()

    def check(self) -> None:
        """Recount everything from the arrays and raise AssertionError if something differs."""
        self.prefixes.check()
        self.scheduler.check()
        sequences = self._sequences.values()
        promised = sum(s.own.nbytes for s in sequences if s.own is not None)
        steps = sum(s.step.nbytes for s in sequences if s.step is not None)
        reading = 0 if self.cold is None else self.cold.paid_bytes
        self.ledger.check(
            {
                **self.prefixes.recount(),
                Kind.WEIGHTS: weight_bytes(self.runner.model),
                Kind.TAILS: self._pool.nbytes + promised + reading,
                Kind.BUFFERS: self._buffers.nbytes
                + steps
                + self._chunk.nbytes
                + self._copies_bytes(),
            }
        )
        if self.tails.nbytes not in (0, self._pool.nbytes):
            raise AssertionError(f"tails of {self.tails.nbytes} bytes, {self._pool.nbytes} counted")
        slots = [s.slot for s in sequences if s.slot is not None]
        if len(slots) + self.tails.free_slots != self.tails.slots or len(set(slots)) != len(slots):
            raise AssertionError(f"slots {slots} taken, {self.tails.free_slots} free")
        pins = sum(s.pin is not None for s in sequences)
        if pins != self.prefixes.tree.pins:
            raise AssertionError(f"{self.prefixes.tree.pins} pins, {pins} owners")
        for sequence in sequences:
            if self.windows is not None and sequence.pin is not None:
                self.windows.check(sequence.pin.path, sequence.cut, sequence.position)
            own = sum(run.segment.nbytes for run in sequence.runs)
            if sequence.own is None and (own or sequence.slot is not None or sequence.pin):
                raise AssertionError(f"sequence {sequence.id} holds what was not reserved")
            if sequence.own is not None and own > sequence.own.nbytes:
                raise AssertionError(
                    f"sequence {sequence.id} holds {own} bytes of {sequence.own.nbytes}"
                )

    # ---- letting in

    def _sequence(
        self, handle: Handle, choice: int, chooser: Chooser, tokens: list[int], keys: list[bytes]
    ) -> Sequence:
        request = handle.request
        text = None
        if self.tokenizer is not None:
            text = TextStream(self._new_detokenizer(), request.stop)
        sequence = Sequence(
            id=self._next_id,
            request=request,
            choice=choice,
            handle=handle,
            chooser=chooser,
            text=text,
            tokens=tokens,
            keys=keys,
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

    def _check_fits(self, sequence: Sequence) -> None:
        """Raise NeverFits if a sequence could not run though nobody else did."""
        own = self.needs.own(sequence.most_tokens)
        step = self.needs.step(sequence.most_tokens) + self.needs.chunk(sequence.most_tokens)
        index = self.prefixes.index_bytes(len(sequence.keys) + 1)
        fixed = self._fixed_bytes()
        limit = self.ledger.limit_bytes
        if fixed + own + step + index <= limit:
            return
        room = max(0, limit - fixed)
        raise NeverFits(
            f"KV for {sequence.most_tokens + 1:,} tokens needs {format_bytes(own + step + index)}; "
            f"the limit of {format_bytes(limit)} leaves {format_bytes(room)} beside weights, tails "
            f"and buffers of {format_bytes(fixed)}. Lower max_tokens or max_kv_size, shorten the "
            f"prompt, or raise memory_limit",
            own + step + index,
            room,
            limit,
        )

    def _fixed_bytes(self) -> int:
        kinds = (self._weights, self._pool, self._buffers)
        fixed = sum(kind.nbytes for kind in kinds) + self.prefixes.fixed_bytes
        return fixed + self._copies_bytes()

    def _copies_bytes(self) -> int:
        """Return what is set aside, whatever happens, for blocks that are written or encoded, and
        windows that are copied."""
        parts = (self.cold, self.quantiser, self.windows)
        return sum(part.nbytes for part in parts if part is not None)

    def _admit(self) -> None:
        """Let in who fits, in order; who does not fit lets nobody pass."""
        for job in self.scheduler.in_line():
            sequence = self._sequences[job.id]
            while not (self.scheduler.free_places and self._try_admit(sequence)):
                lower = [self._sequences[other] for other in self.scheduler.to_park(job)]
                if not lower or not self._worth_parking(sequence, lower):
                    return
                self._park(lower[0])

    def _try_admit(self, sequence: Sequence) -> bool:
        """Pin a path, reserve the rest, take a slot; False, and nothing taken, if it must wait."""
        sequence.name_blocks(self.prefixes, self._sealable())
        match = self.prefixes.match(sequence.keys)
        taken = self._take(sequence, match.tokens)
        if not taken and self.tails.free_slots == self.tails.slots:
            # A node that is longer than what the sequence reads of it may take the room that
            # it needs. Nobody else runs: without the path, all nodes can give way.
            taken = self._take(sequence, 0)
        if not taken:
            return False
        sequence.slot = self.tails.take_slot()
        self.scheduler.act(sequence.id, "admit")
        if not sequence.admitted:
            sequence.admitted = True
            sequence.tokens, sequence.keys = list(sequence.tokens), list(sequence.keys)
            self.tally.prompt_tokens += sequence.prompt_tokens
            self._count_hit(sequence, sequence.cut)
        self._report(sequence, 0)
        return True

    def _worth_parking(self, sequence: Sequence, others: Items[Sequence]) -> bool:
        """Tell whether a sequence would fit if all of the others were parked."""
        needed = self.needs.own(sequence.most_tokens) + self.needs.step(sequence.most_tokens)
        needed += max(0, self.needs.chunk(sequence.most_tokens) - self._chunk.nbytes)
        freed = self.ledger.free_bytes + self.prefixes.evictable_bytes
        for other in others:
            held = [r.nbytes for r in (other.own, other.step) if r is not None]
            path = other.pin.path if other.pin is not None else ()
            freed += sum(held) + sum(n.segment.nbytes + n.index_bytes for n in path if n.pins == 1)
        match = self.prefixes.match(sequence.keys)
        cut, _ = self._resume(match.path, match.tokens)
        return needed - cut * self.runner.token_bytes <= freed

    def _take(self, sequence: Sequence, matched: int) -> bool:
        """Pin the first `matched` tokens, or as far as a sequence can go on from there, and
        reserve the bytes of all others, or do nothing."""
        blocks = matched // self.limits.block_size
        match = self.prefixes.match(sequence.keys[:blocks])
        cut, live = self._resume(match.path, min(matched, len(sequence.tokens) - 1))
        # It is a reader from now on: what it reads is not dropped to make room for the rest.
        sequence.pin, sequence.cut = self.prefixes.pin(match), cut
        taken = self._reserve(sequence)
        if taken is None:
            sequence.pin.release()
            sequence.pin, sequence.cut = None, 0
            return False
        sequence.own, sequence.step = taken
        sequence.live, sequence.meets = live, match.tokens
        return True

    def _reserve(self, sequence: Sequence) -> tuple[Reservation, Reservation] | None:
        """Reserve what a sequence may come to hold behind its cut, and what it adds to a step;
        None, and nothing reserved, if there is no room."""
        most = sequence.most_tokens
        try:
            own = self.prefixes.reserve(Kind.TAILS, self.needs.own(most, sequence.cut))
        except (LedgerFull, NeverFits):
            return None
        try:
            step = self.prefixes.reserve(Kind.BUFFERS, self.needs.step(most))
        except (LedgerFull, NeverFits):
            own.release()
            return None
        more = self.needs.chunk(most) - self._chunk.nbytes
        if more > 0 and not self.prefixes.make_room(more):
            step.release()
            own.release()
            return None
        self._chunk.resize(self._chunk.nbytes + max(0, more))
        return own, step

    def _resume(self, path: Items[Node[Segment]], most_tokens: int) -> tuple[int, Live | None]:
        """Return at which position of a path, `most_tokens` at most, a sequence can go on: all
        windows in front of it are whole, and there are states, with which it does."""
        while True:
            if self.windows is not None:
                most_tokens = self.windows.resume(path, most_tokens)
            if self.checkpoints is None:
                return most_tokens, None
            found, live = self.checkpoints.resume(path, most_tokens)
            if self.windows is None or found in (0, most_tokens):
                return found, live
            most_tokens = found

    def _readers(self) -> Iterator[Reader]:
        """Yield what is read of which paths."""
        for sequence in self._sequences.values():
            if sequence.pin is not None:
                yield sequence.pin.path, sequence.cut

    def _waiting_nodes(self) -> set[int]:
        """Return the nodes, by their ids, that have blocks which wait to be written; none where
        there are other ranks, who write at a pace of their own."""
        return set() if self.cold is None or self.peers.size > 1 else self.cold.waiting_nodes()

    def _count_hit(self, sequence: Sequence, tokens: int, *, restored: bool = False) -> None:
        """Count prompt tokens that this answer did not have to compute.

        What it finds again after it was parked is its own work, and no hit.
        """
        if sequence.was_parked:
            return
        sequence.cached_tokens += tokens
        self.tally.hit_tokens += tokens
        self.tally.restored_tokens += tokens if restored else 0

    def _report(self, sequence: Sequence, served_tokens: int) -> None:
        """Tell the scheduler where a sequence stands."""
        blocks = sequence.position // self.limits.block_size
        key = sequence.keys[blocks] if blocks < len(sequence.keys) and not sequence.runs else None
        left = sequence.left
        self.scheduler.progress(
            sequence.id,
            position=sequence.position,
            left=left,
            next_key=key if left else None,
            served_tokens=served_tokens,
        )
        if not left and self._state(sequence.id) is State.PREFILLING:
            self.scheduler.act(sequence.id, "read")

    def _state(self, sequence_id: int) -> State:
        return self.scheduler.job(sequence_id).state

    def _catch_up(self) -> None:
        """Let who is prefilling share what others have sealed meanwhile."""
        size = self.limits.block_size
        for job in self.scheduler.jobs(State.PREFILLING):
            sequence = self._sequences[job.id]
            done = sequence.cut // size
            if sequence.runs or sequence.cut % size or sequence.pin is None:
                continue
            if done >= len(sequence.keys):
                continue
            blocks = self.prefixes.follow(sequence.pin, sequence.keys, done)
            if blocks > done:
                most = min(blocks * size, len(sequence.tokens) - 1)
                cut, live = self._resume(sequence.pin.path, most)
                if cut <= sequence.cut:
                    continue
                gained = cut - sequence.cut
                sequence.cut, sequence.live = cut, live
                self._shrink_own(sequence, gained * self.runner.token_bytes)
                self._count_hit(sequence, gained)
                self._report(sequence, 0)

    # ---- restoring

    def _restore(self, cold: Cold) -> None:
        """Have read from the disk what would take longer to compute."""
        restored = self.scheduler.restoring_keys()
        for job in self.scheduler.placed():
            sequence = self._sequences[job.id]
            answer = sequence.on_disk
            if answer is None or job.next_key in restored:
                continue
            if not answer.done():
                if job.state is State.PREFILLING:
                    self.scheduler.act(job.id, "fetch")
                    sequence.patient_until = self.clock() + ASK_SECONDS
                continue
            sequence.on_disk = None  # asked once
            found = answer.found()
            held = self.prefixes.match(sequence.keys).tokens // self.limits.block_size
            cut = sequence.cut // self.limits.block_size
            cold.note_held(answer, sequence.keys[:held], self._root(sequence), cut)
            if job.state is State.PREFILLING and self._begin_restore(cold, sequence, found):
                restored |= self.scheduler.restoring_keys()

    def _begin_restore(self, cold: Cold, sequence: Sequence, found: dict[EngineTier, int]) -> bool:
        """Have the blocks of a chain read that a cold tier has, if that is worth it."""
        done, over = divmod(sequence.cut, self.limits.block_size)
        fastest = None if sequence.runs or over else cold.fastest(found, done)
        if fastest is None:
            return False
        assert sequence.own is not None and sequence.pin is not None
        tier, on_disk = fastest
        keys, states = sequence.keys[:on_disk], None
        sequence.patient_until = self.clock() + tier.patience_seconds(done, on_disk)
        if tier.has_states:
            states = tier.begin_states(keys)
            if states is None:
                return False
            sequence.went_on_at = sequence.cut
            done = self._know(sequence, keys)  # those need the states alone
        sequence.restores = tier.begin(keys, done, sequence.own)
        if states is not None:
            sequence.restores.append(states)
        self.scheduler.act(sequence.id, "fetch")
        return True

    def _know(self, sequence: Sequence, keys: Items[bytes]) -> int:
        """Move a sequence's cut behind what the tree has of a chain, though it has no states
        there; return how many blocks that are."""
        assert sequence.pin is not None
        size = self.limits.block_size
        known = self.prefixes.follow(sequence.pin, keys, sequence.cut // size) * size
        if self.windows is None or self.windows.resume(sequence.pin.path, known) == known:
            sequence.cut = known
        return sequence.cut // size

    def _take_restored(self, cold: Cold) -> None:
        """Take in what was read from the disk, and compute what takes too long to come."""
        for job in self.scheduler.jobs(State.RESTORING):
            sequence = self._sequences[job.id]
            while sequence.restores and sequence.restores[0].answer.done():
                self._take_in(cold, sequence, sequence.restores.pop(0))
            impatient = self.clock() > sequence.patient_until
            if sequence.restores and impatient:
                self._lose_patience(cold, sequence)
            asked = sequence.on_disk
            if asked is not None and impatient:
                asked = sequence.on_disk = None
            if not sequence.restores and (asked is None or asked.done()):
                self.scheduler.act(sequence.id, "fetched")
                if sequence.went_on_at is None or self._go_on(sequence):
                    self._report(sequence, 0)

    def _go_on(self, sequence: Sequence) -> bool:
        """Go on at the deepest place, of all that was read, with states; False if there is no
        room to compute what is behind it: the sequence is parked then."""
        assert sequence.own is not None and sequence.pin is not None
        before, sequence.went_on_at = sequence.went_on_at, None
        most = min(sequence.cut, len(sequence.tokens) - 1)
        sequence.cut, sequence.live = self._resume(sequence.pin.path, most)
        more = self.needs.own(sequence.most_tokens, sequence.cut) - sequence.own.nbytes
        if more > 0 and not self.prefixes.make_room(more):
            self._park(sequence)
            return False
        sequence.own.resize(sequence.own.nbytes + more)
        self._count_hit(sequence, sequence.cut - (before or 0), restored=True)
        return True

    def _take_in(self, cold: Cold, sequence: Sequence, restore: Restore) -> None:
        """Hang restored blocks into the tree; if some are missing, nothing behind them is read."""
        assert sequence.own is not None
        if isinstance(restore.landing, StateLanding):
            self._take_in_states(cold, sequence, restore)
            return
        start, size = sequence.cut, self.limits.block_size
        nbytes = restore.paid.nbytes
        blocks = cold.take(restore, sequence.own)
        if restore.first * size != start:  # those in front of them are missing
            return
        if blocks == restore.blocks:
            self._insert(sequence, restore.landing.segment())
        elif blocks and self.prefixes.make_room(nbytes):
            with self.ledger.reserve(Kind.BUFFERS, nbytes):
                self._insert(sequence, restore.landing.segment().split(blocks * size)[0])
        # The last token of a prompt is computed in any case, for its logits.
        sequence.cut = min(sequence.cut, len(sequence.tokens) - 1)
        if sequence.went_on_at is None:
            self._count_hit(sequence, sequence.cut - start, restored=True)
        self._report(sequence, 0)
        if sequence.cut < min(start + restore.blocks * size, len(sequence.tokens) - 1):
            sequence.restores = cold.cancel(sequence.restores, sequence.own)

    def _take_in_states(self, cold: Cold, sequence: Sequence, restore: Restore) -> None:
        """File a restored checkpoint, if all the blocks in front of it are there."""
        states = cold.take_states(restore)
        end = restore.first * self.limits.block_size
        if states is None or self.checkpoints is None or sequence.pin is None:
            return
        live = Live(states, own=True)
        self.checkpoints.capture(sequence.pin.path, end, live, turn_end=True)

    def _lose_patience(self, cold: Cold, sequence: Sequence) -> None:
        """Compute what the disk has not brought, if there is room for both."""
        assert sequence.own is not None
        sequence.restores = cold.cancel(sequence.restores, sequence.own)
        nbytes = sum(
            restore.paid.nbytes
            for restore in sequence.restores
            if isinstance(restore.landing, Landing)
        )
        if self.prefixes.make_room(nbytes):
            cold.leave(sequence.restores)
            sequence.restores = []
            sequence.own.resize(sequence.own.nbytes + nbytes)

    def _root(self, sequence: Sequence) -> bytes:
        return self.prefixes.root(sequence.request.salt)

    def _shrink_own(self, sequence: Sequence, nbytes: int) -> None:
        assert sequence.own is not None
        sequence.own.resize(max(0, sequence.own.nbytes - nbytes))

    # ---- decoding

    def _decode(self, sequences: list[Sequence]) -> None:
        """Compute and commit one token of each."""
        rows = [sequence.row() for sequence in sequences]
        order = in_order(rows)
        sequences, rows = [sequences[i] for i in order], [rows[i] for i in order]
        started = time.perf_counter()
        try:
            decoded = self.runner.decode(
                [s.tokens[-1] for s in sequences], rows, self.tails, self._lives(sequences)
            )
            logits, writes = decoded.logits, [*self.tails.buffers(), *decoded.arrays()]
            choosers = [s.chooser for s in sequences]
            # Rows are computed on two streams; one multiplies better with all threads of BLAS.
            with one_thread() if len(rows) > 1 else nullcontext():
                if greedy_only(choosers):
                    best = likeliest(logits)
                    mx.eval(best.tokens, best.values, writes)
                    chosen = best.read()
                else:
                    mx.eval(logits, writes)
                    chosen = choose_all(logits, choosers, [s.generated for s in sequences])
            del logits, writes
        # A boundary: a model's code may raise anything, and none of it may end the engine.
        except Exception as error:  # noqa: BLE001
            self.peers.fault("decoding", error)
            self._decode_failed(sequences, error)
            return
        chosen = self.peers.chosen(chosen)
        self._oom_in_a_row = 0
        self.tally.decode_steps += 1
        self.tally.decode_seconds.append(time.perf_counter() - started)
        del rows
        if self.checkpoints is not None:
            for sequence, live in zip(sequences, decoded.lives, strict=True):
                sequence.live = live
        del decoded
        for sequence, choice in zip(sequences, chosen, strict=True):
            with self._isolated(sequence):
                if isinstance(choice, Exception):
                    raise choice
                self._advance(sequence)
                self._commit(sequence, choice)
        tell(sequence.handle for sequence in sequences)

    def _lives(self, sequences: Items[Sequence]) -> list[Live | None]:
        """Return what the recurrent layers keep of each; nothing if there are none."""
        return [] if self.checkpoints is None else [s.live for s in sequences]

    def _advance(self, sequence: Sequence) -> None:
        """Make the column that was written visible, and move full tails on."""
        size = self.limits.block_size
        if not sequence.runs and sequence.cut % size and sequence.tail == 0:
            # The last token of a prompt that the path holds to its end: it was computed for
            # its logits alone, and its KV is there already.
            sequence.cut += 1
            return
        sequence.tail += 1
        if sequence.tail == self.tails.columns or sequence.position % size == 0:
            self._fold(sequence)

    def _fold(self, sequence: Sequence) -> None:
        """Turn the tail into a run, and a run that ends a block into a node."""
        assert sequence.slot is not None
        size = self.limits.block_size
        start, last = sequence.sealed_end, None
        if sequence.runs and start % size:  # an unfinished block goes on growing
            last = sequence.runs.pop()
            start = last.start
        grown = self.tails.cut(sequence.slot, sequence.tail, last.segment if last else None)
        sequence.runs.append(Part(grown, start, grown.tokens))
        sequence.tail = 0
        if sequence.position % size == 0:
            self._complete(sequence)
            self._seal(sequence)
            self._capture(sequence)
        self._forget_unseen(sequence)

    def _complete(self, sequence: Sequence) -> None:
        """Put into a full block the rows of layers that compress, which were kept beside it."""
        rows = self.runner.layout.rows
        if rows and sequence.live is not None:
            run = sequence.runs[-1]
            segment, sequence.live = completed(run.segment, sequence.live, rows)
            sequence.runs[-1] = replace(run, segment=segment)

    def _seal(self, sequence: Sequence) -> None:
        """Hang the runs of whole blocks that continue the path into the tree."""
        size = self.limits.block_size
        sequence.name_blocks(self.prefixes, self._sealable())
        while sequence.runs and sequence.runs[0].start == sequence.cut:
            run = sequence.runs[0]
            if run.end % size or run.end > self._sealable():
                break
            if not self._insert_new(sequence, run.segment):
                break
            del sequence.runs[0]
        if sequence.pin is not None:
            self._tidy(sequence.pin.node)

    def _capture(self, sequence: Sequence, *, turn_end: bool = False) -> None:
        """File a sequence's states under the boundary that its path ends with, if it is at one."""
        if self.checkpoints is None or sequence.live is None or sequence.pin is None:
            return
        at_end = sequence.position == sequence.cut
        if at_end and sequence.cut % self.limits.block_size == 0:
            self.checkpoints.capture(
                sequence.pin.path, sequence.cut, sequence.live, turn_end=turn_end
            )
            if turn_end:
                self._note_checkpoint(sequence, sequence.cut)

    def _note_checkpoint(self, sequence: Sequence, at: int) -> None:
        """Have the states written that were filed under a boundary."""
        if self.cold is not None and self.checkpoints is not None:
            self.cold.note_checkpoint(sequence.keys[: at // self.limits.block_size])

    def _sealable(self) -> int:
        """Return up to which position KV depends on the tokens alone, not on the window."""
        size = self.limits.block_size
        return 0 if self.runner.fitness.whole else self.limits.max_kv_size // size * size

    def _insert_new(self, sequence: Sequence, segment: Segment) -> bool:
        """Hang blocks that were computed into the tree, and have them written."""
        first = sequence.cut // self.limits.block_size
        if not self._insert(sequence, segment):
            return False
        if self.cold is not None:
            keys = sequence.keys[: sequence.cut // self.limits.block_size]
            self.cold.note(keys, self._root(sequence), first)
        return True

    def _insert(self, sequence: Sequence, segment: Segment) -> bool:
        """Hang whole blocks behind a sequence's cut into the tree; False if there is no room."""
        size = self.limits.block_size
        assert sequence.pin is not None and sequence.own is not None
        done, start = sequence.cut // size, sequence.cut
        before = sequence.own.nbytes
        if self.windows is not None and not self.windows.fill(
            sequence.pin, sequence.keys, segment, start
        ):
            return False
        sealed = self.prefixes.insert(
            sequence.pin,
            done,
            sequence.keys,
            sequence.tokens[start : start + segment.tokens],
            segment,
            sequence.own,
        )
        if sealed.refused is not None:
            return False
        if self.quantiser is not None:
            self.quantiser.changed()
        end = sealed.blocks_readable * size
        if self.windows is not None and self.windows.resume(sequence.pin.path, end) < end:
            return False  # what was filled had to give way for the rest
        if start < sequence.hold_tokens:
            self._hold(sequence)  # before it is merged with what is not to be held
        gained = end - start
        sequence.cut = end
        # What the tree has taken over is off already; what others had sealed is not needed.
        moved = before - sequence.own.nbytes
        self._shrink_own(sequence, gained * self.runner.token_bytes - moved)
        return True

    def _forget_unseen(self, sequence: Sequence) -> None:
        """Let go of runs, and of the path, that no layer will see again."""
        nearest = self.runner.nearest(sequence.position)
        keep = max((sight.keep for sight in self.runner.distinct_sights), default=0)
        if nearest <= keep or not sequence.runs:
            return
        sequence.runs = [
            run
            for run in sequence.runs
            if run.end > nearest or run.start < keep or run is sequence.runs[-1]
        ]
        assert sequence.pin is not None
        if sequence.cut > keep and nearest >= sequence.cut:
            self._hold(sequence)
            path = [node for node in sequence.pin.path if node.start < keep]
            sequence.pin.withdraw(path[-1] if path else None)
            sequence.cut = min(sequence.cut, path[-1].end if path else 0)

    def _commit(self, sequence: Sequence, chosen: Chosen) -> None:
        """Say a token, or end the answer with it."""
        request = sequence.request
        self.tally.generated_tokens += 1
        goes_on = request.ignore_eos and request.grammar is None
        ends = chosen.token in self._ends and not goes_on
        if ends or chosen.token in request.stop_tokens:
            sequence.tokens.append(chosen.token)
            self._finish(sequence, lambda s: s.end("stop", stop=chosen.token))
            return
        complete = sequence.chooser.accept(chosen.token)
        sequence.say(chosen)
        stopped = sequence.text.stopped if sequence.text is not None else None
        if stopped is not None:
            self._finish(sequence, lambda s: s.end("stop", stop=stopped))
        elif complete:
            self._finish(sequence, lambda s: s.end("stop"))
        elif sequence.generated_tokens >= request.max_tokens:
            self._finish(sequence, lambda s: s.end("length"))

    # ---- prefilling

    def _prefill(self, sequence: Sequence, count: int) -> None:
        """Read the next `count` tokens of a prompt and seal what blocks they fill; of a model that
        takes a prompt as mlx-lm cuts it, up to the next cut."""
        start = sequence.position
        stops = [start + count]
        if self.runner.fitness.whole:
            stops = [sequence.whole_stop]
        elif self.checkpoints is not None:
            # Where its last whole block ends, and where the tree ended that it was let in with.
            wanted = {sequence.last_boundary(self.limits.block_size), sequence.meets}
            stops = [*sorted(stop for stop in wanted if start < stop < start + count), *stops]
        for stop in stops:
            if sequence.id in self._sequences:
                self._read(sequence, stop - sequence.position)

    def _read(self, sequence: Sequence, count: int) -> None:
        """Read the next `count` tokens of a prompt together."""
        unfinished = sequence.runs and sequence.runs[-1].end % self.limits.block_size
        if unfinished and not self.runner.fitness.whole:
            raise AssertionError(f"sequence {sequence.id} has an unfinished block to prefill")
        start = sequence.position
        tokens = sequence.tokens[start : start + count]
        started = time.perf_counter()
        for attempt in (1, 2):
            try:
                chunk = self.runner.prefill(tokens, sequence.parts(), start, sequence.live)
                break
            # A boundary, as in `_decode`.
            except Exception as error:  # noqa: BLE001
                self.peers.fault("reading a prompt", error)
                if attempt == 1 and self._shrink_after(error):
                    continue
                self._fail(sequence, _step_error("reading its prompt", error))
                return
        with self._isolated(sequence):
            if not self.peers.least(chunk.segment.is_finite()):
                raise StepFailed(
                    f"the model computed something without a number at tokens {start} to "
                    f"{start + count} of the prompt, as weights that overflow in float16 do"
                )
            if self.checkpoints is not None:
                sequence.live = Live(chunk.states, own=True)
            self._keep_chunk(sequence, chunk.segment, start)
            del chunk
            last = sequence.last_boundary(self.limits.block_size)
            self._capture(sequence, turn_end=sequence.position == last)
            self._end_prompt(sequence, last)
            self.tally.prefill_steps += 1
            self.tally.prefilled_tokens += count
            seconds = time.perf_counter() - started
            self.tally.prefill_seconds.append(seconds)
            self.pace.prefilled(count, seconds)
            self._report(sequence, count)

    def _end_prompt(self, sequence: Sequence, last: int) -> None:
        """Retain the windows in front of a prompt's last block, if it was read up to there."""
        if self.windows is None or self.checkpoints is not None or sequence.pin is None:
            return
        if sequence.left == 0 and 0 < last <= sequence.cut:
            self.windows.end_prompt(sequence.pin.path, last)

    def _keep_chunk(self, sequence: Sequence, segment: Segment, start: int) -> None:
        """Seal a chunk's whole blocks; what is left of it, or cannot be sealed, is a run."""
        size = self.limits.block_size
        end = start + segment.tokens
        if sequence.runs and start % size:  # cut by mlx-lm within a block
            run = sequence.runs.pop()
            segment, start = run.segment.join(segment), run.start
        whole = min(end // size * size, self._sealable()) - start
        if whole > 0 and not sequence.runs and sequence.cut == start:
            head, rest = segment, None
            if whole < segment.tokens:
                head, rest = segment.split(whole)
            if self._insert_new(sequence, head):
                if rest is not None:
                    sequence.runs.append(Part(rest, start + whole, rest.tokens))
                return
        # Runs end at blocks, but for the last one, which goes on growing.
        last = max(0, end // size * size - start)
        if 0 < last < segment.tokens:
            head, rest = segment.split(last)
            sequence.runs.append(Part(head, start, last))
            sequence.runs.append(Part(rest, start + last, rest.tokens))
        else:
            sequence.runs.append(Part(segment, start, segment.tokens))
        self._forget_unseen(sequence)

    # ---- giving back

    def _release(self, sequence: Sequence) -> None:
        """Give back everything that a sequence holds; its tokens stay."""
        sequence.runs.clear()
        if self.cold is not None:
            self.cold.leave(sequence.restores)
            sequence.restores = []
        sequence.tail = sequence.cut = 0
        sequence.live = sequence.went_on_at = None
        if sequence.slot is not None:
            self.tails.give_back(sequence.slot)
            sequence.slot = None
        if sequence.pin is not None:
            self._hold(sequence)
            sequence.pin.release()
            sequence.pin = None
            if self.quantiser is not None:
                self.quantiser.changed()
        for reservation in (sequence.own, sequence.step):
            if reservation is not None:
                reservation.release()
        sequence.own = sequence.step = None
        admitted = [s for s in self._sequences.values() if s.own is not None]
        chunks = (self.needs.chunk(other.most_tokens) for other in admitted)
        self._chunk.resize(max(chunks, default=0))

    def _hold(self, sequence: Sequence) -> None:
        """Prefer the first nodes of a sequence's path from now on, if its request asks for it."""
        if sequence.pin is not None and sequence.hold_tokens:
            seconds = sequence.request.hold_seconds
            self.prefixes.hold(sequence.pin, sequence.hold_tokens, seconds)

    def _park(self, sequence: Sequence) -> None:
        """Take a sequence out; it is let in again later and finds its sealed path."""
        node = sequence.pin.node if sequence.pin is not None else None
        self._release(sequence)
        sequence.was_parked = True
        self.tally.parkings += 1
        self.scheduler.act(sequence.id, "park")
        self.scheduler.progress(sequence.id, position=0, left=sequence.left)
        self._tidy(node)

    def _finish(self, sequence: Sequence, tell: Callable[[Sequence], None]) -> None:
        """Give all back, then tell the handle: who reads the end finds the bytes free."""
        node = sequence.pin.node if sequence.pin is not None else None
        if self.checkpoints is not None and sequence.pin is not None:
            ended = self.checkpoints.end_turn(sequence.pin.path, sequence.cut)
            self._note_checkpoint(sequence, ended)
        del self._sequences[sequence.id]
        self._release(sequence)
        self.scheduler.act(sequence.id, "finish")
        self.tally.finished += 1
        tell(sequence)
        self._tidy(node)

    def _tidy(self, node: Node[Segment] | None) -> None:
        """Merge small nodes of a path that somebody has left; it may fail, and nothing is lost."""
        try:
            self.prefixes.tidy(node)
        except (MemoryError, RuntimeError):  # MLX found no room for the copy
            self.tally.out_of_memory += 1

    def _fail(self, sequence: Sequence, error: PenstockError) -> None:
        """End an answer with an error; what it wrote may be no numbers, and is wiped."""
        self.tally.failed += 1
        if sequence.slot is not None:
            self.tails.wipe(sequence.slot)
        self._finish(sequence, lambda s: s.end("error", error=error))

    @contextmanager
    def _isolated(self, sequence: Sequence) -> Iterator[None]:
        """Let an exception end one answer and nobody else's."""
        try:
            yield
        # A boundary: a sampler, a detokenizer, a stop string of one request.
        except Exception as error:
            if sequence.id in self._sequences:
                self._fail(sequence, _step_error("choosing its next token", error))
            else:
                raise

    def _drop_overdue(self) -> None:
        for sequence_id in self.scheduler.overdue(self.clock()):
            self._finish(self._sequences[sequence_id], lambda s: s.end("timeout"))

    # ---- bad days

    def _decode_failed(self, sequences: list[Sequence], error: Exception) -> None:
        """End the step's answers; out of memory, only one of them, after a second try."""
        self.tails.drop()  # what it wrote may be no numbers
        if not out_of_memory(error):
            for sequence in sequences:
                self._fail(sequence, _step_error("decoding", error))
            return
        self._oom_in_a_row += 1
        if self._oom_in_a_row > 1:
            largest = max(sequences, key=lambda s: (s.position, s.id))
            self._fail(largest, _step_error("decoding", error))
            sequences = [s for s in sequences if s is not largest]
        self._shrink_after(error)
        for sequence in sequences:
            self._park(sequence)

    def _shrink_after(self, error: Exception) -> bool:
        """After MLX ran out of memory give up half of the cold nodes; tell whether it did."""
        if not out_of_memory(error):
            return False
        self.tally.out_of_memory += 1
        self.prefixes.shrink(max(1, self.prefixes.evictable_bytes // 2), "pressure")
        return True

    def _yield_to_others(self) -> None:
        """Give up cold nodes while the whole machine uses more memory than it should."""
        now = self.clock()
        if now - self._looked_seconds < PRESSURE_SECONDS:
            return
        self._looked_seconds = now
        over = self.peers.most(_over(self.limits.memory_threshold))
        if over > 0 and self.prefixes.shrink(over, "pressure"):
            _give_back()


def _over(threshold: float) -> int:
    """Return by how many bytes all programs together use more than a share of the memory."""
    if threshold >= 1:
        return 0
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available - threshold * memory.total)


def _fitting(limits: config.EngineSettings, runner: Runner) -> config.EngineSettings:
    """Return an engine's settings as a model can be run with.

    Raises:
        SettingError: it cannot, with these.
    """
    if runner.fitness.whole:
        limits = limits.model_copy(update={"prefill_chunk": WHOLE_CHUNK})
    compression = runner.layout.compression
    if compression is None:
        return limits
    if limits.block_size % compression.every:
        raise SettingError(
            f"block_size {limits.block_size}: the model's layers make one of {compression.every} "
            f"tokens; use a multiple of that"
        )
    if limits.kv_cache_quantization is not None:
        raise SettingError(
            "kv_cache_quantization: the model's layers compress what they keep by themselves"
        )
    return limits


def _give_back() -> None:
    """Let the system have what was freed, and what MLX and the heap keep for the next step."""
    mx.clear_cache()
    give_back_freed_memory()


_kept_bytes: dict[int, int] = {}
_kept_before: list[int] = []
_keeping = Lock()


def _share_mlx_cache(owner: int, nbytes: int | None) -> None:
    """Let MLX keep as many freed bytes as a step of each open core takes; None closes one.

    The limit is the process's: the first core notes what it was, and the last restores it.
    """
    with _keeping:
        if nbytes is None:
            _kept_bytes.pop(owner, None)
        else:
            _kept_bytes[owner] = nbytes
        if _kept_bytes:
            before = mx.set_cache_limit(sum(_kept_bytes.values()))
            if not _kept_before:
                _kept_before.append(before)
        elif _kept_before:
            mx.set_cache_limit(_kept_before.pop())


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights."""
    arrays: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in arrays)


def _step_error(doing: str, error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        without_frames(error)  # they would keep the step's arrays
        return error
    if out_of_memory(error):
        failed = StepFailed(f"out of memory while {doing}, also after the cache gave way: {error}")
        failed.status = 503
        return failed
    failed = StepFailed(f"the model failed while {doing}: {type(error).__name__}: {error}")
    failed.__cause__ = without_frames(error)  # its frames would keep the step's arrays
    return failed


def out_of_memory(error: Exception) -> bool:
    """Tell whether MLX could not allocate; each back end says so in its own words."""
    text = str(error).lower()
    words = ("malloc", "unable to allocate", "out of memory", "bad_alloc", "attempting to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )
