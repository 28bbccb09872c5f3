"""Families of models in which some layers have a recurrence in the place of attention."""
