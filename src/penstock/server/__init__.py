"""The HTTP server: OpenAI- and Anthropic-compatible APIs for one engine."""
