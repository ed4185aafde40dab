"""A loaded encoder of a pool: its engine, and its ledger within the pool's."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from penstock.encoders.decoder_embedder import DecoderEmbedder, EmbedderEngine
from penstock.encoders.encoder_engine import EncoderEngine
from penstock.engine.turns import Turns
from penstock.engine.view import Holdings
from penstock.ledger import ModelLedger
from penstock.models.unloading import drop_frames, unload
from penstock.pool.open_model import OpenMember, PoolMember


class OpenEncoder(OpenMember):
    """A loaded encoder with its engine: the counterpart of `OpenModel`.

    Raises:
        ModelError: the encoder cannot be loaded.
        NeverFits: it takes more than the advance and the free memory. All bytes are released.
    """

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

    @property
    def alive(self) -> bool:
        return self.engine.alive

    def holdings(self) -> Future[Holdings]:
        return self.engine.holdings()

    def evict_prefixes(self, nbytes: int) -> Future[int]:
        return self.engine.evict_prefixes(nbytes)

    def set_limit(self, limit_bytes: int) -> None:
        self.engine.set_limit(limit_bytes)

    def check(self) -> None:
        self.engine.check()

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
