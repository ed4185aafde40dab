"""A loaded encoder of a pool: its engine, and its ledger within the pool's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from penstock.encoders.encoder import Encoder
from penstock.encoders.encoder_engine import EncoderEngine
from penstock.engine.turns import Turns
from penstock.engine.view import Holdings
from penstock.ledger import ModelLedger
from penstock.models.unloading import drop_frames
from penstock.pool.open_model import OpenMember


class OpenEncoder(OpenMember):
    """A loaded encoder with its engine: the counterpart of `OpenModel`.

    Raises:
        ModelError: the encoder cannot be loaded.
        NeverFits: it takes more than the advance and the free memory. All bytes are released.
    """

    def __init__(
        self, name: str, load: Callable[[int], Encoder], ledger: ModelLedger, turns: Turns
    ) -> None:
        super().__init__(name, ledger, turns)
        try:
            encoder = load(ledger.limit_bytes)
            self.engine = EncoderEngine(encoder, ledger, turns)
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
        """Return a future of 0: an encoder caches nothing between requests."""
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def set_limit(self, limit_bytes: int) -> None:
        self._in_turn(lambda: self.ledger.set_limit(limit_bytes))

    def check(self) -> None:
        self.engine.check()

    def close(self) -> None:
        """Stop the engine, drop the weights and release all bytes."""
        self.engine.close()
        self.attached = None
        del self.engine.encoder
        self._release()
