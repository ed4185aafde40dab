"""Benchmarks of measured claims, one file each. Rivals run interleaved in the same process."""

__version__ = "0.2.0"
