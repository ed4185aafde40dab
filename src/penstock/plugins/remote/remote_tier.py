"""Definition of the remote tier: how its settings are checked, and how its store is opened."""

from __future__ import annotations

from penstock.config import EngineSettings
from penstock.engine.offload.tier_kind import StoreOpener, TierContent, TierKind
from penstock.plugins.remote.object_urls import check_url, open_objects, shown
from penstock.plugins.remote.remote_store import PIECE_BYTES, RemoteStore, buffer_bytes
from penstock.tiers.record import HEAD_BYTES


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


REMOTE = TierKind(
    name="remote",
    setting="remote_cache",
    where="in the remote cache",
    metrics_prefix="remote",
    check=_check_remote,
    address=_remote_address,
    opener=_remote_opener,
    is_shared=True,
)
