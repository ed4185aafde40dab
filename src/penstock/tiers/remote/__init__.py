"""The remote tier: blocks in a store that many servers share."""

from penstock.tiers.remote.object_urls import check_url, open_objects, shown
from penstock.tiers.remote.objects import Objects
from penstock.tiers.remote.remote_store import RemoteStore

__all__ = ["Objects", "RemoteStore", "check_url", "open_objects", "shown"]
