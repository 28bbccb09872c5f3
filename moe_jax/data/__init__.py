"""Text to batches: sections of a recipe, sources, tokens, packing."""
