"""The parts of `ders_quality.py`: settings, training, compression, the file of results, and the report."""
