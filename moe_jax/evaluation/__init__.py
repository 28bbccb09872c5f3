"""Losses and labels: how well a model predicts texts, pairs and labels."""
