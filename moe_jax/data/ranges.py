"""Checks that numbers of a recipe lie in their ranges."""

from moe_jax.core.errors import MAX_FLOAT32, MAX_SIZE, InputError, shown


def at_least(section: object, least: int, *names: str) -> None:
    """Raises `InputError` for the first of these fields that is below `least`, or not finite; None is not checked."""
    for name in names:
        value = getattr(section, name)
        if value is None:
            continue
        most = MAX_SIZE if isinstance(value, int) else MAX_FLOAT32
        if not value >= least:
            raise InputError(f"{name} = {shown(value)} must be at least {least}")
        if value > most:
            raise InputError(f"{name} = {shown(value)} must be at most {most:,}")
