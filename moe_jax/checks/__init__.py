"""Comparison of a new model with the one that it was made from: equal logits at step 0, predictions of a text."""
