"""What the quality benchmarks share: the file of results, the text, scoring, and the spread over seeds."""
