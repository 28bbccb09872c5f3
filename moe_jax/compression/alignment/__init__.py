"""Brings the neurons of experts into one order: transport, matching, barycenter."""
