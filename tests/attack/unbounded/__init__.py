"""The library with single bounds taken out, which the classes of inputs must notice."""
