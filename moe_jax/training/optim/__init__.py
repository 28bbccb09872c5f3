"""Optimizers by Optax, with rates of their own for groups of parameters."""
