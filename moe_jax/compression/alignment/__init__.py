"""Experts brought into one order of neurons: transport, matching, barycenter."""
