"""Ways to hold keys and values in fewer bits, and to read them as they lie."""

from penstock.kv.codecs.coded import Codec, Coded, Cut, Scales
from penstock.kv.codecs.names import Scheme, parse_scheme
from penstock.kv.codecs.scales import Squares

__all__ = ["Codec", "Coded", "Cut", "Scales", "Scheme", "Squares", "parse_scheme"]
