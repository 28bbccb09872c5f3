"""`moe-jax plan --compress METHOD --of PART`: the bytes of every part, which are those that `compress` then writes."""

import dataclasses
import json

import pytest

import moe_jax
from moe_jax.compression.coding.storage import LEAF_OVERHEAD
from tests.support.calibrated_codes import by_text
from tests.support.dense_models import random_leaves, write_model
from tests.support.tiers import long, one_in

CODES = ("--group-size", "8")


@pytest.fixture(scope="module")
def tied(models, tmp_path_factory):
    """`dense`, whose embedding is also the head."""
    dense = moe_jax.load(models["dense"]).source
    config = dataclasses.replace(dense.config, tie_embeddings=True)
    return write_model(tmp_path_factory.mktemp("tied") / "model", config, random_leaves(config), dense.tokenizer_files)


@pytest.fixture
def planned(out_of):
    """Returns the sizes that are planned, by way: from the config alone, whose file is all that is given."""

    def plan(model, *options):
        said = json.loads(out_of("plan", model / "config.json", "--compress", *options, *CODES, "--json"))
        return {one["way"]: one for one in said["compression"]["sizes"]}

    return plan


def written(model) -> dict[str, int]:
    """The bytes of every part of a model by what its report says of it, and in all."""
    made = moe_jax.load(model)
    sizes = {path: spec.size * spec.dtype.itemsize for path, spec in made.source.specs().items()}
    experts = sum(nbytes for path, nbytes in sizes.items() if "/mlp/experts/" in path)
    parts = {part["part"]: part["bytes_after"] for part in made.lineage[-1]["measured"]["parts"]}
    parts |= {"experts": experts} if experts else {}
    return parts | {"the rest": sum(sizes.values()) - sum(parts.values()), "total": sum(sizes.values())}


@one_in(3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("moe", ("--of", "model", "--rest-bits", "3", "--embedding-bits", "8", "--zero-points")),
        ("dense", ("--of", "rest", "--levels", "fitted", "--scale-bits", "8")),
        ("tied", ("--of", "model", "--row-scales")),
    ],
)
def test_what_is_planned_is_written_to_the_byte(models, tied, planned, out_of, tmp_path, name, options):
    model = {**models, "tied": tied}[name]
    plan = planned(model, "quantize", "--bits", "4", *options)
    out_of("compress", model, tmp_path / "out", "--method", "quantize", "--bits", "4", *CODES, *options)
    assert plan["bits 4"]["parts"] | {"total": plan["bits 4"]["total"]} == written(tmp_path / "out")
    source = moe_jax.load(model).source
    weights = sum(spec.size for spec in source.specs().values())
    assert plan["bits 4"]["bits_per_weight"] == pytest.approx(8 * plan["bits 4"]["total"] / weights)
    assert plan["as it is"]["total"] == sum(spec.size * spec.dtype.itemsize for spec in source.specs().values())


def stored_bytes(model, of: str) -> int:
    """The bytes that a model, or its experts, take of the disk."""
    source = moe_jax.load(model).source
    return sum(source.stored_bytes(path) for path in source.specs() if of == "model" or "/experts/" in path)


@long
@pytest.mark.parametrize("of", ["model", "experts"])
def test_the_least_and_the_most_that_a_budget_can_ask_for(models, text, planned, out_of, failing, tmp_path, of):
    model, options = models["one"], ("--of", of)
    plan = planned(model, "allocate", *options)
    least, most = plan["least"]["budget"], plan["most"]["budget"]
    assert least < most <= plan["as it is"]["total"] + 400 * LEAF_OVERHEAD
    command = ("--method", "allocate", *options, *CODES, *by_text(text, 4), "--target-bytes")
    assert f"{least:,}" in failing(model, tmp_path / "none", *command, least - 1)
    for name, budget in (("least", least), ("more", 2 * most)):
        out_of("compress", model, tmp_path / name, *command, budget)
    assert stored_bytes(tmp_path / "least", of) <= least
    assert least < stored_bytes(tmp_path / "more", of) <= most


def test_a_table_by_part_and_what_does_not_go_with_it(models, out_of, failing):
    said = out_of("plan", models["dense"], "--compress", "quantize", "--of", "model", "--levels", "fitted", *CODES)
    assert all(word in said for word in ("attention", "dense", "embedding", "head", "bits 2")) and "bits 8" not in said
    assert "from" in out_of("plan", models["one"], "--compress", "allocate", "--of", "rest", *CODES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rest-bits", 4), "--rest-bits: only with --compress"),
        (("--compress", "quantize", "--embedding-bits", 4), "only with --of"),
        (("--compress", "svd", "--of", "model"), "--of does not go"),
        (("--compress", "quantize", "--of", "model", "--keep", 0.5), "--keep does not go"),
        (("--compress", "quantize", "--of", "model", "--rest-bits", 5), "rest_bits=5"),
        (("--compress", "quantize", "--of", "experts"), "the model is dense"),
    ],
)
def test_options_that_do_not_go_together(models, capsys, options, words):
    from moe_jax.commands.cli import main

    assert main(["plan", str(models["dense"]), *map(str, options)]) == 2
    assert words in capsys.readouterr().err
