"""Files of training data with random access: text, JSON lines, tables, tokens."""
