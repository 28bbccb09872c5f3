"""Hugging Face directories: config.json and the formats that models are exported in."""
