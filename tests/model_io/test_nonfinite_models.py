"""Weights that are not finite, or do not fit, in what every verb makes, reads and reports."""

import io
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console

import moe_jax
from moe_jax.api.model import Loading, Model
from moe_jax.commands import cli
from moe_jax.conversion.from_hugging_face import convert
from moe_jax.core.errors import InputError
from moe_jax.core.finite import DoesNotFit
from moe_jax.model_io.in_memory import LeavesInMemory, ModelInMemory
from moe_jax.model_io.leaves_to_write import zero_experts_line
from moe_jax.model_io.lineage import read_lineage
from moe_jax.model_io.loading import load_model
from moe_jax.training.recipe import ModelSection, Recipe
from moe_jax.training.saved_model import _written_leaves
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint
from tests.support.tiers import one_in

UP, EXPERTS_UP = "layers/1/mlp/up/kernel", "layers/1/mlp/experts/up/kernel"
NAMED = r"layers/1/mlp/up/kernel(\[\d\])?: 1 of 512 numbers not finite, the first nan at \[2, 3\]; .*--allow-nonfinite$"
LORA = {"method": "lora", "adapter": "lora:2", "targets": "q,up"}


def changed(model: Model, path: str, value: float, at: object = (2, 3), dtype: str = "float32") -> Model:
    """The model in memory with other numbers in a leaf."""
    leaves = {name: np.array(model.source.read(name)).astype(dtype) for name in model.source.specs()}
    leaves[path][at] = value
    return Model.of_source(ModelInMemory(model.config, LeavesInMemory(leaves)))


@pytest.fixture(scope="module")
def dense() -> Model:
    return moe_jax.tiny_model()


@pytest.fixture(scope="module")
def moe() -> Model:
    return moe_jax.tiny_model(experts=3)


@pytest.fixture(scope="module")
def spoilt(dense, tmp_path_factory):
    """The path of a model directory with one NaN."""
    return moe_jax.save(changed(dense, UP, np.nan), tmp_path_factory.mktemp("spoilt") / "m", allow_nonfinite=True)


VERBS = {
    "save": lambda model, out, **allowed: moe_jax.save(moe_jax.load(model), out, **allowed),
    "upcycle": lambda model, out, **allowed: moe_jax.upcycle(model, out, layers=[0], step0_check=False, **allowed),
    "export": moe_jax.export,
    "merge": lambda model, out, **allowed: moe_jax.merge(
        moe_jax.adapt(model, **LORA, step0_check=False), out, **allowed
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_refuses_unless_it_is_told_to_go_on(verb, spoilt, tmp_path):
    with pytest.raises(InputError, match=NAMED):
        VERBS[verb](spoilt, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    VERBS[verb](spoilt, tmp_path / "out", allow_nonfinite=True)
    if verb != "save":  # which leaves the history as it is
        assert read_lineage(tmp_path / "out")[-1]["options"]["allow_nonfinite"] is True


def test_conversion_refuses_and_goes_on(tmp_path, capsys):
    tensors = random_tensors(CONFIGS["llama"])
    tensors["model.norm.weight"][5] = -np.inf
    source = write_checkpoint(tmp_path / "foreign", CONFIGS["llama"], tensors)
    assert cli.main(["convert", str(source), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "final_norm/scale: 1 of 32 numbers not finite, the first -inf at [5]; mend" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--allow-nonfinite"]) == 0
    assert read_lineage(tmp_path / "out")[-1]["options"] == {"dtype": None, "ignore_keys": [], "allow_nonfinite": True}


def test_adapters_over_a_model_that_is_not_finite(spoilt, tmp_path):
    with pytest.raises(InputError, match=NAMED):  # found by the step-0 check, which reads the model
        moe_jax.adapt(spoilt, tmp_path / "out", **LORA)
    with pytest.raises(InputError, match="the .* finite, .* --no-step0-check"):
        moe_jax.adapt(spoilt, tmp_path / "out", **LORA, allow_nonfinite=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("value", "message"), [(np.nan, "NF4 has no code"), (3e38, "too large for NF4")])
def test_nf4_has_no_codes_for_them(dense, value, message):
    tuned = moe_jax.adapt(changed(dense, UP, value, at=...), **LORA, base="nf4", step0_check=False)
    with pytest.raises(InputError, match=message):
        tuned.source.read("layers/1/mlp/up/nf4/codes")


def test_results_that_are_not_finite_are_errors(spoilt, dense, capsys, tmp_path):
    with pytest.raises(InputError, match=f".nll nan.: {UP} holds"):
        moe_jax.evaluate(spoilt, range(20))
    assert cli.main(["generate", str(spoilt), "--ids", "1,2,3"]) == 2
    assert f"prompt 1 has logits that are not finite at token 1: {UP} holds" in capsys.readouterr().err
    huge = changed(dense, "lm_head/kernel", 3e38, at=...)
    with pytest.raises(InputError, match="too large for float32"):
        moe_jax.evaluate(huge, range(20))
    # Finite, but more than 709 nats.
    with pytest.raises(InputError, match=r"the .* finite .nll \d+.*: the .* nothing"):
        moe_jax.evaluate(changed(dense, "lm_head/kernel", 1e6, at=(..., 63)), range(20))


def test_casts_at_loading_and_at_the_end_of_a_run(dense):
    large = changed(dense, UP, 7e4)
    narrow = Recipe(run_dir="run", model=ModelSection(path="x", output_dtype="float16"))
    with pytest.raises(DoesNotFit, match=f"{UP}: 70000 .* float16"):
        Model.of_source(large.source, Loading(dtype="float16")).read()
    with pytest.raises(DoesNotFit, match=f"{UP}: 70000 .* float16"):
        list(_written_leaves(large.decoder, narrow, None, None))
    with pytest.raises(InputError, match=f"{UP}: 1 of 512 numbers not finite"):
        load_model(changed(dense, UP, np.inf).source, finite=True)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e14])
def test_errors_of_compression_do_not_depend_on_the_scale(moe, scale):
    """Squares of 1e-25 are zero in float32, and those of 1e20 infinite."""
    options = {"method": "up", "keep": 0.25, "design": "separate"}
    expected = _layers(moe_jax.compress(moe, **options))[0]["relative_error"]
    source = moe.source
    leaves = {name: source.read(name) * np.float32(scale if "/experts/" in name else 1) for name in source.specs()}
    scaled = Model.of_source(ModelInMemory(moe.config, LeavesInMemory(leaves)))
    assert _layers(moe_jax.compress(scaled, **options))[0]["relative_error"] == pytest.approx(expected, rel=1e-5)
    assert 0.1 < expected < 0.9


def test_a_budget_for_experts_of_zeros(moe):
    leaves = {path: source * np.float32("/experts/" not in path) for path, source in _leaves(moe).items()}
    small = moe_jax.compress(Model.of_source(ModelInMemory(moe.config, LeavesInMemory(leaves))), method="resmoe",
                             residual="quantized", budget_bits=20, layers=[1])  # fmt: skip
    assert [layer["relative_error"] for layer in _layers(small)] == [0.0]
    assert "3 experts have only zeros as weights" in small.lineage[-1]["measured"]["warnings"][0]


@one_in(2)
@pytest.mark.parametrize("method", ["up", "resmoe", "sp", "svd", "git-rebasin", "mlp-fusion"])
def test_weights_too_large_to_be_squared_are_refused(moe, method):
    with pytest.raises(InputError, match=r"1 in layer 1: 1e\+38"):
        moe_jax.compress(changed(moe, EXPERTS_UP, 1e38, at=(1, 2, 3)), method=method, keep=0.5)


def test_experts_of_zeros_are_remarked_on(tmp_path):
    config = CONFIGS["mixtral"]
    tensors = random_tensors(config)
    for name, tensor in tensors.items():
        if re.search(r"layers\.1.*experts\.2\.", name) or re.search(r"layers\.2.*experts\.[03]\.w1", name):
            tensor[...] = 0.0
    source = write_checkpoint(tmp_path / "foreign", config, tensors)
    console = Console(record=True, width=200, file=io.StringIO())
    convert(source, tmp_path / "out", console=console)
    assert "note: 1 expert has only zeros as weights (layer 1: 2)\n" in console.export_text()
    assert read_lineage(tmp_path / "out")[-1]["measured"]["zero_experts"] == {"1": [2]}
    small = moe_jax.compress(tmp_path / "out", method="quantize", bits=4)
    assert "1 expert has only zeros as weights (layer 1: 2)" in small.lineage[-1]["measured"]["warnings"]
    assert all(math.isfinite(layer["relative_error"]) for layer in _layers(small))


@pytest.mark.parametrize("layers, experts", [(1, 1), (1, 9), (8, 8), (9, 10), (12, 9)])
def test_of_many_experts_of_zeros_the_first_are_listed_and_the_others_counted(layers, experts):
    line = zero_experts_line({layer: range(experts) for layer in range(layers)})
    count, *listed = ([int(number) for number in re.findall(r"\d+", part)] for part in re.split("[(;]", line))
    each = [*range(min(experts, 8)), *[experts - 8] * (experts > 8)]
    assert count == [layers * experts]
    assert listed == [[layer, *each] for layer in range(min(layers, 8))] + [[layers - 8]] * (layers > 8)


def test_deltas_that_take_float16_beyond_its_range(dense, moe, tmp_path):
    """Both parts fit, and their sum or difference does not."""
    half = changed(dense, UP, 6e4, dtype="float16")
    made = moe_jax.upcycle(half, experts=2, delta="low-rank:1", layers=[1], step0_check=False)
    leaves = {path: np.array(made.source.read(path)) for path in made.source.specs()}
    leaves["layers/1/mlp/experts/delta/up/a"][1, 2, 0] = 100
    leaves["layers/1/mlp/experts/delta/up/b"][1, 0, 3] = 100
    large = Model.of_source(ModelInMemory(made.config, LeavesInMemory(leaves)))
    with pytest.raises(DoesNotFit, match=rf"{EXPERTS_UP}\[1\]: 70000 .* float16"):
        moe_jax.export(large, tmp_path / "out")
    two = changed(moe, EXPERTS_UP, 6e4, at=(0, 2, 3), dtype="float16")
    two.source.read(EXPERTS_UP)[1:, 2, 3] = -6e4
    with pytest.raises(InputError, match="layer 1: the values .* 80000 does .* in float16, .* convert"):
        moe_jax.compress(two, tmp_path / "out", method="resmoe", keep=0.01, solver="identity", refit=False)
    assert not list(tmp_path.iterdir())


def test_inspection_of_weights(spoilt, dense, moe, tmp_path, capsys):
    assert cli.main(["inspect", str(spoilt), "--weights"]) == 0
    assert f"not finite: 1 numbers of {UP}\n" in capsys.readouterr().out
    zero = moe_jax.save(changed(moe, EXPERTS_UP, 0.0, at=...), tmp_path / "one")
    assert cli.main(["inspect", str(zero), "--weights"]) == 0
    assert "weights: all are finite\n" in capsys.readouterr().out  # of one matrix alone nothing is said
    leaves = {path: np.array(moe.source.read(path)) for path in moe.source.specs()}
    for name in ("gate", "up", "down"):
        leaves[f"layers/0/mlp/experts/{name}/kernel"][[0, 2]] = 0
    moe_jax.save(Model.of_source(ModelInMemory(moe.config, LeavesInMemory(leaves))), tmp_path / "all")
    assert cli.main(["inspect", str(tmp_path / "all"), "--weights"]) == 0
    assert "2 experts have only zeros as weights (layer 0: 0, 2)\n" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "all"), "--weights", "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights == {"not_finite": {}, "zero_experts": {"0": [0, 2]}}


def _leaves(model: Model) -> dict[str, np.ndarray]:
    return {path: np.array(model.source.read(path)) for path in model.source.specs()}


def _layers(model: Model) -> list[dict]:
    return model.lineage[-1]["measured"]["layers"]
