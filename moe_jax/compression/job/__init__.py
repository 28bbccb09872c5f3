"""A model compressed on disk, layer by layer: streamed, resumed, reported, swept."""
