"""A model as a directory: model and adapter directories, their lineage, and how they are loaded and written."""
