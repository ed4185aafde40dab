"""Ollama's API, on top of OpenAI's chat completions."""
