"""Bytes in and out, safely: ranges of files, staging, resuming, paths on disks and in buckets, strict JSON and TOML."""
