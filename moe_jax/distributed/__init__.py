"""Several devices and several processes: meshes, sharding rules, and what processes tell each other."""
