"""Routes of encoders: embeddings, reranking and scores."""
