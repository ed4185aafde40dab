"""`ModelPool`: several models in one process, under one ledger.

    enter ──> loaded? ── yes ──────────────────────────> its engine ──> leave
                │ no                                        ^
                └──> make room ──> reserve ──> load ────────┘
                     evict the least valuable prefixes and models; drain a busy one if need be

`model_policy` decides what to evict; this module carries it out, on a thread of its own. Models
are loaded one at a time. Each engine has its thread; they take turns on the device and the ledger.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from penstock.attention.devices import claim_main_thread
from penstock.engine.turns import Turns
from penstock.engine.view import Holdings
from penstock.errors import EngineStopped, LedgerFull, ModelError, NeverFits, PenstockError
from penstock.heap import give_back_freed_memory, keep_freed_memory
from penstock.ledger import Kind, Ledger, ModelLedger
from penstock.memory.sizes import format_bytes
from penstock.pool.model_policy import (
    FreeableBytes,
    Resident,
    Standing,
    check_fits,
    room_plan,
    to_drain,
)
from penstock.pool.open_model import OpenEncoder, OpenModel, PoolMember, advance

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
BUSY_TICK_SECONDS = 0.02
"""Interval of the pool's thread while a model waits for memory."""
BESIDE_BYTES = 16_000_000
BESIDE_SHARE = 1 / 16
"""Estimated memory of a model besides its weights, as a share of them, before its first load; for
small models as much as the weights, up to `BESIDE_BYTES`. If it is too low, loading is retried."""
MORE = 1.02
"""Factor on the counted bytes of an idle model, as headroom for a first sequence."""
RETRY_MORE = 1.25
"""Factor on the estimate when loading is retried."""
LOW_SHARE = 0.02
"""Share of the limit that is kept free for the models in use, by evicting older prefixes."""
PATIENCE_SECONDS = 2.0
"""Seconds that a request waits for memory before another model is drained for it."""
CLOSE_SECONDS = 120.0

LoadedMember: TypeAlias = OpenModel | OpenEncoder


@dataclass(frozen=True, slots=True)
class ModelState:
    """Snapshot of a model in the pool, for clients."""

    name: str
    standing: Standing
    pinned: bool
    nbytes: int
    """Bytes in the ledger; the estimate while the model is not loaded, 0 if there is none."""
    open_requests: int
    error: str | None
    """Error of the last load, or of a dead engine; None if there was none."""


class _PoolPlace:
    """The pool's entry of one model: facts for the policy, its engine, and waiting requests."""

    def __init__(self, spec: PoolMember) -> None:
        self.spec = spec
        self.resident = Resident(name=spec.name, pinned=spec.pinned, ttl_seconds=spec.ttl_seconds)
        self.open: LoadedMember | None = None
        self.waiting: list[Future[LoadedMember]] = []
        self.leaving: list[Future[None]] = []
        """Futures of `unload`, resolved once the model is evicted."""
        self.error: str | None = None
        self.short_since: float | None = None
        """Time since which requests of the model wait for memory; None if none does."""


class ModelPool:
    """Loads models on demand within one memory limit. Thread-safe.

    Args:
        specs: the models, with distinct names.
        limit_bytes: memory limit of all models together.
        aside_bytes: bytes of the limit set aside for the server's prompts.
        opened: called with each loaded model before its first request, in the loading thread.
        closing: called with each model before it is evicted.
        stuck: called with a draining model whose requests deadlock with another model's, each
            waiting for the other's memory. It ends the draining model's requests, and may let
            them enter again.
    """

    def __init__(
        self,
        specs: Sequence[PoolMember],
        limit_bytes: int,
        *,
        aside_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        opened: Callable[[LoadedMember], object] = lambda model: None,
        closing: Callable[[LoadedMember], object] = lambda model: None,
        stuck: Callable[[LoadedMember], object] = lambda model: None,
    ) -> None:
        keep_freed_memory()  # before there are threads: one that has an arena keeps it
        claim_main_thread()  # before the thread that loads models uses MLX
        self.ledger = Ledger(limit_bytes)
        self.turns = Turns()
        self._aside = self.ledger.reserve(Kind.PROMPTS, aside_bytes)
        self._places = {spec.name: _PoolPlace(spec) for spec in specs}
        self._clock = clock
        self._opened = opened
        self._closing = closing
        self._stuck = stuck
        self._lock = threading.Lock()
        """Guards the models' standings, request counts and waiting requests."""
        self._wanted: list[_PoolPlace] = []
        self._loading: _PoolPlace | None = None
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._ends = False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="penstock-load")
        self._thread = threading.Thread(target=self._run, name="penstock-pool", daemon=True)
        self._thread.start()

    # ---- for requests

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def enter(self, name: str) -> Future[LoadedMember]:
        """Begin a request: return a future of the model, loaded first if needed. Never waits.

        Call `leave` once for each result. Cancel the future to stop waiting.

        Raises (the future):
            EngineStopped: the pool is closed.
            ModelError: the model cannot be loaded.
            NeverFits: the model does not fit, even alone with the pinned models.
        """
        answer: Future[LoadedMember] = Future()
        place = self._places[name]
        with self._lock:
            if self._ends:
                answer.set_exception(EngineStopped("the models are closed"))
                return answer
            loaded = place.resident.standing is Standing.LOADED
            if loaded:
                self._count(place)
            else:
                place.waiting.append(answer)
                if place.resident.standing is Standing.AWAY and place not in self._wanted:
                    self._wanted.append(place)
        if loaded:
            answer.set_result(_opened(place))
        else:
            self._calls.put(lambda: None)
        return answer

    def leave(self, name: str) -> None:
        """End a request begun by `enter`."""
        with self._lock:
            resident = self._places[name].resident
            resident.open_requests -= 1
            resident.used_seconds = self._clock()
            idle = not resident.open_requests and self._wanted
        if idle:
            self._calls.put(lambda: None)

    # ---- for operators

    def load(self, name: str) -> Future[None]:
        """Load a model without a request; the future raises the errors of `enter`."""
        done: Future[None] = Future()

        def entered(model: Future[LoadedMember]) -> None:
            error = model.exception()
            if error is not None:
                done.set_exception(error)
                return
            self.leave(name)
            done.set_result(None)

        self.enter(name).add_done_callback(entered)
        return done

    def unload(self, name: str) -> Future[None]:
        """Drain and evict a model, even a pinned one; a later request loads it again."""
        done: Future[None] = Future()
        place = self._places[name]

        def begin() -> None:
            with self._lock:
                if place.open is None:
                    done.set_result(None)
                    return
                place.resident.standing = Standing.LEAVING
                place.leaving.append(done)

        self._calls.put(begin)
        return done

    def set_limit(self, limit_bytes: int) -> Future[None]:
        """Change the memory limit of all models together, evicting and preempting to meet it.

        Raises (the future):
            NeverFits: the fixed bytes of models in use exceed the limit, which is left unchanged.
        """
        done: Future[None] = Future()

        def change() -> None:
            try:
                self._change_limit(limit_bytes)
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                done.set_exception(error)
            else:
                done.set_result(None)

        self._calls.put(change)
        return done

    def states(self) -> list[ModelState]:
        with self._lock:
            return [self._state(place) for place in self._places.values()]

    def loaded(self) -> dict[str, LoadedMember]:
        """Return the loaded models; one without an open request may be evicted at any time."""
        with self._lock:
            return {name: p.open for name, p in self._places.items() if p.open is not None}

    def check(self) -> None:
        """Recount the bytes of all loaded models; raise AssertionError if a count differs.

        No model may be loaded or unloaded during the call.
        """
        models = self.loaded().values()
        for model in models:
            model.check()
        with self.turns.turn(self):
            counted = dict.fromkeys(Kind, 0) | {Kind.PROMPTS: self._aside.nbytes}
            for model in models:
                for kind, nbytes in model.ledger.by_class().items():
                    counted[kind] += nbytes
            self.ledger.check(counted)

    def close(self) -> None:
        """Close all models and end the pool's threads. Idempotent."""
        with self._lock:
            if self._ends:
                return
            self._ends = True
        self._calls.put(lambda: None)
        self._thread.join(CLOSE_SECONDS)

    def __enter__(self) -> ModelPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the pool's thread

    def _run(self) -> None:
        while not self._ends:
            waits = self._wanted or any(p.short_since is not None for p in self._places.values())
            with suppress(queue.Empty):
                self._calls.get(timeout=BUSY_TICK_SECONDS if waits else TICK_SECONDS)()
            try:
                self._tick()
            # A boundary: one failing model does not stop the pool.
            except Exception as error:
                logger.error(
                    "an iteration of the model pool failed with %s; the pool keeps running",
                    type(error).__name__,
                )
                logger.debug("traceback of the failed iteration", exc_info=error)
        self._loader.submit(mx.clear_streams).result()  # after the model that is being loaded
        self._loader.shutdown()
        while not self._calls.empty():
            self._calls.get()()
        stopped = EngineStopped("the models are closed")
        for place in self._places.values():
            self._fail(place, stopped)
            if place.open is not None:
                self._evict(place)
        with self.turns.turn(self):
            self._aside.release()
        mx.clear_streams()

    def _tick(self) -> None:
        now = self._clock()
        for place in self._places.values():
            if place.open is not None and not place.open.alive:
                place.error = "its engine has died; see the log"
                with self._lock:
                    place.resident.standing = Standing.LEAVING
            if place.resident.standing is Standing.LEAVING or place.resident.has_expired(now):
                self._evict(place)
        self._begin_load(now)
        self._relieve(now)

    # ---- loading

    def _begin_load(self, now: float) -> None:
        with self._lock:
            self._wanted = [p for p in self._wanted if any(not f.cancelled() for f in p.waiting)]
        if self._loading is not None or not self._wanted:
            return
        place = self._wanted[0]
        try:
            if not self._make_room(place, self._expect(place), now):
                return
            with self.turns.turn(self):
                beside = self._beside_bytes(place)
                ledger = advance(self.ledger, place.resident.fixed_bytes, beside)
        except LedgerFull:
            return  # another model has taken the memory meanwhile
        # A boundary: a broken folder fails only the requests of its model.
        except Exception as error:  # noqa: BLE001 - handed to the waiting requests
            self._forget_wanted(place)
            self._fail(place, _load_error(place, error))
            return
        self._forget_wanted(place)
        self._loading = place
        with self._lock:
            place.resident.standing = Standing.LOADING
        self._loader.submit(self._load, place, ledger)

    def _expect(self, place: _PoolPlace) -> int:
        """Return the bytes to reserve for a load; raise if the model can never be loaded."""
        resident, limit = place.resident, self.ledger.limit_bytes
        if not resident.fixed_bytes:
            room = limit - self._beside_bytes(place)
            weights = place.spec.expected_bytes(limit - self._aside.nbytes)
            beside = max(min(BESIDE_BYTES, weights), int(weights * BESIDE_SHARE))
            # The estimate alone never refuses a model: it is capped at the free memory.
            resident.fixed_bytes = max(weights, min(weights + beside, room))
        check_fits(resident, self._residents(), limit, self._aside.nbytes)
        return resident.fixed_bytes

    def _load(self, place: _PoolPlace, ledger: ModelLedger) -> None:
        """Load a model, on the loading thread; the pool's thread takes the result."""
        began = time.monotonic()
        try:
            model = _open(place.spec, ledger, self.turns)
            try:
                self._opened(model)
            except BaseException:
                model.close()
                raise
        except BaseException as error:  # noqa: BLE001 - handed to the waiting requests
            mx.clear_cache()
            failed = error
            self._calls.put(lambda: self._not_loaded(place, failed))
            return
        seconds = time.monotonic() - began
        self._calls.put(lambda: self._loaded(place, model, seconds))

    def _loaded(self, place: _PoolPlace, model: LoadedMember, seconds: float) -> None:
        self._loading = None
        resident, place.error = place.resident, None
        holdings = model.holdings().result()
        give_back_freed_memory()
        with self._lock:
            place.open = model
            resident.standing = Standing.LOADED
            resident.load_seconds = seconds
            resident.fixed_bytes = int(MORE * holdings.fixed_bytes)
            resident.used_seconds = self._clock()
            waiting, place.waiting = place.waiting, []
            entered = [answer for answer in waiting if answer.set_running_or_notify_cancel()]
            for _ in entered:
                self._count(place)
        for answer in entered:
            answer.set_result(model)
        self._note_beside()
        logger.info("%s loaded in %.1f s", resident.name, seconds)

    def _not_loaded(self, place: _PoolPlace, error: BaseException) -> None:
        self._loading = None
        resident = place.resident
        with self._lock:
            resident.standing = Standing.AWAY
        room = self.ledger.limit_bytes - self._beside_bytes(place)
        if isinstance(error, NeverFits) and resident.fixed_bytes < room:  # the estimate was low
            more = max(int(RETRY_MORE * resident.fixed_bytes), error.wanted_limit_bytes)
            resident.fixed_bytes = min(room, more)
            with self._lock:
                self._wanted.insert(0, place)
            return
        if isinstance(error, NeverFits):
            resident.fixed_bytes = max(resident.fixed_bytes, error.wanted_limit_bytes)
            try:
                self._expect(place)
            except NeverFits as refusal:  # names the pinned models
                error = refusal
        resident.fixed_bytes = 0
        self._fail(place, _load_error(place, error))

    def _fail(self, place: _PoolPlace, error: PenstockError) -> None:
        with self._lock:
            waiting, place.waiting = place.waiting, []
        if not isinstance(error, EngineStopped):
            place.error = str(error)
            logger.error("loading %s failed: %s", place.resident.name, error)
        for answer in waiting:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

    def _forget_wanted(self, place: _PoolPlace) -> None:
        with self._lock:
            self._wanted.remove(place)

    # ---- room

    def _make_room(self, place: _PoolPlace, nbytes: int, now: float) -> bool:
        """Free bytes for a model, draining a busy one if need be; return whether they are free."""
        missing = nbytes - self.ledger.room_bytes
        if missing <= 0:
            return True
        others = [p.resident for p in self._others(place)]
        self._look([p for p in self._others(place) if p.open is not None])
        plan = room_plan(others, missing, now)
        if plan is not None:
            self._carry_out(plan)
            return nbytes <= self.ledger.room_bytes
        self._drain(others)
        return False

    def _drain(self, residents: Sequence[Resident]) -> None:
        """Drain a busy model, unless one is draining already."""
        with self._lock:
            if any(p.resident.standing is Standing.LEAVING for p in self._places.values()):
                return
            leaving = to_drain(residents)
            if leaving is not None:
                leaving.standing = Standing.LEAVING

    def _carry_out(self, plan: Sequence[FreeableBytes]) -> None:
        for relief in plan:
            place = self._places[relief.resident.name]
            if place.open is None:
                continue
            if relief.whole:
                self._evict(place)
            else:
                with suppress(EngineStopped):
                    place.open.evict_prefixes(relief.nbytes).result()

    def _evict(self, place: _PoolPlace) -> bool:
        """Close a model and return True, unless it has open requests."""
        with self._lock:
            model, resident = place.open, place.resident
            if model is None or (resident.open_requests and not self._ends):
                return False
            resident.standing = Standing.LEAVING
        self._closing(model)
        model.close()
        mx.clear_cache()
        give_back_freed_memory()
        logger.info("%s unloaded", resident.name)
        with self._lock:
            place.open = place.short_since = None
            resident.standing = Standing.AWAY
            resident.cold_bytes, resident.cold_seconds = 0, 0.0
            if place.waiting and place not in self._wanted:
                self._wanted.append(place)
            left, place.leaving = place.leaving, []
        for done in left:
            done.set_result(None)
        self._note_beside()
        return True

    def _relieve(self, now: float) -> None:
        """Free memory for a model whose requests wait for it, and keep `LOW_SHARE` free."""
        places = [p for p in self._places.values() if p.open is not None]
        busy = [p for p in places if p.resident.open_requests]
        if len(places) < 2 or not busy:
            return
        low = self.ledger.room_bytes < LOW_SHARE * self.ledger.limit_bytes
        for place, holdings in self._look(places if low else busy):
            if not holdings.missing_bytes:
                place.short_since = None
                continue
            since = place.short_since = place.short_since or now
            others = [p.resident for p in places if p is not place]
            self._look([p for p in places if p is not place])
            plan = room_plan(others, holdings.missing_bytes, now)
            if plan is not None:
                self._carry_out(plan)
            elif now - since > PATIENCE_SECONDS:
                if place.resident.standing is Standing.LEAVING and place.open is not None:
                    place.short_since = now
                    self._stuck(place.open)
                else:
                    self._drain(others)
        if low and not any(p.short_since is not None for p in places):
            self._refill(places, now)

    def _refill(self, places: Sequence[_PoolPlace], now: float) -> None:
        """Evict the least valuable prefixes of all models but the most recently used."""
        newest = max(places, key=lambda p: p.resident.used_seconds)
        wanted = int(LOW_SHARE * self.ledger.limit_bytes)
        residents = [p.resident for p in places]
        plan = room_plan([r for r in residents if r is not newest.resident], wanted, now)
        self._carry_out([relief for relief in plan or () if not relief.whole])

    def _look(self, places: Sequence[_PoolPlace]) -> list[tuple[_PoolPlace, Holdings]]:
        """Update the policy's facts about loaded models. Waits for a step of each engine."""
        asked = [(p, p.open.holdings()) for p in places if p.open is not None]
        answered = []
        for place, answer in asked:
            with suppress(EngineStopped):
                holdings = answer.result()
                place.resident.cold_bytes = holdings.cold_bytes
                place.resident.cold_seconds = holdings.cold_seconds
                answered.append((place, holdings))
        return answered

    def _change_limit(self, limit_bytes: int) -> None:
        self._look(places := [p for p in self._places.values() if p.open is not None])
        staying = [p for p in places if not p.resident.may_go]
        fixed = sum(p.resident.fixed_bytes for p in staying) + self._aside.nbytes
        fixed += 0 if self._loading is None else self._loading.resident.fixed_bytes
        if fixed > limit_bytes:
            raise NeverFits(
                f"models in use always hold {format_bytes(fixed)}; the limit cannot be "
                f"{format_bytes(limit_bytes)}",
                fixed,
                limit_bytes,
                limit_bytes,
            )
        with self.turns.turn(self):
            over = self.ledger.set_limit(limit_bytes)
        now = self._clock()
        plan = room_plan([p.resident for p in places], over, now) or [
            FreeableBytes(p.resident, p.resident.cold_bytes, p.resident.may_go, 0.0) for p in places
        ]
        self._carry_out(plan)
        for place in places:
            if place.open is not None:
                with suppress(EngineStopped):
                    place.open.set_limit(limit_bytes)
        self._note_beside()

    def _count(self, place: _PoolPlace) -> None:
        """Count a new open request of a loaded model. The caller holds the lock."""
        place.resident.open_requests += 1
        place.resident.used_seconds = self._clock()

    def _others(self, place: _PoolPlace) -> list[_PoolPlace]:
        return [other for other in self._places.values() if other is not place]

    def _residents(self) -> list[Resident]:
        return [place.resident for place in self._places.values()]

    def _beside_bytes(self, place: _PoolPlace) -> int:
        """Return the bytes that a model can never use: the prompts' and loaded pinned models'."""
        pinned = [p.resident for p in self._others(place) if p.resident.pinned]
        there = (r.fixed_bytes for r in pinned if r.standing is not Standing.AWAY)
        return self._aside.nbytes + sum(there)

    def _note_beside(self) -> None:
        for place in self._places.values():
            if place.open is not None:
                place.open.note_beside(self._beside_bytes(place))

    def _state(self, place: _PoolPlace) -> ModelState:
        resident, model = place.resident, place.open
        return ModelState(
            resident.name,
            resident.standing,
            resident.pinned,
            resident.fixed_bytes if model is None else model.ledger.used_bytes,
            resident.open_requests,
            place.error,
        )


def _opened(place: _PoolPlace) -> LoadedMember:
    assert place.open is not None
    return place.open


def _open(spec: PoolMember, ledger: ModelLedger, turns: Turns) -> LoadedMember:
    if spec.encodes:
        return OpenEncoder(spec, ledger, turns)
    return OpenModel(spec, ledger, turns)


def _load_error(place: _PoolPlace, error: BaseException) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    logger.debug("traceback of the failed load", exc_info=error)
    return ModelError(f"{place.resident.name} cannot be loaded: {type(error).__name__}")
