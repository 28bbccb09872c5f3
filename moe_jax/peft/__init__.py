"""Tuning with few parameters: which of them are trained."""

from moe_jax.peft.partition import split_model as split_model
from moe_jax.peft.partition import trainable_paths as trainable_paths
