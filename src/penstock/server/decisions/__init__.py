"""Decisions: probabilities of fixed answers to questions about one state."""
