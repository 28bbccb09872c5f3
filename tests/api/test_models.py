"""Models in memory and in directories: loaded, saved, and made of each other with the same result either way."""

import inspect
import json
import subprocess
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.api import compress as compressing
from moe_jax.api.open_source import open_source
from moe_jax.core.errors import InputError
from moe_jax.model_io.adapter_dir import AdapterDirectory
from moe_jax.model_io.lineage import read_lineage
from moe_jax.model_io.model_source import ModelSource
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.numerics import logits_of
from tests.support.tiers import long, one_in

TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6)
DELTA = {"experts": 4, "delta": "low-rank:2", "seed": 3}


def logits(model: moe_jax.Model) -> np.ndarray:
    return np.asarray(logits_of(model.decoder, TOKENS))


def equal_to_the_last_bit(one: ModelSource, other: ModelSource) -> bool:
    """Whether two models have the same config and leaves, and the same dtypes."""
    assert one.config == other.config
    assert {path: str(spec) for path, spec in one.specs().items()} == {
        path: str(spec) for path, spec in other.specs().items()
    }
    return all(one.read(path).tobytes() == other.read(path).tobytes() for path in one.specs())


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A model directory in bfloat16, with biases and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("dense")
    config = dense_config(num_layers=2, bias=True, dtype="bfloat16", vocab_size=258, bos_id=BOS, eos_ids=(EOS,))
    tokenizer = byte_tokenizer(folder / "tokenizer.json", adds_bos=True)
    return write_model(folder / "model", config, random_leaves(config), (tokenizer,))


@pytest.fixture(scope="module")
def moe(dense, tmp_path_factory):
    """Its MoE, in a directory."""
    return moe_jax.upcycle(dense, tmp_path_factory.mktemp("moe") / "model", **DELTA).path


@pytest.fixture(scope="module")
def trained(moe, tmp_path_factory):
    """The MoE with experts that differ, in a directory."""
    source, random = open_source(moe), np.random.default_rng(0)
    leaves = {path: source.read(path) for path in source.specs()}
    for path, leaf in leaves.items():
        if path.endswith("/b"):
            leaves[path] = (0.1 * random.standard_normal(leaf.shape)).astype(leaf.dtype)
    return write_model(tmp_path_factory.mktemp("trained") / "model", source.config, leaves, source.tokenizer_files)


@pytest.mark.parametrize("reads", [False, True])
def test_files_that_are_set_go_with_the_model_whether_or_not_it_was_read(dense, tmp_path, reads):
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ messages }}")
    made = moe_jax.upcycle(dense, **DELTA)
    loaded = moe_jax.load(dense)
    for name, model in (("made", made), ("loaded", loaded)):
        if reads:
            assert model.decoder is not None
        assert model.tokenizer is not None
        model.tokenizer_files = [*model.tokenizer_files, str(template)]
        saved = moe_jax.save(model, tmp_path / name)
        assert (saved / "chat_template.jinja").read_text() == "{{ messages }}" and (saved / "tokenizer.json").is_file()
        model.tokenizer_files = [template]
        assert model.tokenizer is None
        assert not (moe_jax.save(model, tmp_path / f"{name} again") / "tokenizer.json").exists()
    again = moe_jax.compress(made, method="quantize", bits=8)
    assert [file.name for file in again.tokenizer_files] == ["chat_template.jinja"]


def test_a_saved_model_is_the_model_to_the_last_bit(dense, tmp_path):
    loaded = moe_jax.load(dense)
    saved = moe_jax.save(loaded, tmp_path / "again")
    assert equal_to_the_last_bit(open_source(saved), open_source(dense))
    assert (saved / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    assert read_lineage(saved) == read_lineage(dense)
    # In memory it also has the fingerprint that it has on the disk.
    assert loaded.source.fingerprint() == open_source(dense).fingerprint()


def test_what_is_done_to_the_decoder_is_done_to_the_model(dense, tmp_path):
    model = moe_jax.load(dense)
    embedding = model.decoder.embed.embedding
    embedding[...] = embedding[...] + 1
    saved = open_source(moe_jax.save(model, tmp_path / "changed"))
    was = open_source(dense).read("embed/embedding")
    assert np.array_equal(saved.read("embed/embedding"), was + np.ones((), was.dtype))
    assert np.array_equal(saved.read("final_norm/scale"), open_source(dense).read("final_norm/scale"))


def test_a_model_can_be_loaded_in_another_dtype_and_over_devices(dense):
    model = moe_jax.load(dense, dtype="float32", compute_dtype="bfloat16", mesh={"fsdp": 2, "data": -1})
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(moe_jax.load(dense).source.specs())} == {"bfloat16"}
    assert {str(spec.dtype) for spec in model.source.specs().values()} == {"float32"}
    assert model.config.dtype == "float32" and model.decoder.compute_dtype == jnp.bfloat16
    assert dict(model.mesh.shape) == {"data": 4, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 1}
    # A model may be loaded again in another way.
    alone = moe_jax.load(model)
    assert alone.mesh is None and np.allclose(logits(alone), logits(moe_jax.load(dense, dtype="float32")), atol=1e-5)


def test_upcycling_in_memory_gives_what_it_gives_in_a_directory(dense, moe):
    of_path, of_model = moe_jax.upcycle(dense, **DELTA), moe_jax.upcycle(moe_jax.load(dense), **DELTA)
    assert of_path.path is None and equal_to_the_last_bit(of_path.source, open_source(moe))
    assert equal_to_the_last_bit(of_model.source, open_source(moe))
    # So does the decoder that is made of it.
    of_model.read()
    assert equal_to_the_last_bit(of_model.source, open_source(moe))
    command, written = of_path.lineage[-1], read_lineage(moe)[-1]
    assert {key: command[key] for key in command if key != "date"} == {
        key: written[key] for key in written if key != "date"
    }


def test_saving_what_was_upcycled_in_memory_gives_the_directory(dense, moe, tmp_path):
    saved = moe_jax.save(moe_jax.upcycle(dense, **DELTA, step0_check=False), tmp_path / "moe")
    assert open_source(saved).fingerprint() == open_source(moe).fingerprint()
    assert {file.name for file in saved.iterdir()} == {file.name for file in moe.iterdir()}


@one_in(2, first=1)
@pytest.mark.parametrize("base", ["stored", "nf4"])
def test_adapting_and_merging_in_memory_give_what_they_give_in_directories(moe, base, tmp_path):
    options = {"method": "lora", "adapter": "lora:2", "targets": ["q", "router"], "base": base, "seed": 5}
    options["step0_check"] = False
    written = moe_jax.adapt(moe, tmp_path / "tuned", **options)
    of_path, of_model = (moe_jax.adapt(given, **options) for given in (moe, moe_jax.load(moe)))
    assert isinstance(written.source, AdapterDirectory)
    assert equal_to_the_last_bit(of_path.source, written.source)
    assert equal_to_the_last_bit(of_model.source, written.source)
    # Of a base on the disk, what is saved refers to it; a base in memory is saved with its adapters.
    assert (moe_jax.save(of_path, tmp_path / "one") / "base.json").is_file()
    assert not (moe_jax.save(of_model, tmp_path / "two") / "base.json").exists()
    assert moe_jax.load(tmp_path / "one").source.fingerprint() == moe_jax.load(tmp_path / "two").source.fingerprint()

    merged = moe_jax.merge(tmp_path / "tuned", tmp_path / "merged").source
    assert merged.config.layers[0].attention.lora is None
    for tuned in (moe_jax.load(tmp_path / "tuned"), of_path):
        assert equal_to_the_last_bit(moe_jax.merge(tuned).source, merged)


def test_of_a_tuned_model_what_was_changed_is_saved(moe, tmp_path):
    tuned = moe_jax.adapt(moe, tmp_path / "tuned", method="perft-s", adapter="parallel:2", step0_check=False)
    model = moe_jax.load(tuned)
    norm = model.decoder.stack.final_norm.scale
    norm[...] = 2 * norm[...]
    saved = open_source(moe_jax.save(model, tmp_path / "changed"))
    assert set(saved.own_specs()) - set(tuned.source.own_specs()) == {"final_norm/scale"}
    assert np.array_equal(logits(moe_jax.load(tmp_path / "changed")), logits(model))
    model.base = None
    whole = moe_jax.save(model, tmp_path / "whole")
    assert not (whole / "base.json").exists() and np.array_equal(logits(moe_jax.load(whole)), logits(model))


def test_a_base_that_was_moved_can_be_named(moe, tmp_path):
    base = moe_jax.save(moe_jax.load(moe), tmp_path / "base")
    moe_jax.adapt(base, tmp_path / "tuned", method="lora", adapter="lora:2", targets="q", step0_check=False)
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(InputError, match="base"):
        moe_jax.load(tmp_path / "tuned")
    tuned = moe_jax.load(tmp_path / "tuned", base=moved)
    merged = moe_jax.merge(tmp_path / "tuned", base=moved)
    assert equal_to_the_last_bit(merged.source, moe_jax.merge(tuned).source)
    with pytest.raises(InputError, match="path of one"):
        moe_jax.merge(tuned, base=moved)


def test_a_checkpoint_is_converted_in_memory_as_in_a_directory(tmp_path):
    checkpoint = moe_jax.export(moe_jax.tiny_model(experts=4), tmp_path / "checkpoint")
    written = moe_jax.convert(checkpoint, tmp_path / "model", dtype="bfloat16")
    assert equal_to_the_last_bit(moe_jax.convert(checkpoint, dtype="bfloat16").source, written.source)
    assert equal_to_the_last_bit(moe_jax.load(checkpoint).source, open_source(checkpoint))
    assert [entry["command"] for entry in written.lineage] == ["export", "convert"]


def test_verbs_say_what_is_wrong_with_their_input(dense, moe, tmp_path):
    with pytest.raises(FileNotFoundError, match="no model at"):
        moe_jax.load(tmp_path / "absent")
    with pytest.raises(InputError, match="already exists"):
        moe_jax.save(moe_jax.load(dense), moe)
    with pytest.raises(InputError, match="is an MoE already"):
        moe_jax.upcycle(moe, every=1)
    with pytest.raises(InputError, match="did you mean 'low-rank:2'"):
        moe_jax.upcycle(dense, delta="low_rank:2")
    with pytest.raises(InputError, match="--scale goes with --method pesc only"):
        moe_jax.upcycle(dense, scale=2.0)
    with pytest.raises(InputError, match="unknown method 'dres'"):
        moe_jax.upcycle(dense, method="dres")
    with pytest.raises(InputError, match="method 'loar'"):
        moe_jax.adapt(moe, method="loar", adapter="lora:2")
    with pytest.raises(InputError, match="memory has nothing"):
        moe_jax.merge(moe_jax.load(moe))
    with pytest.raises(InputError, match="did you mean 'experts'"):
        moe_jax.plan(dense, upcycle={"expert": 8})


def test_adapters_that_refer_to_a_base_need_one_on_the_disk(dense, tmp_path):
    with pytest.raises(InputError, match="in memory.*save it first"):
        moe_jax.adapt(moe_jax.load(dense), tmp_path / "tuned", method="lora", adapter="lora:2", targets="q")
    with pytest.raises(InputError, match="in memory.*save it first"):
        moe_jax.upcycle(moe_jax.load(dense), tmp_path / "pesc", method="pesc", adapter=4, rest="lora:2")
    assert not list(tmp_path.iterdir())


@long
def test_texts_are_scored_and_continued_as_by_the_commands(dense, tmp_path, capsys):
    from moe_jax.commands import cli

    model, text = moe_jax.load(dense), tmp_path / "text.txt"
    text.write_text("Once upon a time there was a model of bytes.")
    scored = moe_jax.evaluate(model, text, seq_len=8)
    assert scored == moe_jax.evaluate(dense, model.tokenizer.encode(text.read_text()), seq_len=8)
    assert cli.main(["eval", str(dense), "--text", str(text), "--seq-len", "8", "--json"]) == 0
    # The command lays the model over all devices: the last bits of a sum may differ.
    assert json.loads(capsys.readouterr().out)["nll"] == pytest.approx(scored.nll, rel=1e-6)

    continued = moe_jax.generate(model, ["a", [BOS, 98]], max_new_tokens=5, temperature=1.0, seed=1)
    assert [one.prompt_ids for one in continued] == [[BOS, 97], [BOS, 98]]
    options = ["--max-new-tokens", "5", "--temperature", "1", "--seed", "1", "--json"]
    assert cli.main(["generate", str(dense), "--prompt", "a", "--ids", f"{BOS},98", *options]) == 0
    assert json.loads(capsys.readouterr().out) == [one._asdict() for one in continued]


def test_texts_that_cannot_be_scored_or_continued(dense, tmp_path):
    bare = moe_jax.tiny_model()
    with pytest.raises(InputError, match="memory has no tokenizer.json"):
        moe_jax.generate(bare, "a")
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(InputError, match="memory has no tokenizer.json"):
        moe_jax.evaluate(bare, tmp_path / "text.txt")
    with pytest.raises(FileNotFoundError, match="no text at"):
        moe_jax.evaluate(dense, "a string that names no file")
    for ids in ([1], [1.5, 2.0], [[1, 2], [3, 4]]):
        with pytest.raises(InputError, match="at least 2 integers"):
            moe_jax.evaluate(bare, ids)
    with pytest.raises(InputError, match="from 1 to 64; the vocabulary has 64"):
        moe_jax.evaluate(bare, [1, 64])
    for prompt in ([], [[]], ""):
        with pytest.raises(InputError):
            moe_jax.generate(bare, prompt)


def test_importing_the_library_does_not_import_jax():
    """The command line answers --help at once."""
    program = "import sys, moe_jax; dir(moe_jax); assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'moe_jax' has no attribute 'laod'"):
        moe_jax.laod  # noqa: B018


@pytest.mark.parametrize("options", [{"method": "resmoe", "keep": 0.3}, {"method": "ders-quantize", "bits": 2}])
def test_compressing_in_memory_gives_what_it_gives_in_a_directory(trained, options, tmp_path):
    written = moe_jax.compress(trained, tmp_path / "small", layers=[1], **options)
    of_path, of_model = (moe_jax.compress(given, layers=[1], **options) for given in (trained, moe_jax.load(trained)))
    assert equal_to_the_last_bit(of_path.source, written.source)
    assert equal_to_the_last_bit(of_model.source, written.source)
    assert open_source(trained).config != written.config and of_model.tokenizer is not None
    ours, theirs = of_path.lineage[-1], read_lineage(tmp_path / "small")[-1]
    assert ours["options"] == theirs["options"] and ours["sources"] == theirs["sources"]
    (here,), (there,) = ours["measured"]["layers"], theirs["measured"]["layers"]
    assert here["relative_error"] == there["relative_error"] > 0
    # On the disk a leaf takes some bytes more.
    assert 0 <= there["bytes_after"] - here["bytes_after"] < 0.5 * there["bytes_before"]


def test_a_base_and_a_text_may_go_with_compression(dense, trained, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a model of bytes.")
    sparse = {"method": "ders-sparsify", "drop": 0.5}
    of_path, of_model = (moe_jax.compress(trained, base=base, **sparse) for base in (dense, moe_jax.load(dense)))
    assert equal_to_the_last_bit(of_path.source, of_model.source)
    merged = moe_jax.compress(trained, method="msmoe", keep=0.5, calibrate=text)
    assert merged.lineage[-1]["sources"][-1]["path"] == str(text) and merged.config.layers[1].mlp.merged_experts == 2
    with pytest.raises(InputError, match="--base does not go"):
        moe_jax.compress(trained, base=dense, method="resmoe", keep=0.5)
    with pytest.raises(InputError, match="--layers: 0 of the model's MoE layers"):
        moe_jax.compress(trained, layers=[0], method="resmoe", keep=0.5)


def experts_of(model: moe_jax.Model, layer: int) -> dict[str, np.ndarray]:
    names = ("gate", "up", "down")
    return {name: model.source.read(f"layers/{layer}/mlp/experts/{name}/kernel") for name in names}


@one_in(3, first=1)
@pytest.mark.parametrize(
    "options", [{"method": "resmoe", "keep": 0.3}, {"method": "svd", "keep": 0.3}, {"method": "sp", "keep": 0.5}]
)
@long
def test_experts_of_one_layer_are_compressed_as_in_a_model(options):
    model = moe_jax.tiny_model(experts=3)
    whole = moe_jax.compress(model, layers=[1], **options)
    one = moe_jax.compress_experts(experts_of(model, 1), **options)
    measured = whole.lineage[-1]["measured"]["layers"][0]
    assert one.figures.relative_error == measured["relative_error"] and one.groups is None
    assert one.moe.bank == whole.config.layers[1].mlp.bank and one.moe.expert == whole.config.layers[1].mlp.expert
    state = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(one.bank))}
    for path, leaf in state.items():
        assert np.array_equal(leaf[...], whole.source.read(f"layers/1/mlp/experts/{path}")), path
    # The bank that came out can be compressed again.
    again = moe_jax.compress_experts(one.bank, method="quantize", bits=8)
    assert np.allclose(again.bank.kernels(2)["up"], one.bank.kernels(2)["up"], atol=1e-2)


def test_deltas_of_one_layer_are_taken_from_a_base():
    base, model = moe_jax.tiny_model(), moe_jax.tiny_model(experts=3)
    dense = {name: base.source.read(f"layers/1/mlp/{name}/kernel") for name in ("gate", "up", "down")}
    made = moe_jax.compress_experts(experts_of(model, 1), method="ders-quantize", bits=8, base=dense)
    assert np.array_equal(made.bank.base.up.kernel[...], dense["up"])
    whole = moe_jax.compress(model, method="ders-quantize", bits=8, base=base, layers=[1])
    assert made.figures.delta_error == whole.lineage[-1]["measured"]["layers"][0]["delta_error"]


def test_experts_of_one_layer_can_be_merged():
    model = moe_jax.tiny_model(experts=4)
    router = model.source.read("layers/0/mlp/router/kernel")
    made = moe_jax.compress_experts(experts_of(model, 0), method="msmoe", keep=0.5, router=router)
    assert made.bank.num_experts == 2 and sorted(set(made.groups.tolist())) == [0, 1]
    whole = moe_jax.compress(model, method="msmoe", keep=0.5, layers=[0]).source
    assert np.array_equal(made.groups, whole.read("layers/0/mlp/groups"))


def test_kernels_that_make_no_experts():
    kernels = experts_of(moe_jax.tiny_model(experts=2), 0)
    cases = [
        (kernels | {"side": kernels["up"]}, {}, "kernels gate, up, down, side; expected up, down"),
        ({"up": kernels["up"]}, {}, "kernels up; expected up, down"),
        (kernels | {"up": kernels["up"][0]}, {}, r"up of shape \(16, 32\); expected \[experts"),
        (kernels | {"down": kernels["up"]}, {}, r"down of shape \(2, 16, 32\).*expected floating point, \(2, 32, 16\)"),
        (kernels | {"gate": kernels["gate"].astype(int)}, {}, "dtype int64; expected floating point"),
        (kernels, {"router": np.ones((2, 16))}, r"router of shape \(2, 16\)"),
        (kernels, {"base": {"up": kernels["up"][0]}, "method": "ders-quantize"}, "base has the kernels up; expected"),
        (kernels, {"keep": 0.5}, "--keep does not go with quantize"),
    ]
    for given, options, message in cases:
        with pytest.raises(InputError, match=message):
            moe_jax.compress_experts(given, **({"method": "quantize", "bits": 8} | options))


def test_experts_alone_give_nothing_to_calibrate():
    with pytest.raises(InputError, match="model runs over"):
        moe_jax.compress_experts(experts_of(moe_jax.tiny_model(experts=2), 0), method="reap", keep=0.5)


def test_processes_that_record_inputs_for_each_other_need_a_folder(monkeypatch):
    made = types.SimpleNamespace(folder="recorded", sources={})
    monkeypatch.setattr(compressing, "calibrate", lambda *_, place, **__: (places.append(place), made)[1])
    monkeypatch.setattr(compressing, "_windows", lambda *_: {})
    places, there = [], "gs://bucket/model"

    def recorded(**options):
        spec = moe_jax.CompressSpec.of({"method": "msmoe", "keep": 0.5, "calibrate": "text.txt", **options})
        return compressing._calibration(there, types.SimpleNamespace(), spec, sensitivities=False)

    assert recorded() is made and places == [None]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(moe_jax.InputError, match="--calibration-dir"):
        recorded()
    assert len(places) == 1


def test_a_model_is_called_and_goes_through_programs():
    """Its arrays are the leaves: what a program returns is a model too."""
    model, ids = moe_jax.tiny_model(experts=4), jnp.ones((2, 5), jnp.int32)
    logits = jax.jit(lambda model, ids: model(ids).logits)
    np.testing.assert_allclose(logits(model, ids), model.decoder(ids).logits, atol=1e-6)
    assert logits._cache_size() == 1 and logits(moe_jax.tiny_model(experts=4, seed=1), ids).shape == (2, 5, 64)
    assert logits._cache_size() == 1
    grads = jax.grad(lambda model: model.decoder.loss({"tokens": ids, "targets": ids}))(model)
    assert isinstance(grads, moe_jax.Model) and grads.config == model.config
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(nnx.state(grads.decoder, moe_jax.filters.routers)))


def test_layers_may_have_arrays_of_their_own(tmp_path):
    saved, ids = moe_jax.save(moe_jax.tiny_model(experts=4), tmp_path / "model"), jnp.ones((2, 5), jnp.int32)
    stacked, separate = moe_jax.load(saved), moe_jax.load(saved, stacked=False)
    one, other = stacked(ids), separate(ids)
    np.testing.assert_allclose(other.logits, one.logits, atol=1e-6)
    np.testing.assert_allclose(separate.decoder.auxiliary_loss(other), stacked.decoder.auxiliary_loss(one), rtol=1e-6)
    loads = [moe_jax.nn.load_per_layer(model.config, out.router) for model, out in ((stacked, one), (separate, other))]
    chex.assert_trees_all_close(*loads, atol=1e-6)
    up = nnx.state(separate.decoder.stack.segments[1].blocks[0].mlp.experts)["up"]["kernel"][...]
    np.testing.assert_array_equal(
        up[0], nnx.state(stacked.decoder.stack.segments[0].blocks[0].mlp.experts)["up"]["kernel"][1]
    )
    again = moe_jax.load(moe_jax.save(separate, tmp_path / "again"))
    chex.assert_trees_all_equal(nnx.state(again.decoder), nnx.state(stacked.decoder))


@pytest.mark.parametrize("namespace", [moe_jax.nn, moe_jax.experts])
def test_modules_have_signatures(namespace):
    modules = [one for one in vars(namespace).values() if inspect.isclass(one) and issubclass(one, nnx.Module)]
    assert len(modules) > 3
    for module in modules:
        assert "args" not in inspect.signature(module).parameters, module

    class Own(moe_jax.nn.Norm):
        def __init__(self, width: int):
            super().__init__("rms", width, 1e-6, dtype=jnp.dtype("float32"))

    assert list(inspect.signature(Own).parameters) == ["width"] and Own(3).scale.shape == (3,)
