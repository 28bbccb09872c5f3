"""The parts of `resmoe_quality.py`: settings, training, the variants, compression, and the report."""
