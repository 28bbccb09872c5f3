"""What a compiled program moves through the memory of a device, and the least that it could."""
