"""Which models are compared, and how often."""

from evidence.equal_bytes.models import Subject
from evidence.equal_bytes.study import Comparison
from evidence.studies.plan import DRAWN, FOUR, VANILLA
from evidence.studies.probes import Probes
from evidence.studies.scales import MIDDLE, SMOLLM, STORIES

_PROBES = Probes(questions=100, prompts=8)


def comparisons() -> list[Comparison]:
    """The models that `claims.py` keeps: of one origin, the same with neurons in another order, and of none."""
    return [
        Comparison(Subject(STORIES.name, f"{VANILLA}-s0")),
        Comparison(Subject(STORIES.name, f"{VANILLA}-s0", permuted=True)),
        Comparison(Subject(MIDDLE.name, f"{VANILLA}-s0"), probes=Probes(questions=0, prompts=8)),
        Comparison(Subject(MIDDLE.name, f"{DRAWN}-s0"), probes=Probes(questions=0, prompts=8)),
        Comparison(Subject(SMOLLM.name, FOUR), probes=_PROBES),
        Comparison(Subject(SMOLLM.name, FOUR, permuted=True), draws=(0,)),
    ]
