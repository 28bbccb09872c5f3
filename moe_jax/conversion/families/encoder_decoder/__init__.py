"""Families of models with an encoder and a decoder."""
