"""Counts of tuned models against methods.md 8: published ones at true size, and the leaves themselves in small."""

import dataclasses
import io
import json
import math

import pytest
import rich.console

from moe_jax.commands import cli
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.tuned_base import base_config, own_leaves
from moe_jax.models import config_to_json
from moe_jax.peft.adapt import adapted_config
from moe_jax.peft.spec import AdaptSpec
from moe_jax.peft.trained import active_size, parameter_sizes, print_trained, trained_groups
from moe_jax.planning.model_costs import dense_config, make_plan, trained_leaves, training_memory, tuned_parameters
from moe_jax.training.flops import active_matmul_params
from moe_jax.upcycling import UpcycleSpec, upcycled_config
from tests.support.peft_models import FFN, FULL, SHARED, model_of

OLMOE = "derived/allenai__OLMoE-1B-7B-0924"
MIXTRAL = "as_found/mistralai__Mixtral-8x7B-v0.1"
LLAMA_7B = "as_found/meta-llama__Llama-2-7b-hf"
# Embedding and head, attention, routers, and 2 of 8 experts.
MIXTRAL_ACTIVE = 2 * 32_000 * 4096 + 32 * (2 * 4096 * (4096 + 1024) + 4096 * 8 + 2 * 3 * 4096 * 14336)
ACTIVE = {OLMOE: 1_281_884_160, MIXTRAL: MIXTRAL_ACTIVE}


def plan(capsys, *arguments) -> dict:
    assert cli.main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- published counts, at true size -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "total", "active"),
    [
        (OLMOE, "--method perft-s --adapter lora:4", 262_144, 262_144),
        (OLMOE, "--method perft-e --adapter lora:4", 8 * 2_097_152, 2_097_152),
        (OLMOE, "--method perft-r --adapter lora:16 --experts 8 --top-k 8", 8_650_752, 8_650_752),
        (OLMOE, "--method perft-d --adapter parallel:8 --experts 2", 2 * 524_288, 2 * 524_288),
        (OLMOE, "--method lora --adapter lora:4 --targets q,v", 16 * 2 * 4 * 4096, 16 * 2 * 4 * 4096),
        (MIXTRAL, "--method perft-s --adapter lora:8", 32 * 2 * 4096 * 8, 32 * 2 * 4096 * 8),
        (MIXTRAL, "--method perft-e --adapter lora:8", 32 * 8 * 2 * 4096 * 8, 32 * 2 * 2 * 4096 * 8),
        (
            MIXTRAL,
            "--method perft-r --adapter lora:8 --experts 4 --top-k 2",
            32 * (4 * 2 * 4096 * 8 + 4 * 4096),
            32 * (2 * 2 * 4096 * 8 + 4 * 4096),
        ),
    ],
)
def test_perft_and_lora(model, options, total, active, data_dir, capsys):
    counted = plan(capsys, data_dir / "configs" / f"{model}.json", *options.split())
    tuned = counted["peft"]
    assert (tuned["total_params"], tuned["active_params"]) == (total, active)
    assert tuned["active_fraction"] == active / ACTIVE[model]
    assert counted["trainable_params"] == total


@pytest.mark.parametrize("rest", ["frozen", "qlora:64"])
def test_camelidae_8x7b(rest, data_dir, capsys):
    options = ("--method", "pesc", "--experts", 8, "--top-k", 2, "--adapter", 512, "--scale", 0.25, "--rest", rest)
    counted = plan(capsys, data_dir / "configs" / f"{LLAMA_7B}.json", *options)
    adapters = 32 * 8 * (2 * 4096 * 512 + 4096)
    lora = 0 if rest == "frozen" else 32 * 64 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert counted["dense_params"] == 6_738_415_616
    assert counted["dense_params"] + counted["formula_added_params"] == 6_738_415_616 + adapters == 7_813_206_016
    assert counted["total_params"] == 7_813_206_016 + lora
    assert counted["peft"]["total_params"] == counted["trainable_params"] == adapters + lora
    assert counted["peft"]["active_params"] == 32 * (2 * 2 * 4096 * 512 + 8 * 4096) + lora


def test_a_base_as_nf4_takes_few_bits(data_dir, capsys):
    """Kernels at 4.13 bits; embedding, head, norms and routers stay in bfloat16."""
    config, options = data_dir / "configs" / f"{MIXTRAL}.json", ("--method", "perft-s", "--adapter", "lora:8")
    stored, nf4 = plan(capsys, config, *options), plan(capsys, config, *options, "--base", "nf4")
    assert {key: nf4[key] for key in stored if key != "param_bytes"} == {
        key: stored[key] for key in stored if key != "param_bytes"
    }
    kernels = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 3 * 4096 * 14336)
    rest = stored["param_bytes"] - 2 * kernels
    assert 4.12 < 8 * (nf4["param_bytes"] - rest) / kernels <= 4.2


# ---- small models, leaf by leaf -------------------------------------------------------------------------------------


def adapted(config, method, **options):
    return adapted_config(config, AdaptSpec(method=method, adapter="lora:3", **options))


def upcycled(rest: str):
    return upcycled_config(model_of(FFN, FFN), UpcycleSpec(method="pesc", experts=4, adapter=3, rest=rest))


TUNED = {
    "routed": adapted(model_of(FFN, FULL), "perft-r", experts=3, top_k=2),
    "embedded": adapted(model_of(FFN, FULL), "perft-e", base="nf4"),
    "dense": adapted(model_of(SHARED), "perft-d", experts=3),
    "lora": adapted(model_of(FFN, FULL, SHARED), "lora", targets=("q", "o", "gate", "down", "router"), base="nf4"),
    "pesc": upcycled("qlora:2"),
    "pesc-frozen": upcycled("frozen"),
}


@pytest.mark.parametrize("name", TUNED)
def test_everything_is_counted_once(name):
    config = TUNED[name]
    counted, tuned = make_plan(config), tuned_parameters(config)
    base, sizes = make_plan(base_config(config)), parameter_sizes(config)
    assert counted.total_params == base.total_params + tuned.total_params
    assert counted.active_params == base.active_params + tuned.active_params
    assert tuned.active_fraction == tuned.active_params / base.active_params
    assert counted.dense_params == base.dense_params
    assert dense_config(config) == dense_config(base_config(config))
    # What is trained by default is what the base does not have.
    assert counted.trainable_params == tuned.total_params == sum(sizes[path] for path in own_leaves(config))
    assert trained_leaves(config) == own_leaves(config)
    # Bytes are those of the leaves there are, codes and scales included.
    specs = leaf_specs(config).values()
    assert counted.param_bytes == sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    # A token is multiplied with all that it meets but the embedding; the model ties nothing.
    assert active_matmul_params(config) == counted.active_params - 40 * 16


def test_a_token_meets_the_adapters_that_its_router_chooses():
    def active(name, path):
        return active_size(TUNED[name], path, parameter_sizes(TUNED[name])[path])

    down = "layers/1/mlp/perft/adapters/down"
    assert active("routed", down) == 2 * 16 * 3 and active("embedded", down) == 2 * 16 * 3
    assert active("dense", "layers/0/mlp/perft/adapters/up") == 3 * 3 * 16
    assert active("routed", "layers/1/mlp/perft/router/kernel") == 16 * 3
    assert active("pesc", "layers/0/mlp/experts/adapters/down") == 2 * 16 * 3
    assert active("pesc", "layers/0/mlp/experts/base/up/lora/a") == 16 * 2
    assert active("lora", "layers/1/mlp/experts/gate/lora/b") == 2 * 3 * 24  # of full experts: k of E
    assert active("lora", "layers/2/mlp/experts/base/gate/lora/b") == 3 * 24  # of a shared base: once


@pytest.mark.parametrize("base", ["stored", "nf4"])
def test_in_training_what_is_frozen_is_held_as_it_is_stored(base):
    config = adapted(model_of(FFN, FULL, dtype="bfloat16"), "perft-e", base=base)
    memory, trained = training_memory(config, {}), 2 * 4 * 16 * 3
    assert memory.params == make_plan(config).param_bytes + 2 * trained  # 4 bytes each, not 2
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)


def test_models_without_a_frozen_base_have_no_such_counts(tmp_path, capsys):
    assert tuned_parameters(model_of(FULL)) is None
    assert tuned_parameters(upcycled("full")) is None
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_to_json(model_of(FULL))))
    assert "peft" not in plan(capsys, file)


def test_a_config_that_is_tuned_already_says_so_itself(tmp_path, capsys):
    base, tuned = tmp_path / "base.json", tmp_path / "tuned.json"
    base.write_text(json.dumps(config_to_json(model_of(FFN, FULL))))
    tuned.write_text(json.dumps(config_to_json(TUNED["routed"])))
    options = ("--method", "perft-r", "--adapter", "lora:3", "--experts", 3, "--top-k", 2)
    assert plan(capsys, tuned) == plan(capsys, base, *options)
    assert cli.main(["plan", str(tuned)]) == 0
    out = capsys.readouterr().out
    assert "PERFT, routed: 3 adapters of rank 3, 2 per token" in out
    assert f"{16 * 3 * 3 * 2 + 3 * 16:,}" in out and "of what is active in the base" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--targets", "q"), "--targets: does not go with upcycling; to adapt a model takes --method"),
        (("--method", "perft-s"), "--adapter is missing"),
        (("--method", "perft-s", "--adapter", "lora:4", "--every", "2"), "--every: does not go with --method perft-s"),
        (("--method", "pesc", "--base", "nf4"), "--base: does not go with --method pesc"),
        (("--method", "perft-r", "--adapter", "lora:2", "--experts", "2", "--top-k", "3"), "top_k=3 must lie between"),
    ],
)
def test_options_of_other_commands_are_refused(options, message, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_to_json(model_of(FFN, FULL))))
    assert cli.main(["plan", str(file), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moe-jax: error: ") and message in err


# ---- what is said of them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_router_that_learns_nothing_is_spoken_of_where_it_is_trained(top_k):
    """As checkpoints may be: one expert per token, with weight 1."""
    one = dataclasses.replace(FULL, gate="topk_softmax", top_k=top_k)
    config = model_of(one, FFN, one, FFN)
    said = {}
    for name, trained in {"all": parameter_sizes(config).keys(), "attention": ["layers/0/attention/q/kernel"]}.items():
        console = rich.console.Console(file=io.StringIO(), width=200)
        print_trained(console, config, trained)
        said[name] = "the router of layers {0,2} learns nothing from the task" in console.file.getvalue()
    assert said == {"all": top_k == 1, "attention": False}


def test_no_list_of_layers_is_cut_off_on_a_narrow_terminal():
    layers = [FULL if i * i % 7 in (1, 2) or i > 60 else FFN for i in range(64)]
    config = model_of(*layers)
    console = rich.console.Console(file=io.StringIO(), width=80)
    print_trained(console, config, parameter_sizes(config).keys())
    printed = console.file.getvalue()
    (pattern,) = (group.pattern for group in trained_groups(config, parameter_sizes(config).keys())
                  if "router" in group.pattern)  # fmt: skip
    assert len(pattern) > 100 and "…" not in printed
    assert max(map(len, printed.splitlines()[1:20])) <= 80
    folded = "".join(line[: line.index("  ")] if "  " in line else line for line in printed.splitlines())
    assert pattern in folded


def test_layers_are_folded_and_nothing_is_left_out():
    config = adapted(model_of(FULL, FFN, FULL, FFN), "perft-r", experts=3, top_k=2)
    groups = {group.pattern: group for group in trained_groups(config, trained_leaves(config))}
    assert groups.keys() == {
        f"layers/{{0,2}}/mlp/perft/{name}" for name in ("router/kernel", "adapters/down", "adapters/up")
    }
    down = groups["layers/{0,2}/mlp/perft/adapters/down"]
    assert (down.size, down.active) == (2 * 3 * 16 * 3, 2 * 2 * 16 * 3)
    whole = trained_groups(config, parameter_sizes(config).keys())
    assert sum(group.size for group in whole) == make_plan(config).total_params
    assert "layers/{0..3}/attention/q/kernel" in {group.pattern for group in whole}
