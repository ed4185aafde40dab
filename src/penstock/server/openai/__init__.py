"""OpenAI's interface: chat, completions and responses."""
