"""Parsers of models' answers: reasoning, text, and calls of tools, as they grow."""
