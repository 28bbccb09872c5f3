"""The table of families in docs/families.md says what the families are."""

import pathlib
import re

from moe_jax.conversion.families import FAMILIES

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
