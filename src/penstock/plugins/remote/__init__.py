"""Remote tier: KV blocks in an object store shared by several servers."""

from penstock.plugins.remote.object_urls import check_url, open_objects, shown
from penstock.plugins.remote.objects import Objects
from penstock.plugins.remote.remote_store import RemoteStore

__all__ = ["Objects", "RemoteStore", "check_url", "open_objects", "shown"]
