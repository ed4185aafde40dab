"""Encoders of the BERT family: sentence embedders and rerankers, and their batching engine."""
