"""The forms themselves, one file for one or for those that share their arrays."""
