"""Arranges the arrays of a model for a CPU to generate with; arranged models are never stored."""
