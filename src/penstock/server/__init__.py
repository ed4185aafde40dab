"""The HTTP server: OpenAI's and Anthropic's wire formats around one engine."""
