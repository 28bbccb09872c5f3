"""`allocate` with zero points and row scales: layers have them where they are worth their bytes."""

import dataclasses
import itertools

import numpy as np
import pytest

from moe_jax.compression import compress, make_method
from moe_jax.compression.budget import Candidate
from moe_jax.compression.calibration.recording import Calibration
from moe_jax.compression.coding import storage
from moe_jax.compression.coding.coder import LeastError, expert_coders
from moe_jax.compression.coding.storage import disk_bytes, layer_bytes
from moe_jax.compression.methods import bits_by_matrix
from moe_jax.compression.methods.choices import CHOICES, FACTORED, Choice, InParts, rank_of
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig, BaseCodes
from moe_jax.experts.forms import Quantized
from moe_jax.model_io.model_dir import ModelDirectory
from tests.compression.methods.recorded_layers import recorded
from tests.support.moe_models import MemorySource, check_merged, run
from tests.support.tiers import EVERY, long

ALLOCATE = {"group_size": 8, "solver": "identity"}
FEW_BITS = ((None, 3), (3, 1), (None, 2))[: 3 if EVERY else 2]
SENSITIVITIES = {"gate": 0.3, "up": 1.0, "down": 0.5}


@pytest.fixture(scope="module")
def source(models):
    """Experts whose rows differ in size, and whose entries lie to one side of zero."""
    stored, random = ModelDirectory(models["moe"]), np.random.default_rng(0)
    leaves = {path: stored.read(path) for path in stored.specs()}
    for path, leaf in leaves.items():
        if "/mlp/experts/" in path:
            moved = (leaf + 0.2) * np.exp(random.standard_normal((leaf.shape[1], 1)))
            leaves[path] = moved.astype(leaf.dtype)
    return MemorySource(stored.config, leaves)


@pytest.fixture(scope="module")
def calibration(source, tmp_path_factory):
    text = tmp_path_factory.mktemp("recorded") / "text.txt"
    text.write_text("of what the rows are")
    layers = {i: recorded(source, seed=i, tokens=100)._replace(sensitivities=SENSITIVITIES) for i in (0, 2)}
    return Calibration((text,), layers)


@pytest.fixture(autouse=True)
def few_choices(monkeypatch):
    monkeypatch.setattr(bits_by_matrix, "CHOICES", FEW_BITS)


def bank_of(choices: dict[str, tuple[int | None, int]], more: dict, of_all: dict) -> BankConfig:
    """A bank with a choice for every matrix; what is in `more`, centres do not have."""
    bits = {f"{name}_bits": own for name, (_, own) in choices.items()}
    table = {"table": True} if of_all.get("table") and not {2, 3}.isdisjoint(bits.values()) else {}
    options = {name: value for name, value in of_all.items() if name != "table"}
    form = Quantized(bits=2, **bits, **options, **more, **table)
    if not any(centre for centre, _ in choices.values()):
        return BankConfig(form, base="none")
    without = {f"{name}_bits": 0 for name, (centre, _) in choices.items() if centre is None}
    return BankConfig(form, base_codes=BaseCodes(code="3", **of_all, **without))


def measured_errors(layer: SourceLayer, name: str, centre: int | None, bits: int, more: dict, of_all: dict) -> float:
    """What a choice adds to the divergence: a whole matrix is coded."""

    def options(bits: int) -> dict:
        return {**of_all, "table": of_all.get("table", False) and bits > 1}

    kernels, sums = [np.asarray(kernel, np.float32) for kernel in layer.kernels(name)], np.zeros(2)
    mean = 0 if centre is None else LeastError().quantize(np.mean(kernels, 0), bits=centre, **options(centre))[1]
    for kernel, coder in zip(kernels, expert_coders(layer, name), strict=True):
        change = mean + coder.quantize(kernel - mean, bits=bits, **options(bits), **more).approximation - kernel
        sums += np.trace(change.T @ coder.moment @ change), np.trace(kernel.T @ coder.moment @ kernel)
    return SENSITIVITIES[name] * sums[0] / sums[1]


@long
@pytest.mark.parametrize(
    ("names", "of_all"),
    [
        (("zero_points", "row_scales"), {"scale_bits": 8}),
        (("row_scales",), {"table": True}),
    ],
    ids=["both, and 8-bit scales", "row scales and fitted levels"],
)
def test_a_layer_gets_the_best_of_all_that_fits(names, of_all, source, calibration):
    """Against all combinations, with bytes and errors counted here."""
    layer, d_model = SourceLayer(source, 0, calibration=calibration.layers[0]), source.config.d_model
    options = {"levels": "fitted"} if "table" in of_all else of_all
    method = make_method("allocate", {**ALLOCATE, **options, **dict.fromkeys(names, True), "target_bytes": 10**6})
    analysis, of_all = method.analyse(layer), {"group_size": 8, **of_all}
    all_ways = []
    for given in itertools.product((False, True), repeat=len(names)):
        more = {name: True for name, is_given in zip(names, given, strict=True) if is_given}
        errors = {
            (name, choice): measured_errors(layer, name, *choice, more, of_all)
            for name in layer.shapes
            for choice in FEW_BITS
        }
        for choices in itertools.product(FEW_BITS, repeat=len(layer.shapes)):
            by_name = dict(zip(layer.shapes, choices, strict=True))
            nbytes = disk_bytes(layer.target(bank_of(by_name, more, of_all)), d_model, layer.dtype("up"))
            all_ways.append((nbytes, sum(errors[pair] for pair in by_name.items()), tuple(more)))
    sizes, formats = sorted(nbytes for nbytes, *_ in all_ways), set()
    for budget in np.linspace(sizes[0], sizes[-1], 20).astype(int).tolist():
        target = dataclasses.replace(method, target_bytes=budget).plan([layer], {0: analysis})[0]
        _, least, more = min((way for way in all_ways if way[0] <= budget), key=lambda way: way[1])
        nbytes = disk_bytes(target, d_model, layer.dtype("up"))
        assert nbytes <= budget
        planned = [way for way in all_ways if way[0] == nbytes]
        assert min(error for _, error, _ in planned) == pytest.approx(least, rel=1e-4)
        assert tuple(name for name in names if getattr(target.bank.form, name)) == more
        formats.add(more)
    assert () in formats and names in formats  # small budgets have nothing of it, and large ones have all
    with pytest.raises(InputError, match="experts of 1 layers"):
        dataclasses.replace(method, target_bytes=sizes[0] - 1).check([layer])


def test_zero_points_are_asked_for_and_not_taken_where_layers_are_better_without(source, calibration, monkeypatch):
    """The search among more formats is a heuristic as well, which may end higher."""
    layer = SourceLayer(source, 0, calibration=calibration.layers[0])
    method = make_method("allocate", {**ALLOCATE, "target_bytes": 10**6, "zero_points": True})
    added = ((), ("zero_points",))
    analysis = {"errors": np.zeros((len(layer.shapes), layer.num_experts, 1))}
    for best in added:

        def by_matrix(self, layer, errors, formats, best=best):
            found = formats[-1]
            return [[Candidate(1, float(found != best), Choice(None, 3, found))] for _ in layer.shapes]

        monkeypatch.setattr(bits_by_matrix.Allocate, "_by_matrix", by_matrix)
        assert method.plan([layer], {0: analysis})[0].bank.form.zero_points == bool(best)


def test_what_a_bank_was_chosen_for_is_read_from_it(source, calibration):
    layer = SourceLayer(source, 0, calibration=calibration.layers[0])
    method = make_method("allocate", {**ALLOCATE, "target_bytes": 10**6, "zero_points": True, "row_scales": True})
    names = list(layer.shapes)

    def read(choice, expert=0):
        bank = method._bank(layer, choice)
        return tuple(bits_by_matrix._choice(layer, bank, layer.matrices[name], expert) for name in names)

    for bits in CHOICES:
        for added in method._formats:
            assert read((Choice(*bits, added),) * 3) == (Choice(*bits, added),) * 3
    several = (Choice(None, 3), Choice(4, 2), Choice(8, 4))
    assert read(several) == several and read(several[::-1]) == several[::-1]
    for centre, keep in FACTORED:  # of shares with the same rank the first
        for found in read((Choice(centre, None, keep=keep),) * 3):
            assert (found.centre, found.bits) == (centre, None)
            assert rank_of(layer, found.keep) == rank_of(layer, keep)
    parts = ((Choice(4, 2),) * 3, (Choice(4, 3, ("zero_points",)),) * 3)
    in_parts = InParts(parts, (1, *[0] * (layer.num_experts - 1)))
    assert read(in_parts, expert=0) == parts[1] and read(in_parts, expert=1) == parts[0]


def compressed(source, calibration, out, **options):
    method = make_method("allocate", {**ALLOCATE, **options})
    return compress(source, out, method, calibration=calibration, described={})


def predicted(report) -> float:
    return sum(layer.predicted_divergence for layer in report.layers)


@long
def test_what_is_written_is_within_the_budget_and_no_worse_than_without(source, calibration, tmp_path):
    """Of two layers one gets row scales, on which more depends; what is merged gives the same as what is in codes."""
    layers = dict(calibration.layers)
    layers[0] = layers[0]._replace(sensitivities={name: 1e-3 * value for name, value in SENSITIVITIES.items()})
    reports, target = {}, 8_600
    for given in (False, True):
        out = tmp_path / str(given)
        own = calibration._replace(layers=layers)
        reports[given] = report = compressed(source, own, out, target_bytes=target, row_scales=given)
        stored = ModelDirectory(out)
        on_disk = sum(stored.stored_bytes(path) for path in stored.specs() if "/mlp/experts/" in path)
        assert on_disk == report.expert_bytes_after <= target
    assert predicted(reports[True]) < predicted(reports[False])
    first, second = reports[True].layers
    assert "row scales" in second.choice and "row scales" not in first.choice
    leaves = {path: source.read(path) for path in source.specs()}
    check_merged(ModelDirectory(tmp_path / "True"), source.config, leaves)


@long
def test_parts_of_a_layer_have_formats_of_their_own(source, calibration, tmp_path, monkeypatch):
    """Experts of which there is much to lose get row scales, and no others."""
    for module in (storage, bits_by_matrix):  # in so small a model, leaves are dearer to the disk than bits
        monkeypatch.setattr(module, "LEAF_OVERHEAD", 0)
    leaves, target = {path: source.read(path) for path in source.specs()}, 4_450
    for path, leaf in leaves.items():
        if "/mlp/experts/" in path:
            leaves[path] = np.concatenate([leaf[:1], leaf[1:] / 16])
    source, reports = MemorySource(source.config, leaves), {}
    for given in ({"experts": "own"}, {"row_scales": True}, {"experts": "own", "row_scales": True}):
        out = tmp_path / "-".join(given)
        reports[tuple(given)] = compressed(source, calibration, out, target_bytes=target, **given)
    best = predicted(reports["experts", "row_scales"])
    assert best < predicted(reports["experts",]) and best < predicted(reports["row_scales",])
    small = ModelDirectory(tmp_path / "experts-row_scales")
    banks = [small.config.moe(i).bank for i in small.config.moe_layers]
    assert any({part.row_scales for part in bank.form.parts} == {True, False} for bank in banks)
    sizes = [layer_bytes(small.config.moe(i), small.config.d_model, np.dtype("float32")).total for i in (0, 2)]
    assert sum(sizes) <= target
    check_merged(small, source.config, leaves)


def test_levels_that_do_not_go_with_zero_points_are_one_line(models, tmp_path, text, capsys):
    options = ("--method", "allocate", "--budget-bits", "3", "--levels", "fitted", "--zero-points", "--row-scales")
    assert run(models["moe"], tmp_path / "out", *options, "--calibrate", text) == 2
    error = capsys.readouterr().err.strip()
    assert "levels=fitted do not go with zero points" in error and "\n" not in error
    assert not (tmp_path / "out").exists()
