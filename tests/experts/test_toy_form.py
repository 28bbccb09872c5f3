"""A form that the library does not know, `W diag(s_e)`, through everything a model goes through.

It is defined and registered here alone, with the four methods of every form, and one more by which experts are
compressed to it. What it adds to its base depends on the base, so that nothing which assumes an additive delta can be
right by accident.
"""

import dataclasses
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.compression.spec import make_method
from moe_jax.core.errors import InputError
from moe_jax.distributed import own_rules
from moe_jax.distributed.sharding import leaf_spec, make_mesh
from moe_jax.experts import BankConfig, make_bank
from moe_jax.experts.forms import KernelForm, ffn_matrices
from moe_jax.experts.forms.coding import Encodable
from moe_jax.experts.forms.optional import FormTiles
from moe_jax.experts.forms.protocol import register, unregister
from moe_jax.experts.on_host import expert_kernels
from moe_jax.functional.dense import ffn
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import FFNConfig, LoRAConfig, MoEConfig, config_from_json, config_to_json
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.moe_models import MemorySource
from tests.support.numerics import assert_close, logits_of, normal, randomised
from tests.support.tiers import long

EXPERTS, STEPS = 4, 3


@pytest.fixture(scope="module", autouse=True)
def scaled():
    """The form, for this file only."""

    @register("scaled")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Scaled(Encodable, KernelForm):
        """`W diag(s)`: `factor_out` [E, out], a factor for every output, 1 at first."""

        adds_to_base: ClassVar[bool] = False
        delta_option: ClassVar[str | None] = "scaled"

        def fresh(self, rngs, matrix, stack, dtype):
            return {"factor_out": jnp.ones((*stack, matrix.shape[1]), dtype)}

        @classmethod
        def stored_specs(cls, split):
            return {"factor_out": P("expert", None)}

        def specs(self, split):
            return {"factor_out": P("expert", None if split == "in" else "tensor")}

        def tile(self, base, arrays, window):
            return base * window.columns(arrays["factor_out"][None, :].astype(jnp.float32))

        def encode(self, residual, matrix, coder):
            """Of every column the factor of least squared error."""
            base, kernel = residual.base, residual.base + residual.values
            factors = ((base * kernel).sum(0) / (base**2).sum(0)).astype(residual.dtype)
            return {"factor_out": factors}, base * (factors.astype(np.float32) - 1)

    yield Scaled
    unregister("scaled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, scaled):
    """A dense model, and the MoE that `moe-jax upcycle` makes of it."""
    folder = tmp_path_factory.mktemp("toy")
    config = dense_config(num_layers=1, d_model=16, dim=32, vocab_size=264, bos_id=256, eos_ids=(257,))
    tokenizer = byte_tokenizer(folder / "tokenizer.json")
    write_model(folder / "dense", config, random_leaves(config), (tokenizer,))
    options = ["--delta", "scaled", "--experts", str(EXPERTS), "--top-k", "2", "--every", "1"]
    assert cli.main(["upcycle", str(folder / "dense"), str(folder / "moe"), *options]) == 0
    return folder


def train(folder, name, mesh):
    """The losses of some steps of `moe-jax train` over a mesh of 8 devices."""
    (folder / "text.txt").write_text("".join(f"the {i}th line says {i * i}\n" for i in range(200)))
    (folder / "recipe.toml").write_text(
        f"""
run_dir = "{folder / name}"
[model]
path = "{folder / "moe"}"
[data]
seq_len = 16
[[data.sources]]
path = "{folder / "text.txt"}"
[optimizer]
learning_rate = 1e-2
[schedule]
warmup_steps = 0
[train]
steps = {STEPS}
batch_size = 8
[mesh]
"""
        + "\n".join(f"{axis} = {size}" for axis, size in mesh.items())
    )
    assert cli.main(["train", str(folder / "recipe.toml")]) == 0
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def trained(folder):
    """The model after some steps, and their losses."""
    losses = train(folder, "mesh", {"fsdp": 2, "expert": 2, "tensor": 2})
    return folder / "mesh" / "model", losses


def tokens_of(config):
    return jax.random.randint(jax.random.key(0), (2, 24), 0, config.vocab_size)


def test_it_starts_as_the_dense_model(folder):
    moe = ModelDirectory(folder / "moe")
    assert moe.config.layers[0].mlp.bank.given() == {"kind": "scaled", "train_base": True}
    assert json.loads((folder / "moe" / "lineage.json").read_text())[-1]["measured"]["step0_max_abs_difference"] <= 1e-5
    assert moe.read("layers/0/mlp/experts/delta/up/factor_out").shape == (EXPERTS, 32)
    assert config_from_json(json.loads(json.dumps(config_to_json(moe.config)))) == moe.config


def test_plan_and_inspect_count_it(folder, capsys):
    assert cli.main(["plan", str(folder / "moe"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    added = EXPERTS * (32 + 32 + 16)
    assert plan["added_params"] == added + 16 * EXPERTS  # and a router
    assert cli.main(["plan", str(folder / "dense"), "--json"]) == 0
    dense = json.loads(capsys.readouterr().out)
    # Both experts of a token are multiplied with as whole kernels.
    kernels = 3 * 16 * 32
    assert plan["train_flops_per_token"] - dense["train_flops_per_token"] == 6 * (kernels + 16 * EXPERTS)
    assert cli.main(["inspect", str(folder / "moe"), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["experts"][0]["bank"]["kind"] == "scaled" and described["parameters"] == plan["total_params"]


@long
def test_it_is_trained_alike_on_any_mesh(folder, trained):
    model, losses = trained
    np.testing.assert_allclose(losses, train(folder, "data", {"data": 8}), atol=1e-4)
    assert losses[-1] < losses[0]
    before, after = ModelDirectory(folder / "moe"), ModelDirectory(model)
    for leaf in ("delta/down/factor_out", "base/down/kernel"):
        path = f"layers/0/mlp/experts/{leaf}"
        assert np.abs(after.read(path) - before.read(path)).max() > 1e-3
    scales = after.read("layers/0/mlp/experts/delta/up/factor_out")
    assert np.ptp(scales, axis=0).max() > 1e-3  # the experts have become different


def test_layers_of_it_are_stacked(folder):
    """Two layers of different numbers, computed by one program or by two, give the same."""
    moe, leaves = ModelDirectory(folder / "moe"), {}
    for path in moe.specs():
        leaves[path] = moe.read(path)
        if path.startswith("layers/0/"):
            leaves[path.replace("layers/0/", "layers/1/")] = 1.1 * leaves[path]
    source = MemorySource(dataclasses.replace(moe.config, layers=moe.config.layers * 2), leaves)
    stacked, alone = (load_model(source, stacked=stacked) for stacked in (True, False))
    tokens = tokens_of(source.config)
    assert_close(logits_of(stacked, tokens), logits_of(alone, tokens))


@pytest.fixture(scope="module")
def logits(trained):
    source = open_source(trained[0])
    return jax.jit(load_model(source))(tokens_of(source.config)).logits


@long
@pytest.mark.parametrize("axes", [{"fsdp": 2, "expert": 2, "tensor": 2}, {"expert": 4, "tensor": 2}], ids=str)
def test_logits_over_a_mesh_of_8_are_those_of_one_device(trained, logits, axes):
    source, mesh = open_source(trained[0]), make_mesh(axes)
    model = load_model(source, mesh=mesh)
    with jax.set_mesh(mesh):
        got = jax.jit(model)(tokens_of(source.config)).logits
    assert_close(got, logits)


def test_it_equals_one_ffn_per_expert(scaled):
    expert = FFNConfig(dim=12, bias=True)
    graphdef, params, _ = randomised(
        lambda: make_bank(BankConfig(scaled()), expert, EXPERTS, 8, rngs=nnx.Rngs(0), dtype=jnp.float32)
    )
    x, target = normal(2, 2, 9, 8)
    rng = np.random.default_rng(3)
    experts = jnp.asarray([rng.choice(EXPERTS, 2, replace=False) for _ in range(9)], jnp.int32)
    routing = Routing(experts, jnp.asarray(rng.random((9, 2)), jnp.float32))

    def value(params, x, reference):
        bank = nnx.merge(graphdef, params)
        if not reference:
            y = bank(x, routing)
        else:
            base, factors = bank.base, bank.delta.arrays()
            outputs = []
            for e in range(EXPERTS):
                kernels = {n: base[n].kernel[...] * factors[f"{n}/factor_out"][e][None, :] for n in expert.matrices}
                outputs.append(ffn(x, kernels, bank.biases(e), "silu"))
            chosen = jnp.take_along_axis(jnp.stack(outputs, axis=1), experts[:, :, None], axis=1)
            y = jnp.sum(chosen * routing.weights[:, :, None], axis=1)
        return jnp.sum(y * target), y

    got, expected = (
        jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True), static_argnums=2)(params, x, reference)
        for reference in (False, True)
    )
    assert_close(got, expected)


@long
def test_its_experts_are_compressed_to_another_form(trained, folder):
    source = ModelDirectory(trained[0])
    options = ["--method", "ders-quantize", "--bits", "8", "--group-size", "8"]
    assert cli.main(["compress", str(trained[0]), str(folder / "compressed"), *options]) == 0
    compressed = ModelDirectory(folder / "compressed")
    assert compressed.config.layers[0].mlp.bank.given()["kind"] == "quantized"
    at = "layers/0/mlp/experts"
    base, factors = source.read(f"{at}/base/up/kernel"), source.read(f"{at}/delta/up/factor_out")
    np.testing.assert_array_equal(compressed.read(f"{at}/base/up/kernel"), base)
    scales = np.abs(compressed.read(f"{at}/delta/up/scales").astype(np.float32)).max(axis=(1, 2))
    assert (scales > 0).any() and (scales < np.abs(base[None] * (factors[:, None, :] - 1)).max(axis=(1, 2))).all()


COMPRESSED_TO = ["--method", "resmoe", "--residual", "scaled", "--solver", "identity"]


def test_experts_are_compressed_to_it(folder, capsys):
    """Experts of one base with a factor for every output have no error in this form, whatever their mean is."""
    source, at = ModelDirectory(folder / "moe"), "layers/0/mlp/experts"
    leaves, random = {path: source.read(path) for path in source.specs()}, np.random.default_rng(0)
    for path, leaf in leaves.items():
        if path.endswith("factor_out"):
            leaves[path] = random.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
    write_model(folder / "grown", source.config, leaves)
    assert cli.main(["compress", str(folder / "grown"), str(folder / "again"), *COMPRESSED_TO]) == 0
    again = ModelDirectory(folder / "again")
    bank = again.config.layers[0].mlp.bank
    assert bank.given() == {"kind": "scaled", "train_base": True} and bank.has_base
    assert again.read(f"{at}/delta/down/factor_out").shape == (EXPERTS, 16)
    for layer in again.lineage[-1]["measured"]["layers"]:
        assert layer["relative_error"] < 1e-6
    grown = ModelDirectory(folder / "grown")
    for matrix in ffn_matrices(again.config.moe(0).expert, 16).values():
        made, whole = (list(expert_kernels(one.read, bank, at, matrix)) for one in (again, grown))
        assert_close(np.stack(made), np.stack(whole))
    # What the plan says beforehand is what lies on the disk.
    capsys.readouterr()
    assert cli.main(["plan", str(folder / "grown"), "--compress", "resmoe", "--residual", "scaled", "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["compression"]["forms"]
    specs = again.specs().items()
    nbytes = sum(spec.size * spec.dtype.itemsize for path, spec in specs if "/mlp/experts/" in path)
    assert planned["form"] == "scaled" and planned["written"] and planned["expert_bytes"] == nbytes


def test_a_size_that_it_does_not_have_is_refused(folder, capsys):
    for option in (["--keep", "0.5"], ["--bits", "4"], ["--levels", "fitted"]):
        assert cli.main(["compress", str(folder / "moe"), str(folder / "none"), *COMPRESSED_TO, *option]) == 2
        assert capsys.readouterr().err.count("\n") == 1 and not (folder / "none").exists()


def test_it_can_be_chosen_under_a_budget(scaled):
    every = make_method("resmoe", {"residual": "scaled", "budget_bits": 20.0}).choice.sizes
    assert [size.form for size in every] == [scaled]


@long
def test_its_experts_are_exported_as_full_kernels(trained, folder, logits):
    assert cli.main(["export", str(trained[0]), str(folder / "hf")]) == 0
    exported = open_source(folder / "hf")
    assert exported.config.family == "mixtral"
    source, at = ModelDirectory(trained[0]), "layers/0/mlp/experts"
    base, factors = source.read(f"{at}/base/down/kernel"), source.read(f"{at}/delta/down/factor_out")
    np.testing.assert_allclose(exported.read(f"{at}/down/kernel"), base[None] * factors[:, None, :], rtol=1e-6)
    assert_close(logits_of(load_model(exported), tokens_of(exported.config)), logits)


def test_what_it_cannot_have_is_refused(scaled):
    lora = LoRAConfig(rank=2, targets=("up",))
    for changes in ({"lora": lora}, {"nf4": True}):
        with pytest.raises(InputError, match="base 'shared' have neither"):
            MoEConfig(expert=FFNConfig(dim=8, **changes), num_experts=4, top_k=2, bank=BankConfig(scaled()))


def test_a_kernel_on_tpus_that_it_lacks_is_named_by_its_kind(scaled):
    assert "how scaled kernels are made" in FormTiles(scaled(), (8, 8), (8, 8)).fused()


def test_a_leaf_that_its_form_says_nothing_about_has_no_place_on_a_mesh(monkeypatch):
    monkeypatch.setattr(own_rules, "_rules", {})  # a layer of another test may have all leaves below it
    assert leaf_spec("layers/0/mlp/experts/delta/up/factor_out") == P("expert", None)
    with pytest.raises(InputError, match="no .* parameter 'layers/0/.*/up/factor_in'"):
        leaf_spec("layers/0/mlp/experts/delta/up/factor_in")


def test_one_name_of_a_leaf_has_one_place_on_a_mesh():
    with pytest.raises(ValueError, match="leaf 'values' of form 'other'"):

        @register("other")
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Other(KernelForm):
            def fresh(self, rngs, matrix, stack, dtype):
                return {"values": jnp.zeros(stack, dtype)}

            @classmethod
            def stored_specs(cls, split):
                return {"values": P(None, "fsdp")}

            def specs(self, split):
                return {"values": P("expert")}

            def tile(self, base, arrays, window):
                return base
