"""Statistics of an answer: token counts, and latencies as measured by the client."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plurals import counted


@dataclass(slots=True)
class AnswerFigures:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_seconds: float = 0.0
    """Seconds from the request to the first piece of text."""
    seconds: float = 0.0
    """Seconds from the first piece of text to the last."""

    @property
    def prompt_tokens_per_second(self) -> float:
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.first_seconds if self.first_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return max(0, self.completion_tokens - 1) / self.seconds if self.seconds else 0.0

    def line(self) -> str:
        """Format the statistics as one line.

        >>> AnswerFigures(400, 384, 21, 0.1, 0.5).line()
        'prompt 400 tokens, 384 cached (96%); answer 21 tokens, 40 tokens/s, first after 0.10 s'
        """
        cached = self.cached_tokens / max(1, self.prompt_tokens)
        speed = f" {self.tokens_per_second:,.0f} tokens/s," if self.tokens_per_second else ""
        return (
            f"prompt {counted(self.prompt_tokens, 'token')}, {self.cached_tokens:,} "
            f"cached ({cached:.0%}); "
            f"answer {counted(self.completion_tokens, 'token')},{speed} first after "
            f"{self.first_seconds:.2f} s"
        )
