"""Kinds of cold tiers: setting, checks, store and texts of each.

To add a kind, write a store (`tiers.store.Store`), add its settings to `config` and the one that
enables it to `COLD_TIERS` there, and add a line to `TIER_KINDS` here. `remote` is a plug-in. The
command line, the banner, the metrics, the APIs and the page use this list and `Stats.tiers`.
"""

from __future__ import annotations

from penstock.config import EngineSettings
from penstock.engine.offload.tier_kind import StoreOpener, TierContent, TierKind
from penstock.errors import SettingError
from penstock.extensions import extension
from penstock.memory.sizes import format_bytes
from penstock.tiers.disk.disk_store import SSDStore
from penstock.tiers.disk.limits import payload_bytes
from penstock.tiers.disk.tombstone import Tombstone


def check_tiers(limits: EngineSettings) -> None:
    """Raise SettingError if a tier's limit is too small, its URL invalid, or a plug-in missing."""
    known = {kind.setting: kind for kind in TIER_KINDS.values()}
    for setting in limits.cold_tiers:
        if setting not in known:
            raise SettingError(f"{setting} needs a plug-in that is not installed")
        known[setting].check(limits)


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


DISK = TierKind(
    name="disk",
    setting="ssd_cache_dir",
    where="on the disk",
    metrics_prefix="ssd",
    check=_check_disk,
    address=_disk_address,
    opener=_disk_opener,
)
TIER_KINDS: dict[str, TierKind] = {
    kind.name: kind for kind in (DISK, extension("remote")) if kind is not None
}
"""All kinds by name, nearest first."""
