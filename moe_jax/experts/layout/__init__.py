"""The surroundings of experts: shapes, the mesh, the costs of a platform."""
