"""Defaults of the settings; every number says its unit."""

MAX_KV_SIZE = 131_072
"""Tokens whose keys and values a sequence may hold."""
KEEP = 4_096
"""First tokens of a sequence that are never dropped."""
MAX_TOKENS = 512
TEMPERATURE = 0.0
MAX_BATCH_SIZE = 8
BLOCK_SIZE = 32
PREFILL_CHUNK = 512
"""Tokens of prompts that the engine reads in one step."""
LEAST_ATTEND_TOKENS = 128
"""Lower bound of `--attend-tokens`: the first, the recent and some chosen tokens."""
ATTEND_BLOCK_TOKENS = 16
MAX_STALL_MS = 200
"""Milliseconds of prompts between two decode steps: five tokens a second at least."""
MIN_QUANTIZE_TOKENS = 256
RAW_FIRST_TOKENS = 0
"""First tokens of a prompt that a codec leaves as they are."""
MAX_QUEUE = 256
HOST = "127.0.0.1"
PORT = 8080
EMBEDDED_LIMIT = "200MB"
"""Memory limit for the embedded model: eight plain caches of 20,000 tokens would take 330 MB."""
MLX_LM_MINOR = (0, 32)
"""The minor version of mlx-lm that the contract tests pass on."""
DRAFT_TOKENS = 4
KERNELS_VARIABLE = "PENSTOCK_KERNELS"
"""Variable of the environment: "off" turns compiled attention off, unless a setting names it."""
