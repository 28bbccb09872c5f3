"""A budget divided among the layers of a model."""
