"""Incremental parsers of models' answers: reasoning, text and tool calls."""
