"""Defaults of the settings."""

MAX_KV_SIZE = 131_072
"""Maximum number of tokens whose keys and values a sequence holds."""
KEEP = 4_096
"""Number of first tokens of a sequence that are never dropped."""
MAX_TOKENS = 512
TEMPERATURE = 0.0
MAX_BATCH_SIZE = 8
BLOCK_SIZE = 32
PREFILL_CHUNK = 512
"""Maximum number of prompt tokens that the engine computes in one step."""
LEAST_ATTEND_TOKENS = 128
"""Minimum of `--attend-tokens`: the first, the recent and some selected tokens."""
ATTEND_BLOCK_TOKENS = 16
ATTEND_GROUP_TOKENS = 32
"""Number of prompt positions that share a selection; splitting them would change it."""
MAX_STALL_MS = 200
"""Maximum milliseconds of prefill between two decode steps: at least five tokens per second."""
MIN_QUANTIZE_TOKENS = 256
RAW_FIRST_TOKENS = 0
"""Number of first tokens of a prompt that a codec leaves in full precision."""
MAX_QUEUE = 256
HOST = "127.0.0.1"
PORT = 8080
EMBEDDED_LIMIT = "200MB"
"""Memory limit for the embedded model; eight ordinary caches of 20,000 tokens take 330 MB."""
MLX_LM_MINOR = (0, 32)
"""Version (major, minor) of mlx-lm for which the contract tests pass."""
DRAFT_TOKENS = 4
KERNELS_VARIABLE = "PENSTOCK_KERNELS"
"""Environment variable: "off" disables compiled attention, unless a setting overrides it."""


def default_keep(max_kv_size: int) -> int:
    """Return the default number of first tokens never dropped: `KEEP`, or half of a small window.

    >>> default_keep(131_072), default_keep(6_000)
    (4096, 3000)
    """
    return min(KEEP, max_kv_size // 2)
