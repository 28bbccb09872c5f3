"""Families that are Mixtures-of-Experts from the first: DeepSeek's, and those that route as they do."""
