"""Counts of `moe-jax plan` against closed formulas and published figures (methods.md 8)."""

import dataclasses
import json
import math

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import (
    AttentionConfig,
    BankConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    config_to_json,
)
from moe_jax.peft.adapt import adapted_config
from moe_jax.peft.spec import AdaptSpec
from moe_jax.planning.model_costs import dense_config, make_plan, training_memory
from moe_jax.planning.planned_compression import planned_compression
from moe_jax.training.program import make_program
from moe_jax.training.recipe import MeshSection, ModelSection, OptimizerSection, Recipe
from moe_jax.upcycling import UpcycleSpec, upcycled_config

KEYS = {
    "dense_params", "total_params", "added_params", "router_params", "expert_params", "active_params",
    "trainable_params", "param_bytes",
}  # fmt: skip


def dense_model(d, f, num_layers, *, gated=True, bias=False, heads=2, **kwargs) -> ModelConfig:
    attention = AttentionConfig(num_heads=heads, num_kv_heads=heads, head_dim=d // heads)
    layer = LayerConfig(attention=attention, mlp=FFNConfig(dim=f, gated=gated, bias=bias))
    kwargs = {"family": "llama", "vocab_size": 100, "max_positions": 64, **kwargs}
    return ModelConfig(d_model=d, layers=(layer,) * num_layers, **kwargs)


def upcycled(dense: ModelConfig, **options) -> ModelConfig:
    return upcycled_config(dense, UpcycleSpec(**options))


# ---- published figures ------------------------------------------------------------------------------------------

STABLELM_2 = dense_model(2048, 5632, 24, heads=32, vocab_size=100352)
PHI_2 = dense_model(2560, 10240, 32, gated=False, bias=True, heads=32, vocab_size=51200)


def test_stablelm_with_low_rank_deltas():
    plan = make_plan(upcycled(STABLELM_2, experts=4, delta=BankConfig(kind="low-rank", rank=1)))
    assert plan.added_params == plan.formula_added_params == 1_204_224


def test_stablelm_with_sparse_deltas():
    """The published figure does not round the entries per matrix; 1153.43 are 1153 in each of 12 * 4 * 3."""
    plan = make_plan(upcycled(STABLELM_2, experts=4, delta=BankConfig(kind="sparse", rate=0.9999)))
    assert plan.formula_added_params == 264_398
    assert plan.added_params == 12 * 4 * 3 * 1153 + 12 * 4 * 2048 == 264_336


def test_phi_with_full_experts():
    plan = make_plan(upcycled(PHI_2, experts=4))
    assert plan.added_params == 3 * (2 * 2560 * 10240 + 12_800) * 16 + 16 * 4 * 2560
    assert round(plan.added_params / 1e9, 3) == 2.517


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("derived/allenai__OLMoE-1B-7B-0924", {"total_params": 6_919_161_856, "active_params": 1_281_884_160}),
        ("derived/Qwen__Qwen3-30B-A3B", {"total_params": 30_532_122_624}),
        ("as_found/mistralai__Mixtral-8x7B-v0.1", {"total_params": 46_702_792_704, "dense_params": 7_241_732_096}),
        ("as_found/meta-llama__Llama-2-7b-hf", {"total_params": 6_738_415_616, "added_params": 0}),
        ("derived/deepseek-ai__deepseek-coder-1.3b-base", {"total_params": 1_346_471_936}),
        ("derived/microsoft__phi-2", {"total_params": 2_779_683_840}),
        ("derived/stabilityai__stablelm-2-1_6b", {"total_params": 1_644_515_328}),
        ("as_found/Qwen__Qwen-1_8B", {"total_params": 1_836_828_672}),
    ],
)
def test_published_models(name, expected, data_dir, capsys):
    assert cli.main(["plan", str(data_dir / "configs" / f"{name}.json"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert KEYS <= plan.keys()
    assert {key: plan[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "options", "added", "by_formula"),
    [
        ("derived/stabilityai__stablelm-2-1_6b", ("--delta", "low-rank:1"), 1_204_224, 1_204_224),
        # See `test_stablelm_with_sparse_deltas`.
        ("derived/stabilityai__stablelm-2-1_6b", ("--delta", "sparse:0.9999"), 264_336, 264_398),
        ("derived/microsoft__phi-2", ("--delta", "full"), 2_517_360_640, 2_517_360_640),
    ],
)
def test_published_models_upcycled(name, options, added, by_formula, data_dir, capsys):
    assert cli.main(["plan", str(data_dir / "configs" / f"{name}.json"), "--experts", "4", *options, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["added_params"], plan["formula_added_params"]) == (added, by_formula)


# ---- closed formulas --------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    gated=st.booleans(),
    bias=st.booleans(),
    kind=st.sampled_from(["full", "low-rank", "sparse"]),
    freeze=st.booleans(),
    num_experts=st.integers(2, 6),
    every=st.integers(1, 4),
    f=st.integers(9, 70),
    data=st.data(),
)
def test_the_model_agrees_with_the_formulas(gated, bias, kind, freeze, num_experts, every, f, data):
    d, num_layers = 16, 4
    rank = data.draw(st.integers(1, 9)) if kind == "low-rank" else None
    rate = data.draw(st.sampled_from([0.0, 0.25, 0.9, 0.97])) if kind == "sparse" else None
    top_k = data.draw(st.integers(1, num_experts))
    freeze = freeze and kind != "full"
    bank = BankConfig(kind=kind, rank=rank, rate=rate, train_base=not freeze)
    dense = dense_model(d, f, num_layers, gated=gated, bias=bias, tie_embeddings=freeze, dtype="bfloat16")
    gate = "topk_softmax" if top_k > 1 else "top1"  # a softmax over one expert gives its router no gradient
    chosen = dict(experts=num_experts, top_k=top_k, every=every, delta=bank, gate=gate)
    plan = make_plan(upcycled(dense, **chosen))

    layers, n = num_layers // every, num_experts
    m = 3 if gated else 2
    ffn_params, biases = m * d * f, ((m - 1) * f + d if bias else 0)
    kept = round(d * f * (1 - rate)) * m if kind == "sparse" else 0
    delta = {"full": 0, "low-rank": m * (rank or 0) * (d + f), "sparse": kept}[kind]
    routers = layers * n * d
    own = ffn_params + biases if kind == "full" else delta + biases
    base = 0 if kind == "full" else ffn_params
    added = {
        "full": (n - 1) * (ffn_params + biases) * layers + routers,
        "low-rank": n * layers * delta + routers + (n - 1) * biases * layers,
        "sparse": n * layers * delta + routers + (n - 1) * biases * layers,
    }[kind]
    embeddings, attention = 100 * d * (1 if freeze else 2), 4 * d * d
    dense_params = embeddings + num_layers * (attention + ffn_params + biases + 2 * d) + d

    assert plan.dense_params == dense_params == make_plan(dense).total_params
    assert plan.added_params == added and plan.total_params == dense_params + added
    assert plan.router_params == routers
    assert plan.expert_params == layers * (n * own + base)
    assert plan.norm_params == num_layers * 2 * d + d
    assert plan.active_params == (
        embeddings
        + num_layers * attention
        + (num_layers - layers) * (ffn_params + biases)
        + layers * (base + top_k * own)
        + routers
    )
    assert plan.trainable_params == plan.total_params - (layers * base if freeze else 0)
    places = (2 * kept + 4 * ((m - 1) * d + f)) if kind == "sparse" else 0  # uint16 columns, int32 ends of rows
    assert plan.param_bytes == 2 * plan.total_params + n * layers * places
    exact = n * layers * m * d * f * (1 - rate) if kind == "sparse" else n * layers * delta
    assert plan.formula_added_params == round(added - n * layers * delta + exact)


def test_the_dense_model_of_an_upcycled_one_is_its_source():
    dense = dense_model(16, 24, 4)
    assert dense_config(upcycled(dense, delta=BankConfig(kind="sparse", rate=0.5))) == dense


# ---- memory of training -----------------------------------------------------------------------------------------


def test_memory_of_training_on_one_chip():
    config = upcycled(dense_model(16, 24, 2), every=1, delta=BankConfig(kind="sparse", rate=0.5, train_base=False))
    plan, memory = make_plan(config), training_memory(config, {})
    places = 2 * 8 * (3 * 16 * 24 // 2 * 2 + (16 + 16 + 24) * 4)  # uint16 columns and int32 ends of rows
    assert memory.params == 4 * plan.total_params + places
    assert memory.gradients == 4 * plan.trainable_params and memory.optimizer == 8 * plan.trainable_params
    assert memory.total == memory.params + memory.gradients + memory.optimizer
    # Moments stay float32.
    half = training_memory(config, {}, "bfloat16")
    assert half.gradients == memory.gradients / 2 and half.optimizer == memory.optimizer


def test_scales_of_nf4_are_whole_on_every_chip():
    """They are a thirtieth of the codes' bytes, and of a kernel that fsdp=8 divides a fifth of what a chip holds."""
    tuned = adapted_config(
        dense_model(128, 256, 1), AdaptSpec(method="lora", adapter="lora:2", targets="q", base="nf4")
    )
    codes, scales = 0, 0
    for path, spec in leaf_specs(tuned).items():
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if path.endswith("/nf4/codes"):
            codes += size
        elif "/nf4/" in path:
            scales += size
    one, eight = (training_memory(tuned, {"fsdp": size}).params for size in (1, 8))
    assert 1 / 33 < scales / codes < 1 / 28
    rest = one - codes - scales
    assert codes / 8 + scales + rest / 8 <= eight <= codes / 8 + scales + rest


def test_memory_of_training_on_a_mesh():
    config = upcycled(dense_model(16, 24, 2), every=1)
    alone, split = training_memory(config, {}), training_memory(config, {"fsdp": 2, "tensor": 2, "expert": 4})
    experts = 4 * make_plan(config).expert_params
    assert split.params < (alone.params - experts) / 2 + experts / 16
    assert split.params > (alone.params - experts) / 4 + experts / 16
    assert training_memory(config, {"data": 8}) == alone


@pytest.mark.parametrize(
    "section",
    [
        OptimizerSection(),
        OptimizerSection(kind="adafactor"),
        OptimizerSection(kind="lion", moments="bfloat16"),
        OptimizerSection(kind="muon"),
    ],
    ids=lambda section: section.kind,
)
def test_the_state_of_every_optimizer_is_counted_as_the_training_program_lays_it(section):
    config = upcycled(dense_model(256, 384, 2), every=1)
    axes = {"fsdp": 2, "tensor": 2, "expert": 2}
    model = ModelSection(config="config.json", init="random")
    recipe = Recipe(run_dir="run", model=model, optimizer=section, mesh=MeshSection(**axes))
    arrays = [leaf for leaf in jax.tree.leaves(make_program(recipe, config).state.opt_state) if leaf.ndim]
    laid = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in arrays)
    assert training_memory(config, axes, optimizer=section).optimizer == laid
    trained = make_plan(config).trainable_params
    least, most = {"adamw": (8, 8), "adafactor": (0.01, 0.5), "lion": (2, 2), "muon": (4, 5)}[section.kind]
    alone = training_memory(config, {}, optimizer=section).optimizer
    assert least * trained <= alone <= most * trained


def test_a_share_must_be_given_where_any_form_has_one():
    config = upcycled(dense_model(16, 24, 2), every=1)
    none = dict.fromkeys("keep residual storage bits centre_bits centre_group_size levels scale_bits".split())
    none |= {"zero_points": False, "row_scales": False, "group_size": None, "compress_layers": None, "dtype": None}
    with pytest.raises(InputError, match="--compress resmoe needs --keep"):
        planned_compression(config, "resmoe", **none)
    assert planned_compression(config, "resmoe", **none | {"keep": 0.5}).keep == 0.5


def test_meshes_that_do_not_fit_are_refused():
    config = dense_model(16, 25, 4)
    with pytest.raises(InputError, match=r"layers/\*/mlp/up/kernel .*: 25 is .* axis tensor=2"):
        training_memory(config, {"tensor": 2})
    with pytest.raises(InputError, match="(?s)axis 'fdsp' .did you mean 'fsdp'.*fsdp=0 must"):
        training_memory(config, {"fdsp": 2, "fsdp": 0})


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def config_file(tmp_path):
    """A config.json of ours, in a folder without weights."""
    file = tmp_path / "model" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config_to_json(dense_model(16, 24, 4))))
    return file


def plan(capsys, *arguments) -> dict:
    assert cli.main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def counted(config) -> dict:
    """What the command prints of a config: what nobody asked for is None, and is left out."""
    return {name: value for name, value in dataclasses.asdict(make_plan(config)).items() if value is not None}


def test_a_config_is_enough(config_file, capsys):
    expected = counted(dense_model(16, 24, 4))
    assert plan(capsys, config_file) == plan(capsys, config_file.parent) == expected


def test_upcycles_options_are_understood(config_file, capsys):
    def expected(**options):
        return counted(upcycled(dense_model(16, 24, 4), **options))

    assert plan(capsys, config_file, "--delta", "full") == expected()
    assert plan(capsys, config_file, "--experts", 4) == expected(experts=4)
    low_rank = BankConfig(kind="low-rank", rank=2, train_base=False)
    assert plan(
        capsys, config_file, "--experts", 4, "--top-k", 1, "--every", 1, "--delta", "low-rank:2", "--freeze-base",
        "--seed", 3, "--gate", "top1", "--balance-coef", 0.1, "--z-coef", 0.1, "--no-step0-check",
    ) == expected(experts=4, top_k=1, every=1, delta=low_rank, gate="top1")  # fmt: skip
    assert plan(capsys, config_file, "--layers", 0, 3) == expected(layers=(0, 3))


def test_a_plan_is_what_upcycling_makes(config_file, capsys, tmp_path):
    config = upcycled(dense_model(16, 24, 4), delta=BankConfig(kind="sparse", rate=0.5))
    (tmp_path / "moe.json").write_text(json.dumps(config_to_json(config)))
    counted = plan(capsys, tmp_path / "moe.json")
    assert counted == plan(capsys, config_file, "--delta", "sparse:0.5")
    specs = leaf_specs(config).values()
    assert counted["param_bytes"] == sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def test_a_table_is_printed(config_file, capsys):
    assert cli.main(["plan", str(config_file), "--every", "1", "--mesh", "fsdp=2,tensor=4"]) == 0
    out = capsys.readouterr().out
    counted = make_plan(upcycled(dense_model(16, 24, 4), every=1))
    for count in (counted.total_params, counted.added_params, counted.active_params, counted.router_params):
        assert f"{count:,}" in out
    assert "training, per chip" in out and "note:" not in out
    assert cli.main(["plan", str(config_file), "--experts", "8", "--mesh", "expert=16"]) == 0
    assert "note: expert=16 does not divide the 8 experts" in capsys.readouterr().out
    per_chip = plan(capsys, config_file, "--mesh", "fsdp=2")["training_bytes_per_chip"]
    assert per_chip == dataclasses.asdict(training_memory(dense_model(16, 24, 4), {"fsdp": 2}))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, ["--every", "9"], "every=9 must lie between 1 and the number of layers, 4"),
        (None, ["--freeze-base"], "--freeze-base needs a shared"),
        (None, ["--mesh", "fsdp"], "each axis once"),
        (None, ["--mesh", "fsdp=2,fsdp=2"], "each axis once"),
        (None, ["--mesh", "fsdp=²"], "each axis once"),
        (None, ["--mesh", "fsdp=" + "9" * 5000], "each axis once"),
        (None, ["--mesh", "fsdp=3"], "mesh axis fsdp=3"),
        (None, ["--platform", "v6"], "unknown platform 'v6' (did you mean 'v6e'?); known: "),
        (None, ["--platform", "v5e", "--tokens", "0"], "tokens=0 must be at least 1"),
        (None, ["--tokens", "64"], "--tokens: only with --platform"),
        ("{", [], "is not valid JSON"),
        ("[]", [], "holds a JSON list"),
        ('{"model_type": "lama"}', [], "unknown model_type 'lama'"),
        ('{"format": "moe_jax.model", "version": 99}', [], "has version 99"),
    ],
)
def test_bad_input_is_refused(content, options, message, config_file, capsys):
    if content is not None:
        config_file.write_text(content)
    assert cli.main(["plan", str(config_file), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("moe-jax: error: ")


def test_an_absent_config_is_refused(tmp_path, capsys):
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"moe-jax: error: no config at {tmp_path / 'config.json'}\n"
