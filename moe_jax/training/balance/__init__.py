"""Balance among experts: options of a recipe, and biases of selection, which move without a gradient."""
