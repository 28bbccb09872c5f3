"""Whole models at equal bytes: this library beside llm-compressor and llama.cpp, read by one evaluator."""
