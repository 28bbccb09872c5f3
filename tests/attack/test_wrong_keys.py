"""Every key of the config of every family, said wrongly: it is refused in a line, or read as it stands there."""

import json

import pytest

from moe_jax.conversion import read_hf_config
from moe_jax.conversion.model_table import table_of
from moe_jax.core.errors import MAX_LINE, InputError
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import ModelConfig
from moe_jax.planning.model_costs import make_plan
from tests.attack.classes.hf_configs import wrong_about
from tests.attack.wrong_keys import changed, changes_of, said_of
from tests.families import cases
from tests.support.hf_checkpoints import CONFIGS
from tests.support.tiers import long

LEAST = 288  # wrong configs of each family


def faults_of(original: dict, *, every: int = 1) -> tuple[list[str], list]:
    """What is wrong about one in so many wrong configs, and the configs that were read, each once."""
    faults, read = [], {}
    for change in list(changes_of(original))[::every]:
        keys, said = changed(original, change), said_of(change)
        try:
            config = read_hf_config(keys)
        except InputError as error:
            message = str(error)
            if "config.json" not in message or len(message) > MAX_LINE or not message.isprintable():
                faults.append(f"{said}: {message[:200]}")
            continue
        except Exception as error:
            faults.append(f"{said}: {error!r}"[:300])
            continue
        if config not in read:
            faults += [f"{said}: {wrong}" for wrong in _wrong_about(original, keys, config)]
        read[config] = said
    return faults, list(read)


def _wrong_about(original: dict, keys: dict, config: ModelConfig) -> list[str]:
    try:
        table_of(config)
    except InputError:
        pass
    except Exception as error:
        return [f"its tensors: {error!r}"[:300]]
    wrong = wrong_about(original, keys, config)
    return [wrong] if wrong else []


def test_one_in_some_of_every_family():
    """Each family has another part of the list of what can be wrong."""
    faults = {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        faults[name] = faults_of(config, every=37 + number % 8)[0]
    assert not any(faults.values()), {name: some for name, some in faults.items() if some}


def test_every_family_has_enough():
    assert all(len(list(changes_of(config))) >= LEAST for config in CONFIGS.values())


@long
@pytest.mark.parametrize("name", CONFIGS)
def test_all_of_a_family(name):
    faults, read = faults_of(CONFIGS[name])
    assert not faults, faults[:10]
    # What was read can be built and counted, or is refused in a line: no size is allocated.
    for config in read[:: max(1, len(read) // 25)]:
        try:
            assert leaf_specs(config) and make_plan(config).param_bytes > 0
        except InputError as error:
            assert str(error).isprintable()


@long
@pytest.mark.parametrize("name", cases.CASES)
def test_all_that_transformers_writes(name):
    transformers = pytest.importorskip("transformers")
    file = cases.CASES[name]
    config = getattr(transformers, file.CONFIG)(**cases.SMALL | file.CASES[name])
    faults, read = faults_of(json.loads(json.dumps(config.to_dict())))
    assert not faults and read, faults[:10]
