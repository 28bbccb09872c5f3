"""From text to batches: data sections of a recipe, sources, tokens, packing."""
