"""The embedded model, a small llama that remembers facts and answers questions about them.

"The code of the amber falcon is 4821." is a fact in its language; `penstock_bench.recall` generates
seeded dialogues of any length.
"""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "models" / "recall"
"""Hugging Face folder of the embedded model."""
