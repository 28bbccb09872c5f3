"""What a traced program consists of."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations(program: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a traced program, those of inner programs (loops, branches, custom rules) included."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from equations(value)


def _is_program(value: object) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)
