"""Defaults of the settings; every number says its unit."""

MAX_KV_SIZE = 131_072
"""Tokens whose keys and values a sequence may hold."""
KEEP = 4_096
"""First tokens of a sequence that are never dropped."""
MAX_TOKENS = 512
"""Tokens generated at most for one answer."""
TEMPERATURE = 0.0
"""Sampling temperature, without unit; 0 takes the likeliest token."""
MAX_BATCH_SIZE = 8
"""Sequences that the engine runs at the same time."""
BLOCK_SIZE = 32
"""Tokens of a block, which is shared, named and split as one."""
PREFILL_CHUNK = 512
"""Tokens of prompts that the engine reads in one step."""
LEAST_ATTEND_TOKENS = 128
"""Fewest tokens that a decode step can be told to read: the first, the recent ones, and some."""
ATTEND_BLOCK_TOKENS = 16
"""Tokens that such a step chooses together."""
MAX_STALL_MS = 200
"""Milliseconds of prompts between two decode steps: five tokens a second at least."""
MIN_QUANTIZE_TOKENS = 256
"""Tokens below which a prompt is not held in a codec; a longer one is, as a whole."""
RAW_FIRST_TOKENS = 0
"""First tokens of a prompt that a codec leaves as they are."""
MAX_QUEUE = 256
"""Answers that may wait for their place in the batch."""
HOST = "127.0.0.1"
"""Address that the server listens on: this machine's own, out of reach for other machines."""
PORT = 8080
"""TCP port of the server; 0 takes a free one."""
EMBEDDED_LIMIT = "200MB"
"""Memory limit for the embedded model: eight plain caches of 20,000 tokens would take 330 MB."""
MLX_LM_MINOR = (0, 32)
"""The minor version of mlx-lm that the contract tests pass on."""
DRAFT_TOKENS = 4
"""Tokens that a draft model proposes where nothing else is said."""
