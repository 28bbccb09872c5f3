"""What `import moe_jax` offers, one file for each kind of verb. Commands do the same by the same functions."""
