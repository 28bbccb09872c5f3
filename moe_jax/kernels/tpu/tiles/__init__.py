"""How a tile of an expert's kernel is made in fast memory, by the form that it is stored in."""
