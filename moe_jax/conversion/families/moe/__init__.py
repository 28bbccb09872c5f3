"""Decoders with MoE layers."""
