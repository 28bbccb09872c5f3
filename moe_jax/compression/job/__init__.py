"""Compresses a model on disk, layer by layer: streamed, resumed, reported, swept."""
