"""Several devices and several processes: meshes, sharding rules, and communication between processes."""
