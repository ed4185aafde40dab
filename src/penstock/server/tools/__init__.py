"""Tool calls: the calls that a request allows, and grammars that enforce them."""
