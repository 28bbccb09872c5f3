"""Pages: what is known of models, runs and evaluations, as one HTML file that needs nothing else."""
