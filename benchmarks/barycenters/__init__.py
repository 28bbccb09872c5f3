"""The parts of `barycenter.py`: point clouds, other people's solvers, and the report."""
