"""A demo of all steps on a small model, with text from Python's standard library and the commands of a user."""

from moe_jax.demo.walkthrough import run_demo as run_demo
