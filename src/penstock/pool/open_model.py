"""Loaded models and encoders of a pool: their engines, and their ledgers within the pool's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.encoders.decoder_embedder import DecoderEmbedder, EmbedderEngine
from penstock.encoders.encoder import Encoder
from penstock.encoders.encoder_engine import EncoderEngine
from penstock.engine.engine import Engine
from penstock.engine.turns import Turns
from penstock.engine.view import EngineView, Holdings
from penstock.ledger import Ledger, ModelLedger
from penstock.models.mlx_lm import Loaded
from penstock.models.unloading import drop_frames, unload


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """A model that a pool can load, and how to load it."""

    name: str
    load: Callable[[int], Loaded | Encoder | DecoderEmbedder]
    """Loads the model for a memory limit in bytes."""
    expected_bytes: Callable[[int], int]
    """Returns the bytes of the weights for a memory limit; raises if the model cannot be loaded."""
    encodes: bool = False
    """Whether `load` returns an `Encoder` or a `DecoderEmbedder`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the model's engine, except the memory limit."""
    pinned: bool = False
    ttl_seconds: float | None = None


class OpenMember:
    """Base of a pool's loaded models and encoders: a name, a ledger and turns.

    Args:
        ledger: the model's ledger, with the expected bytes reserved as an advance.
        turns: turns that the pool's engines take on the device.
    """

    engine: Engine | EncoderEngine | EmbedderEngine

    def __init__(self, name: str, ledger: ModelLedger, turns: Turns) -> None:
        self.name = name
        self.ledger = ledger
        self._turns = turns
        self.attached: Any = None
        """Object that the server keeps with the model while it is loaded."""

    def note_beside(self, nbytes: int) -> None:
        """Set the bytes of the pool's ledger that this model can never use."""
        self.ledger.beside_bytes = nbytes

    @property
    def alive(self) -> bool:
        return self.engine.alive

    def evict_prefixes(self, nbytes: int) -> Future[int]:
        return self.engine.evict_prefixes(nbytes)

    def set_limit(self, limit_bytes: int) -> None:
        self.engine.set_limit(limit_bytes)

    def check(self) -> None:
        self.engine.check()

    def _release(self) -> None:
        self._in_turn(self.ledger.close)

    def _in_turn(self, act: Callable[[], object]) -> None:
        with self._turns.turn(self):
            act()
        self._turns.forget(self)


class OpenModel(OpenMember):
    """A loaded generative model with its engine.

    Raises:
        ModelError: the model cannot be loaded.
        NeverFits: it takes more than the advance and the free memory. All bytes are released.
    """

    engine: Engine

    def __init__(self, spec: PoolMember, ledger: ModelLedger, turns: Turns) -> None:
        super().__init__(spec.name, ledger, turns)
        limit_bytes = ledger.limit_bytes
        try:
            self.loaded = cast(Loaded, spec.load(limit_bytes))
        except BaseException as error:
            drop_frames(error)
            self._release()
            raise
        try:
            self.engine = Engine(
                self.loaded.model,
                self.loaded.tokenizer,
                turns=turns,
                **{**spec.settings, "memory_limit": limit_bytes, "ledger": ledger},
            )
        except BaseException as error:
            drop_frames(error)
            unload(self.loaded.model)
            self._release()
            raise
        self._in_turn(ledger.end_advance)

    def holdings(self) -> Future[Holdings]:
        """Return a future of the bytes that the model holds, read between two engine steps."""
        return self.engine.ask(EngineView.holdings)

    def close(self) -> None:
        """Stop the engine, drop the weights and release all bytes."""
        self.engine.close()
        self.attached = None
        unload(self.loaded.model)
        self._release()


def advance(whole: Ledger, nbytes: int, beside_bytes: int) -> ModelLedger:
    """Return a ledger of a model's expected bytes, reserved. Hold a turn. Raises LedgerFull."""
    ledger = ModelLedger(whole, nbytes)
    ledger.beside_bytes = beside_bytes
    return ledger


class OpenEncoder(OpenMember):
    """A loaded encoder with its engine: the counterpart of `OpenModel`.

    Raises:
        ModelError: the encoder cannot be loaded.
        NeverFits: it takes more than the advance and the free memory. All bytes are released.
    """

    engine: EncoderEngine | EmbedderEngine

    def __init__(self, spec: PoolMember, ledger: ModelLedger, turns: Turns) -> None:
        super().__init__(spec.name, ledger, turns)
        try:
            encoder = spec.load(ledger.limit_bytes)
            self.engine = _engine(encoder, ledger, turns, spec.settings)
        except BaseException as error:
            drop_frames(error)
            self._release()
            raise
        self._in_turn(ledger.end_advance)

    def holdings(self) -> Future[Holdings]:
        return self.engine.holdings()

    def close(self) -> None:
        """Stop the engine, drop the weights and release all bytes."""
        self.engine.close()
        self.attached = None
        del self.engine.encoder
        self._release()


def _engine(
    encoder: Any, ledger: ModelLedger, turns: Turns, settings: Mapping[str, Any]
) -> EncoderEngine | EmbedderEngine:
    if not isinstance(encoder, DecoderEmbedder):
        return EncoderEngine(encoder, ledger, turns)
    try:
        return EmbedderEngine(encoder, ledger, turns, settings)
    except BaseException:
        unload(encoder.loaded.model)
        raise
