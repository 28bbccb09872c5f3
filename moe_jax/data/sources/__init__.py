"""Files of training data, read at any place: text, JSON lines, tables, tokens."""
