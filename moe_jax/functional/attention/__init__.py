"""Attention and position embeddings."""
