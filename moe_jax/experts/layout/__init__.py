"""What experts have to know of their surroundings: shapes, the mesh, the costs of a platform."""
