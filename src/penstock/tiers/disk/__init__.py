"""The disk tier: blocks on an SSD, which survive eviction from memory and restarts."""

from penstock.tiers.disk.disk_store import SSDStore
from penstock.tiers.record import Damaged, HostArray, Record

__all__ = ["Damaged", "HostArray", "Record", "SSDStore"]
