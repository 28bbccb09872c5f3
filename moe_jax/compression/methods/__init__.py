"""The methods of compression, and the table of them."""
