"""What the papers' claims are tested with: models that are trained, tuned and compressed, one job at a time."""
