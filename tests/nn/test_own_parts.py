"""Routers, gates, forms, activations and layers of users' own: the examples, and what is refused."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.core.registry import Registry
from moe_jax.distributed import own_rules
from moe_jax.distributed.sharding import leaf_spec, make_mesh
from moe_jax.experts.forms.protocol import unregister
from moe_jax.functional.routing.gates import GATES
from moe_jax.kernels.plain import ACTIVATION_FUNCTIONS
from moe_jax.models import SelectionConfig
from moe_jax.models.own_parts import LAYERS, ROUTERS
from tests.support.tiers import first, long, one_in

EXAMPLES = Path(moe_jax.__file__).parents[1] / "examples"
IDS = np.random.default_rng(0).integers(0, 64, (2, 9))
# The example of every part, its name in configs, and what else a model with it can be.
PARTS = {
    "own_layer": ("own_layer:Scaled", LAYERS),
    "own_form": ("own_form:Scaled", None),
    "own_router": ("own_router:Cosine", ROUTERS),
    "own_gate": ("own_gate:squares", GATES),
    "own_activation": ("own_activation:squared_relu", ACTIVATION_FUNCTIONS),
}


def forget(part):
    """Removes the part and its module, as if it had never been imported."""
    name, registry = PARTS[part]
    sys.modules.pop(part, None)
    if registry is None:
        unregister(name)
    else:
        registry.pop(name)


@pytest.fixture(scope="module", params=first(2, *PARTS))
def made(request, tmp_path_factory):
    """A part, the models that its example makes, and the directory of the last one."""
    if not EXAMPLES.is_dir():
        pytest.skip("the examples are in the repository alone")
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield request.param, __import__(request.param).main(folder), folder / "moe"
    forget(request.param)


@one_in(2)
def test_the_example_upcycles_trains_saves_and_loads(made):
    part, (upcycled, trained, loaded), path = made
    code = (EXAMPLES / f"{part}.py").read_text().split('"""')[2]
    assert sum(map(bool, code.splitlines())) <= 30
    assert PARTS[part][0] in (path / "config.json").read_text()
    logits = [np.asarray(model.decoder(IDS).logits) for model in (upcycled, trained, loaded)]
    assert not np.array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[1], logits[2])
    out = loaded.decoder(IDS, routing=True, hidden_states=(1,))
    assert set(out.routing) == set(loaded.config.moe_layers) and out.hidden_states[1].shape == (2, 9, 16)
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), *(nnx.state(one.decoder) for one in (upcycled, trained)))
    own = {"own_router": "router", "own_form": "delta", "own_layer": "alpha"}.get(part)
    leaves = jax.tree_util.tree_leaves_with_path(changed)
    of_part = [leaf for path, leaf in leaves if own is not None and own in str(path)]
    assert all(of_part) and bool(of_part) == (own is not None)


def test_it_is_not_opened_before_the_part_is_registered(made, capsys):
    part, _, path = made
    name, registry = PARTS[part]
    assert cli.main(["--import", part, "inspect", str(path)]) == 0
    forget(part)
    try:
        with pytest.raises(InputError) as raised:
            moe_jax.load(path)
        assert f"{name!r} is a part of" in str(raised.value) and f"import {part}," in str(raised.value)
        assert cli.main(["inspect", str(path)]) == 2 and name in capsys.readouterr().err
    finally:
        assert cli.main(["--import", part, "inspect", str(path)]) == 0


@one_in(5, first=4)
def test_it_continues_rows_with_caches(made):
    model = made[1][2]
    caches = moe_jax.nn.init_cache(model.config, 2, 9, jnp.dtype("float32"))
    first = model.decoder(IDS[:, :5], caches=caches, begins=True)
    positions = np.broadcast_to(np.arange(5, 9), (2, 4))
    rest = model.decoder(IDS[:, 5:], caches=first.caches, positions=positions)
    whole = model.decoder(IDS).logits
    np.testing.assert_allclose(jnp.concatenate([first.logits, rest.logits], axis=1), whole, atol=1e-5)


@long
def test_it_is_computed_alike_over_a_mesh(made):
    mesh = make_mesh({"fsdp": 2, "expert": 2, "tensor": 2})
    model = moe_jax.load(made[2], mesh=mesh)
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda decoder, ids: decoder(ids).logits)(model.decoder, IDS)
    np.testing.assert_allclose(logits, made[1][2].decoder(IDS).logits, atol=1e-5)


def test_formats_that_cannot_say_it_are_refused_in_a_line(made, tmp_path, capsys):
    part, _, path = made
    code = cli.main(["export", str(path), str(tmp_path / "hf")])
    error = capsys.readouterr().err
    if part == "own_form":  # its experts are written as whole kernels
        assert code == 0
    else:
        assert code == 2 and error.count("\n") == 1 and PARTS[part][0] in error and not (tmp_path / "hf").exists()


@one_in(5)
def test_experts_are_compressed_whatever_stands_beside_them(made):
    part, (*_, loaded), _ = made
    compressed = moe_jax.compress(loaded, method="quantize", bits=8)
    assert np.isfinite(compressed.decoder(IDS).logits).all()
    if part == "own_router":
        with pytest.raises(InputError, match="give a text"):
            moe_jax.compress(loaded, method="msmoe", keep=0.5)


class Plain(nnx.Module):
    """A router with parameters of other names, and a key."""

    def __init__(self, d_model, num_experts, *, rngs, dtype):
        self.weight = nnx.Param(0.1 * jax.random.normal(rngs.params(), (d_model, num_experts), dtype))
        self.bias = nnx.Param(jnp.zeros(num_experts, dtype))

    def __call__(self, x, key=None):
        return x.astype(jnp.float32) @ self.weight[...].astype(jnp.float32) + (0.0 if key is None else 1.0)


@pytest.fixture
def plain():
    moe_jax.nn.register_router("tests:Plain", Plain, shardings={"weight": P("fsdp", None)})
    yield "tests:Plain"
    del ROUTERS["tests:Plain"]


def test_parameters_of_a_router_are_split_as_it_says(plain, monkeypatch):
    of_router = {name: rules for name, rules in own_rules._rules.items() if rules.places == ".*/router"}
    monkeypatch.setattr(own_rules, "_rules", of_router)  # not of layers, whose leaves have any name
    path = "layers/1/mlp/router/{}"
    assert leaf_spec(path.format("weight")) == P("fsdp", None) and leaf_spec(path.format("bias")) == P()
    assert leaf_spec("stack/segments/0/blocks/0/mlp/router/weight") == P(None, "fsdp", None)
    with pytest.raises(InputError, match="no sharding rule"):
        leaf_spec("layers/1/mlp/other/weight")


def test_a_router_is_given_a_key_if_it_takes_one(plain):
    moe = moe_jax.MoE(moe_config(router=plain), 16, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 3, 16))
    without, given = (moe.with_routing(x, key=key)[2].logits for key in (None, jax.random.key(0)))
    np.testing.assert_allclose(given, without + 1.0, atol=1e-5)


def test_a_bfloat16_model_gets_a_router_of_its_dtype(plain, tmp_path):
    dense = moe_jax.tiny_model()
    config = dataclasses.replace(dense.config, dtype="bfloat16")
    dense = moe_jax.Model(moe_jax.Decoder(config, rngs=nnx.Rngs(0)))
    moe = moe_jax.upcycle(dense, experts=4, router=plain, seed=3, step0_check=False)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(moe.decoder))} == {"bfloat16"}
    again = moe_jax.upcycle(dense, experts=4, router=plain, seed=3, step0_check=False)
    other = moe_jax.upcycle(dense, experts=4, router=plain, seed=4, step0_check=False)
    weights = [np.asarray(one.decoder.layers[1].mlp.router.weight, np.float32) for one in (moe, again, other)]
    assert np.array_equal(weights[0], weights[1]) and not np.array_equal(weights[0], weights[2])
    assert moe.lineage[-1]["options"]["router"] == plain


def moe_config(**options):
    return moe_jax.MoEConfig(expert=moe_jax.FFNConfig(dim=32), num_experts=4, top_k=2, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"universal": "coder"},
        {"universal": "sigmoid"},
        {"selection": SelectionConfig(bias=True)},
        {"router_lora": moe_jax.LoRAConfig(rank=2, targets=("router",))},
    ],
    ids=str,
)
def test_what_needs_a_linear_router_is_refused_with_another(plain, options):
    with pytest.raises(InputError, match="a linear router"):
        moe_config(router=plain, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "nobody"}, "unknown router 'nobody'; known: linear"),
        ({"router": "my.lab:Router"}, "or moe-jax --import my.lab"),
        ({"gate": "topk_sofmax"}, "(did you mean 'topk_softmax'?)"),
        ({"gate": "my.lab:gate"}, "gate 'my.lab:gate' is a part of"),
        ({"method": "pesc", "router": "linear"}, "--router does not go with adapter experts"),
    ],
)
def test_names_that_mean_nothing_are_refused_before_anything_is_made(options, message):
    with pytest.raises(InputError) as raised:
        moe_jax.UpcycleSpec(experts=4, **options)
    assert message in str(raised.value)


def test_pieces_of_experts_and_texts_need_a_linear_router(plain):
    for options in ({"granularity": 2}, {"router_from": ["a", "b"]}):
        with pytest.raises(InputError, match="router"):
            moe_jax.UpcycleSpec(experts=2, router=plain, **options)


def test_a_router_of_another_shape_is_refused():
    moe = moe_jax.MoE(moe_config(), 16, rngs=nnx.Rngs(0))
    moe.router = lambda x: x
    with pytest.raises(InputError, match="result has the"):
        moe(jnp.ones((1, 3, 16)))


def test_any_function_of_the_tokens_takes_the_place_of_a_router():
    model = moe_jax.tiny_model(experts=4)
    model.decoder.layers[1].mlp.router = lambda x: jnp.tile(jnp.array([0.0, 1.0, 0.0, 2.0]), (len(x), 1))
    assert (np.asarray(model.decoder(IDS, routing=True).routing[1].experts) == [3, 1]).all()
    graphdef, state = nnx.split(model.decoder)  # as programs take it
    assert jax.eval_shape(lambda state: nnx.merge(graphdef, state)(IDS).logits, state).shape == (2, 9, 64)


def test_configs_without_own_parts_are_written_as_before():
    written = json.dumps(moe_jax.configs.config_to_json(moe_jax.tiny_model(experts=4).config))
    assert '"router":' not in written and '"module":' not in written


@pytest.mark.parametrize("name", ["top1", "", "a b", "x:y:z", "1", 3, "../x:y", "m:" + "n" * 200])
def test_names_of_parts_are_those_that_an_import_path_can_be(name):
    with pytest.raises(InputError, match="gate"):
        Registry("gate", {"top1": None}).register(name, None)


@pytest.mark.parametrize(
    "shardings",
    [P("fsdp"), {"a": "fsdp"}, {"a": P("nope")}, {"(": P()}, {1: P()}, {"weight": P(None, "tensor")}],
    ids=str,
)
def test_shardings_that_mean_nothing_or_contradict_others_are_refused(plain, shardings):
    with pytest.raises(InputError) as raised:
        moe_jax.nn.register_router("tests:Other", Plain, shardings=shardings)
    assert "\n" not in str(raised.value) and "tests:Other" not in ROUTERS


@long
def test_a_part_that_is_defined_anew_is_the_later_one(tmp_path):
    """As when the cell of a notebook is run again: models are made, and read, with the later class."""

    def scaled(factor):
        class Scaled(Plain):
            def __init__(self, d_model, num_experts, *, rngs, dtype):
                super().__init__(d_model, num_experts, rngs=rngs, dtype=dtype)
                if factor > 1:
                    self.more = nnx.Param(jnp.ones((), dtype))

            def __call__(self, x, key=None):
                return factor * super().__call__(x)

        return Scaled

    try:
        moe_jax.nn.register_router("tests:Scaled", scaled(1.0))
        model = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, router="tests:Scaled", step0_check=False)
        moe_jax.save(model, tmp_path / "moe")
        logits = [moe_jax.load(tmp_path / "moe").decoder(IDS, routing=True).routing[1].logits]
        moe_jax.nn.register_router("tests:Scaled", scaled(-50.0))
        logits.append(moe_jax.load(tmp_path / "moe").decoder(IDS, routing=True).routing[1].logits)
        np.testing.assert_allclose(logits[1], -50 * logits[0], rtol=1e-4)
        moe_jax.nn.register_router("tests:Scaled", scaled(2.0))
        more = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, router="tests:Scaled", step0_check=False)
        assert more.decoder.layers[1].mlp.router.more.shape == ()
    finally:
        del ROUTERS["tests:Scaled"]


class WithDropout(Plain):
    def __init__(self, d_model, num_experts, *, rngs, dtype):
        super().__init__(d_model, num_experts, rngs=rngs, dtype=dtype)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_a_part_with_random_state_is_refused():
    moe_jax.nn.register_router("tests:WithDropout", WithDropout)
    try:
        with pytest.raises(InputError, match="random key"):
            moe_jax.upcycle(moe_jax.tiny_model(), experts=4, router="tests:WithDropout")
    finally:
        del ROUTERS["tests:WithDropout"]


class LooksBack(moe_jax.nn.Block):
    """A layer that also sees the token before, and so cannot continue rows."""

    continues_rows = False

    def __call__(self, x, context, cache, key=None):
        return super().__call__(x + jnp.roll(x, 1, axis=1), context, cache, key)


@long
def test_a_layer_that_looks_at_other_tokens_is_refused_with_caches():
    moe_jax.nn.register_layer("tests:LooksBack", LooksBack)
    try:
        config = moe_jax.tiny_model().config
        layers = (config.layers[0], dataclasses.replace(config.layers[0], module="tests:LooksBack"))
        decoder = moe_jax.Decoder(dataclasses.replace(config, layers=layers), rngs=nnx.Rngs(0))
        caches = moe_jax.nn.init_cache(decoder.config, 2, 9, jnp.dtype("float32"))
        with pytest.raises(InputError, match="cannot continue rows"):
            decoder(IDS, caches=caches, begins=True)
        assert decoder(IDS).logits.shape == (2, 9, 64)
    finally:
        del LAYERS["tests:LooksBack"]


@pytest.mark.parametrize("part", [None, 5, "x", [1]], ids=str)
def test_parts_can_be_called_and_their_names_are_texts(part):
    for register in (moe_jax.nn.register_router, moe_jax.nn.register_layer, moe_jax.functional.register_gate):
        with pytest.raises(InputError):
            register("tests:part", part)
        with pytest.raises(InputError):
            register(["tests:part"], Plain)


@pytest.mark.parametrize("arguments", [["inspect", "--import", "own_router", "m"], ["train", "r.toml", "--import=x"]])
def test_modules_are_named_before_the_command(arguments, capsys):
    assert cli.main(arguments) == 2 and "before the command" in capsys.readouterr().err


def test_a_module_is_imported_after_the_settings_are_made(tmp_path, monkeypatch):
    """JAX reads them when a module of one's own imports it: in a process of its own."""
    (tmp_path / "mine.py").write_text(
        "import jax\nprint(jax.config.jax_enable_x64, jax.config.jax_compilation_cache_dir)\n"
    )
    program = "import sys; from moe_jax.commands.cli import main; main(sys.argv[1:])"
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    command = [sys.executable, "-c", program, "--import=mine", "inspect", "nothing"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("False ") and "None" not in ran.stdout, ran


@pytest.mark.parametrize("name", ["no_such_module", "os.no_such_module", "a;b", "../x", "-c"])
def test_a_module_that_cannot_be_imported_is_an_error_of_one_line(name, capsys):
    assert cli.main(["--import", name, "inspect", "model"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--import" in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
        ("import json\njson.loads('{')\n", "line 2: JSONDecodeError"),
        ("import no_such_module\n", "line 1: ModuleNotFoundError"),
        ("open('absent')", "line 1: FileNotFoundError"),
        ("\0", "SyntaxError"),
    ],
)
def test_a_mistake_in_a_module_is_one_line_that_says_where(text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_part.py").write_text(text)
    assert cli.main(["--import", "bad_part", "inspect", "model"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--import bad_part: " in error and said in error
    assert str(tmp_path) not in sys.path and "bad_part" not in sys.modules


def test_a_module_is_named():
    assert cli.main(["--import"]) == 2
