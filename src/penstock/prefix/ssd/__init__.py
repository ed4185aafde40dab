"""The cold tier: blocks on an SSD, for when they have left memory or the process has ended."""

from penstock.prefix.ssd.record import Damaged, HostArray, Record
from penstock.prefix.ssd.store import SSDStore

__all__ = ["Damaged", "HostArray", "Record", "SSDStore"]
