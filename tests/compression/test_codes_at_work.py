"""A model with everything in codes, in what models are used for: on many devices, trained, tuned, exported, served."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from flax import nnx

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.model_io.without_codes import weights_in_codes
from moe_jax.peft.trained import parameter_sizes, print_trained
from moe_jax.serve.scheduler import Scheduler
from tests.support.calibrated_codes import logits, mean_nll
from tests.support.numerics import assert_close, logits_of
from tests.support.served_models import client_of, serving
from tests.support.tiers import long

MESHES = ({"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "expert": 2, "fsdp": 2})
RECIPE = {"optimizer": {"learning_rate": 1e-2}, "train": {"steps": 2}}


def leaves_of(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(model.source.read(path)) for path in model.source.specs()}


def gradients(model, windows):
    """The loss, and the gradients, of a decoder on its devices, with scales in float32 as they are trained."""
    tokens = jnp.asarray(windows)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    graphdef, params, rest = nnx.split(model.decoder, nnx.Param, ...)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return jax.jit(jax.value_and_grad(lambda params: nnx.merge(graphdef, params, rest).loss(batch)))(params)


@long
@pytest.mark.parametrize("mesh", MESHES)
def test_on_eight_devices_it_is_what_it_is_on_one(coded, windows, mesh):
    windows = windows[:8]
    there = moe_jax.load(coded, mesh=mesh)
    expected = logits(coded, windows), *gradients(moe_jax.load(coded), windows)
    with jax.set_mesh(there.mesh):
        assert_close((logits_of(there.decoder, jnp.asarray(windows)), *gradients(there, windows)), expected)
    before = leaves_of(there)
    trained = leaves_of(moe_jax.train({**RECIPE, "mesh": mesh}, coded, [windows] * 2))
    changed = {path for path, leaf in trained.items() if not np.array_equal(leaf, before[path])}
    scales = {path for path in before if path.endswith("/scales")}
    assert scales <= changed
    assert not any(path.endswith(("/codes", "/zeros")) for path in changed)
    assert all(np.isfinite(leaf).all() for path, leaf in trained.items() if path in changed)


@pytest.mark.parametrize("which", ["all", "routers"])
def test_what_is_trained_of_it_is_said(coded, which):
    config = moe_jax.load(coded).config
    trained = [path for path in parameter_sizes(config) if which == "all" or "/router/" in path]
    console = rich.console.Console(file=io.StringIO(), width=200)
    print_trained(console, config, trained)
    said = console.file.getvalue()
    assert f"in codes: {weights_in_codes(config):,} weights" in said
    assert ("what is trained of them" in said) == (which == "all") == ("attention/q/coded/scales" in said)


@long
@pytest.mark.parametrize(
    "options",
    [
        {"method": "perft-r", "adapter": "lora:2", "experts": 2, "top_k": 1},
        {"method": "lora", "adapter": "lora:2", "targets": "q,router"},
    ],
    ids=lambda options: options["method"],
)
def test_adapters_beside_it_are_tuned_and_served(coded, windows, tmp_path, options):
    windows = windows[:8]
    moe_jax.adapt(coded, tmp_path / "adapters", **options)
    recipe = {**RECIPE, "train": {"steps": 10}}
    tuned = moe_jax.save(moe_jax.train(recipe, tmp_path / "adapters", [windows] * 10), tmp_path / "tuned")
    before, after = leaves_of(moe_jax.load(coded)), leaves_of(moe_jax.load(tuned))
    assert all(np.array_equal(leaf, after[path]) for path, leaf in before.items())
    assert mean_nll(logits(tuned, windows), windows) < mean_nll(logits(coded, windows), windows)
    if options["method"] == "lora":
        moe_jax.merge(tuned, tmp_path / "merged")
        assert_close(logits(tmp_path / "merged", windows), logits(tuned, windows), 1e-4)
    else:
        with pytest.raises(InputError, match="model directory"):
            moe_jax.export(tuned, tmp_path / "hf")
    model = moe_jax.load(tuned)
    expected = [moe_jax.generate(model, prompt, max_new_tokens=9).text for prompt in ("All", "men and")]
    with serving(model, Scheduler(model.decoder, slots=2, waiting=4)) as address:
        answer = client_of(address).completions.create(
            model="tiny", prompt=["All", "men and"], max_tokens=9, temperature=0
        )
    assert [choice.text for choice in answer.choices] == expected
