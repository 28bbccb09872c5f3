"""The trial itself finds every fault that a reader can have."""

import pytest

from tests.attack import planted
from tests.attack.attacks import all_attacks
from tests.attack.planted.faults import VERDICTS
from tests.attack.trial import FAULTS, FINE, try_inputs


@pytest.mark.parametrize("fault", VERDICTS)
def test_finds(fault):
    verdict = VERDICTS[fault]
    # Memory is taken in processor time, of which a busy machine needs more.
    outcomes = list(try_inputs(fault, range(2), planted.__name__, max_seconds=0.5 if verdict == "hang" else 5.0))
    assert [(outcome.number, outcome.verdict) for outcome in outcomes] == [(0, verdict), (1, verdict)]


def test_every_fault_is_planted():
    assert set(VERDICTS.values()) == {*FAULTS, *FINE} and all_attacks(planted.__name__).keys() == VERDICTS.keys()
