"""Ways to hold keys and values in fewer bits, and to read them as they lie."""

from penstock.kv.codecs.base import Codec, Coded, Scales
from penstock.kv.codecs.names import Scheme, parse_scheme

__all__ = ["Codec", "Coded", "Scales", "Scheme", "parse_scheme"]
