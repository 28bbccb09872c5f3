"""Named arrays on disks and in buckets, by Orbax."""
