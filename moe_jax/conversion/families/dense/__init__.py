"""Families of dense decoders."""
