"""The table of families in docs/families.md says what the families are."""

import pathlib
import re

from moe_jax.conversion.families import FAMILIES
from tests.support.tiers import long

ROOT = pathlib.Path(__file__).resolve().parents[2]


def rows() -> dict[str, list[str]]:
    """The cells beside every family."""
    table = (ROOT / "docs" / "families.md").read_text().split("\n\n")[2].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: row[1:] for row in cells for name in re.findall(r"`(\w+)`", row[0])}


def test_every_family_is_in_the_table_and_nothing_else():
    assert rows().keys() == FAMILIES.keys()


def test_the_table_says_what_holds_experts_and_where_upcycled_models_go():
    for name, (_, layers, leaves_as, _) in rows().items():
        family = FAMILIES[name]
        assert ("MoE" in layers) == family.holds_experts, name
        assert tuple(re.findall(r"`(\w+)`", leaves_as)) == family.moe_formats, name


def test_what_is_said_to_be_verified_against_transformers_is():
    cases = {file.stem for file in (ROOT / "tests" / "families" / "cases").glob("*.py")}
    encoders = {"t5", "switch_transformers"}  # tests/families/test_encoder_decoder.py
    towers = {name for name, family in FAMILIES.items() if family.processing is not None}  # tests/vision
    for name, cells in rows().items():
        assert (cells[-1] == "Transformers") == (name in cases | encoders | towers), name


# Keys of configs that give a number of experts, or of those that a token goes to.
_OF_EXPERTS = (
    *("num_experts_per_tok", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts"),
    *("moe_topk", "moe_k", "top_k_experts"),
)


def not_read() -> set[str]:
    """The families that the page says are not read."""
    page = (ROOT / "docs" / "families.md").read_text().partition("## Not read")[2].partition("## ")[0]
    return set(re.findall(r"`(\w+)`", page.partition("are not:")[2]))


def test_what_is_not_read_is_not():
    from transformers import CONFIG_MAPPING

    names = not_read()
    assert len(names) > 20 and not names & FAMILIES.keys()
    assert [name for name in sorted(names) if name not in CONFIG_MAPPING] == []


@long
def test_all_mixtures_that_are_not_read_are_named():
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    found = set()
    for name in {**modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} | {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    }:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # some have no defaults
            continue
        of_text = config.get_text_config(decoder=True)
        if any(getattr(one, key, None) for one in (config, of_text) for key in _OF_EXPERTS):
            found.add(of_text.model_type)
    within = {"qwen3_vl_moe_text", "qwen3_omni_moe_text"}  # read as what they are inside of a whole model
    assert found - FAMILIES.keys() - within == not_read()
