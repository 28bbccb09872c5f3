"""A few kills, full disks and pairs of commands; `benchmarks/attack_kills.py` tries many, over all commands."""

import random

import pytest

from tests.attack.interrupted import Workshop
from tests.support.tiers import long


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, data_dir):
    with Workshop(tmp_path_factory.mktemp("interrupted") / "work", data_dir) as workshop:
        yield workshop


@pytest.mark.parametrize("name", ["convert", "export"])
def test_a_killed_command_that_is_given_again_writes_the_same_bits(workshop, name):
    trials = [workshop.kill(name, random.Random(seed), kills=2) for seed in range(2)]
    assert [trial.fault for trial in trials] == [None, None] and any(trial.kills for trial in trials)


@pytest.mark.parametrize("name", ["merge", "export"])
def test_on_a_full_disk_nothing_looks_whole_and_the_same_command_goes_on(workshop, name):
    try:
        trial = workshop.fill_disk(name, 0.6)
    except PermissionError as error:
        pytest.skip(str(error))
    assert trial.fault is None and trial.went_on


@long
def test_of_two_commands_with_one_target_one_says_that_the_other_is_at_it(workshop):
    assert workshop.twice("convert").fault is None


@long
def test_two_commands_share_a_cache_of_compiled_programs(workshop):
    assert workshop.share_cache("adapt").fault is None
