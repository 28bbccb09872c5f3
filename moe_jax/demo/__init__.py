"""The whole job on a small model: real text that every Python has, and the commands that a user would type."""

from moe_jax.demo.walkthrough import run_demo as run_demo
