"""Measured claims, one file each. The rival runs in the same process, turn by turn with ours."""

__version__ = "0.2.0"
