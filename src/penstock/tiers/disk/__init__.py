"""The cold tier: blocks on an SSD, for when they have left memory or the process has ended."""

from penstock.tiers.disk.disk_store import SSDStore
from penstock.tiers.record import Damaged, HostArray, Record

__all__ = ["Damaged", "HostArray", "Record", "SSDStore"]
