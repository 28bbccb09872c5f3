"""Some hundred inputs of every class: each is refused in a line or read as it was meant, soon and in little memory."""

import collections

import pytest

from tests.attack.attacks import all_attacks
from tests.attack.trial import FAULTS, try_inputs
from tests.support.tiers import EVERY, long, one_in

# Each input of these goes through a whole command.
SLOW = ("odd weights, compressed", "odd weights, run", "odd weights, written")


@one_in(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[long] * (name in SLOW)) for name in all_attacks()])
def test_no_input_does_harm(name):
    quick = all_attacks()[name].quick
    outcomes = list(try_inputs(name, range(quick if EVERY else max(8, quick // 2))))
    faults = collections.defaultdict(list)
    for outcome in outcomes:
        if outcome.verdict in FAULTS:
            faults[outcome.verdict].append(f"{outcome.number}: {outcome.detail}")
    assert not faults, "\n".join(f"{verdict}, input {line}" for verdict, lines in faults.items() for line in lines[:10])
    # Mutations that are all refused, or none, would show nothing.
    assert {"refused"} <= {outcome.verdict for outcome in outcomes}
