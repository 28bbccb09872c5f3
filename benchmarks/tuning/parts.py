"""The two parts of the benchmark."""

from collections.abc import Sequence

from tuning.bases import base_config, load_base
from tuning.kinds import FULL as REST_FULL
from tuning.kinds import KINDS, kind_config
from tuning.running import Part, Run
from tuning.settings import ADAPTER_RATES, FULL_RATES
from tuning.task import Task
from tuning.variants import FULL, rates_of, tuned_config, variants

UPCYCLED, TUNED = "upcycled", "tuned"
SHAKESPEARE = "shakespeare"


def upcycled_part(task: Task) -> Part:
    """stories260K, as it is and as an MoE of every kind, tuned to TinyShakespeare."""
    runs = [
        Run(
            name,
            kind_config(task.dense.config, kind, task.settings),
            FULL_RATES if kind.rest == REST_FULL else ADAPTER_RATES,
            kind.rates_of or name,
        )
        for name, kind in KINDS.items()
    ]
    return Part(UPCYCLED, task, runs, (SHAKESPEARE,), steps=task.settings.upcycled_steps, base=lambda _: task.dense)


def tuned_part(task: Task, domains: Sequence[str]) -> Part:
    """A trained MoE, tuned to other domains with every variant."""
    config = base_config(task)
    runs = [
        Run(
            variant.name,
            tuned_config(config, variant),
            FULL_RATES if variant.family == FULL else ADAPTER_RATES,
            rates_of(variant, task.settings).name,
        )
        for variant in variants(task.settings)
    ]
    return Part(TUNED, task, runs, domains, steps=task.settings.tuned_steps, base=lambda seed: load_base(task, seed))
