"""The parts of `peft_quality.py`: settings, texts, models, training, what is run, and the report.

Not named `peft`: a folder of that name would hide the library that other benchmarks and tests compare with.
"""
