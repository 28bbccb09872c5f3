"""How a tile of an expert's kernel is made in fast memory, one file for each stored form."""
