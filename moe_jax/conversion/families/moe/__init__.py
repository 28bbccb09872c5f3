"""Families of decoders with MoE layers."""
