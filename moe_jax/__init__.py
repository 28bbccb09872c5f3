"""Mixture-of-Experts from dense models: upcycle, tune, compress. One shared base plus something small per expert."""

__version__ = "0.1.0"
