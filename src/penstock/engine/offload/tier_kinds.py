"""Kinds of cold tiers: the setting that names each, its checks, its store, its words.

A further kind is a store (`tiers.store.Store`) in a file of its own, its settings in `config` with
its name in `COLD_TIERS` there, and one line in `TIER_KINDS` here. The command line, the banner, the
metrics, the interfaces and the page read this list and `Stats.tiers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.config import EngineSettings
from penstock.errors import SettingError
from penstock.kv.block_spans import Spans
from penstock.memory import format_bytes
from penstock.tiers.disk.disk_store import SSDStore
from penstock.tiers.disk.limits import payload_bytes
from penstock.tiers.disk.tombstone import Tombstone
from penstock.tiers.record import HEAD_BYTES
from penstock.tiers.remote.object_urls import check_url, open_objects, shown
from penstock.tiers.remote.remote_store import PIECE_BYTES, RemoteStore, buffer_bytes
from penstock.tiers.store import Store


@dataclass(frozen=True, slots=True)
class TierContent:
    """Description of the records that an engine keeps in its cold tiers."""

    fingerprint: str
    """Identity of everything that must be equal for KV to be reusable, besides the tokens."""
    spans: Spans
    """Blocks that make a record together."""
    record_bytes: int
    """Bytes of the largest record."""


@dataclass(frozen=True, slots=True)
class StoreOpener:
    """A store that the thread of a tier will open."""

    open: Callable[[], Store]
    """Opener, called again after a fault; may raise `OSError` or `sqlite3.Error`."""
    name: str
    """Name in messages, without anything secret."""
    buffer_bytes: int = 0
    """Bytes that the store holds in memory, besides blocks that are written."""
    tombstone: Tombstone | None = None
    """Memory of a deletion across restarts; None has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierKind:
    """A kind of cold tier."""

    name: str
    """Name in `Stats.tiers`, in the interfaces and on the page."""
    setting: str
    """Field of `EngineSettings` that names a tier of this kind; None there is no tier."""
    where: str
    """Place of its blocks, in words."""
    metrics_prefix: str
    """Beginning of its metrics, behind `penstock_`."""
    check: Callable[[EngineSettings], None]
    """Check of its settings before anything is opened; raises SettingError."""
    address: Callable[[EngineSettings], str]
    """Place and limits for people, without anything secret."""
    opener: Callable[[EngineSettings, TierContent], StoreOpener]
    """Maker of its store."""
    is_shared: bool = False
    """Whether its blocks are other servers' as well: `clear` leaves them."""

    def is_named(self, limits: EngineSettings) -> bool:
        """Tell whether settings name a tier of this kind."""
        return getattr(limits, self.setting) is not None


def check_tiers(limits: EngineSettings) -> None:
    """Check the settings of all tiers that are named.

    Raises:
        SettingError: a limit is too small for anything, or a URL names no store.
    """
    for kind in TIER_KINDS.values():
        if kind.is_named(limits):
            kind.check(limits)


# ---- a folder


def _check_disk(limits: EngineSettings) -> None:
    try:
        payload_bytes(limits.ssd_cache_limit)
    except ValueError as error:
        raise SettingError(f"ssd_cache_limit: {error}") from None


def _disk_address(limits: EngineSettings) -> str:
    return f"{limits.ssd_cache_dir}, limit {format_bytes(limits.ssd_cache_limit)}"


def _disk_opener(limits: EngineSettings, content: TierContent) -> StoreOpener:
    folder = limits.ssd_cache_dir
    assert folder is not None

    def open_store() -> SSDStore:
        return SSDStore(
            folder,
            limits.ssd_cache_limit,
            fingerprint=content.fingerprint,
            budget_bytes=limits.ssd_write_budget,
            spans=content.spans,
        )

    return StoreOpener(open_store, "SSD cache", tombstone=Tombstone(folder, content.fingerprint))


# ---- a store that servers share


def _check_remote(limits: EngineSettings) -> None:
    assert limits.remote_cache is not None
    check_url(limits.remote_cache)


def _remote_address(limits: EngineSettings) -> str:
    assert limits.remote_cache is not None
    return shown(limits.remote_cache)


def _remote_opener(limits: EngineSettings, content: TierContent) -> StoreOpener:
    url, piece_bytes = limits.remote_cache, min(PIECE_BYTES, content.record_bytes + HEAD_BYTES)
    seconds, ttl_seconds = limits.remote_cache_timeout_seconds, limits.remote_cache_ttl_seconds
    assert url is not None

    def open_store() -> RemoteStore:
        return RemoteStore(
            open_objects(
                url,
                ttl_seconds=ttl_seconds,
                timeout_seconds=seconds,
                put_seconds=seconds * max(1.0, content.record_bytes / PIECE_BYTES),
            ),
            fingerprint=content.fingerprint,
            piece_bytes=piece_bytes,
            timeout_seconds=seconds,
            ttl_seconds=ttl_seconds,
            spans=content.spans,
        )

    return StoreOpener(open_store, f"remote cache {shown(url)}", buffer_bytes(piece_bytes))


TIER_KINDS: dict[str, TierKind] = {
    kind.name: kind
    for kind in (
        TierKind(
            name="disk",
            setting="ssd_cache_dir",
            where="on the disk",
            metrics_prefix="ssd",
            check=_check_disk,
            address=_disk_address,
            opener=_disk_opener,
        ),
        TierKind(
            name="remote",
            setting="remote_cache",
            where="in the remote cache",
            metrics_prefix="remote",
            check=_check_remote,
            address=_remote_address,
            opener=_remote_opener,
            is_shared=True,
        ),
    )
}
"""All kinds by name, the nearest first."""
