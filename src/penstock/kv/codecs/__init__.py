"""Ways to hold keys and values in fewer bits, and to read them as they lie."""

from penstock.kv.codecs.base import Codec, Coded
from penstock.kv.codecs.names import Scheme, parse_scheme

__all__ = ["Codec", "Coded", "Scheme", "parse_scheme"]
