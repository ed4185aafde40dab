"""Names of a model's adapters, with their numbers and the cache salts that separate them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import SettingError

ESCAPE = "\1"
"""Prefix of a client's salt that could otherwise be mistaken for an adapter's salt."""


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """The adapters of one model by name, numbered from 1.

    >>> names = AdapterNames({"pirate": "5f3a"})
    >>> names.number("pirate"), names.number(None), names.salted("team", None)
    (1, 0, 'team')
    """

    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Hash of each adapter's matrices and settings, by name."""

    def __len__(self) -> int:
        return len(self.fingerprints)

    def number(self, name: str | None) -> int:
        """Return an adapter's number, or 0 for None; raises SettingError for unknown names."""
        if name is None:
            return 0
        if name not in self.fingerprints:
            known = ", ".join(self.fingerprints) or "none"
            raise SettingError(f"there is no adapter {name[:80]!r}; this model has {known}")
        return 1 + list(self.fingerprints).index(name)

    def salted(self, salt: str, name: str | None) -> str:
        """Return the cache salt for a client's salt and an adapter; pairs never collide."""
        if self.number(name):
            return f"{self.fingerprints[str(name)]}\0{salt}"
        taken = tuple(f"{fingerprint}\0" for fingerprint in self.fingerprints.values())
        return f"{ESCAPE}{salt}" if salt.startswith((ESCAPE, *taken)) else salt


NO_ADAPTERS = AdapterNames()
