"""The trial itself finds every fault that a reader can have."""

import pytest

from tests.attack import planted, unbounded
from tests.attack.attacks import all_attacks
from tests.attack.planted.faults import VERDICTS
from tests.attack.trial import FAULTS, FINE, try_inputs
from tests.attack.unbounded.faults import ATTACKS
from tests.support.tiers import long


@pytest.mark.parametrize("fault", VERDICTS)
def test_finds(fault):
    verdict = VERDICTS[fault]
    # Memory is taken in processor time, of which a busy machine needs more.
    outcomes = list(try_inputs(fault, range(2), planted.__name__, max_seconds=0.5 if verdict == "hang" else 5.0))
    assert [(outcome.number, outcome.verdict) for outcome in outcomes] == [(0, verdict), (1, verdict)]


def test_every_fault_is_planted():
    assert set(VERDICTS.values()) == {*FAULTS, *FINE} and all_attacks(planted.__name__).keys() == VERDICTS.keys()


NOT_LOOKED_AT = "members of a sequence are not looked at"


@pytest.mark.parametrize(
    "fault", [pytest.param(one.name, marks=[long] * (one.name != NOT_LOOKED_AT)) for one in ATTACKS]
)
def test_finds_what_has_no_bound(fault):
    verdicts = (outcome.verdict for outcome in try_inputs(fault, range(1000), unbounded.__name__))
    assert any(verdict in FAULTS for verdict in verdicts)
