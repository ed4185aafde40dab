"""Interface of a kind of cold tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.config import EngineSettings
from penstock.kv.block_spans import Spans
from penstock.tiers.disk.tombstone import Tombstone
from penstock.tiers.store import Store


@dataclass(frozen=True, slots=True)
class TierContent:
    """Description of the records of an engine in its cold tiers."""

    fingerprint: str
    """Identity of everything that must be equal for KV to be reusable, besides the tokens."""
    spans: Spans
    record_bytes: int


@dataclass(frozen=True, slots=True)
class StoreOpener:
    open: Callable[[], Store]
    """Opener, called again after a fault; may raise `OSError` or `sqlite3.Error`."""
    name: str
    buffer_bytes: int = 0
    """Memory of the store in bytes, besides blocks being written."""
    tombstone: Tombstone | None = None
    """Record of a pending deletion, kept across restarts; None if the store keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierKind:
    name: str
    setting: str
    """Field of `EngineSettings` that names a tier of this kind; None for no tier."""
    where: str
    """Place of its blocks, in words."""
    metrics_prefix: str
    """Prefix of its metrics, after `penstock_`."""
    check: Callable[[EngineSettings], None]
    """Check of its settings before anything is opened; raises SettingError."""
    address: Callable[[EngineSettings], str]
    """Place and limits for people, without secrets."""
    opener: Callable[[EngineSettings, TierContent], StoreOpener]
    is_shared: bool = False
    """Whether other servers use its blocks as well: `clear` leaves them."""

    def is_named(self, limits: EngineSettings) -> bool:
        return getattr(limits, self.setting) is not None
