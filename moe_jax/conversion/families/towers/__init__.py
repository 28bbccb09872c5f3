"""Families of image encoders, which models that see have as their eye."""
