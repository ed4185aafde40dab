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
    """Description of an engine's records in its cold tiers."""

    fingerprint: str
    """Identifies everything besides the tokens that must be equal for KV to be reusable."""
    spans: Spans
    record_bytes: int


@dataclass(frozen=True, slots=True)
class StoreOpener:
    open: Callable[[], Store]
    """Opens the store, also after an error; may raise `OSError` or `sqlite3.Error`."""
    name: str
    buffer_bytes: int = 0
    """Memory of the store in bytes, excluding blocks being written."""
    tombstone: Tombstone | None = None
    """Persistent record of a pending `clear`; None if the store needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierKind:
    name: str
    setting: str
    """Field of `EngineSettings` that enables a tier of this kind unless None."""
    where: str
    """Location of the blocks, for messages."""
    metrics_prefix: str
    """Prefix of the tier's metrics, after `penstock_`."""
    check: Callable[[EngineSettings], None]
    """Checks the settings before anything is opened; raises SettingError."""
    address: Callable[[EngineSettings], str]
    """Returns location and limits for display, without secrets."""
    opener: Callable[[EngineSettings, TierContent], StoreOpener]
    is_shared: bool = False
    """Whether other servers use the blocks, too; `clear` then leaves them."""

    def is_named(self, limits: EngineSettings) -> bool:
        return getattr(limits, self.setting) is not None
