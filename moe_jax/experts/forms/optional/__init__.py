"""Abilities that a form may have beside its four methods: a class for each to inherit, and how to ask for it."""
