"""Exported GGUF files: the same model when they are read, types and rows as llama.cpp has them; faults in a line."""

import json

import gguf
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.api.open_source import open_source
from moe_jax.commands.cli import main
from moe_jax.conversion import GGUFModel, HuggingFaceDirectory, read_hf_config
from moe_jax.conversion.gguf import gguf_model
from moe_jax.conversion.gguf.architectures.gguf_architectures import ARCHITECTURES, check_written
from moe_jax.core.errors import InputError
from moe_jax.nn import Decoder
from moe_jax.upcycling.dense_to_moe import upcycled_config
from moe_jax.upcycling.spec import UpcycleSpec
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.gguf_files import tensors_of
from tests.support.hf_checkpoints import BASE, CONFIGS, random_tensors, write_checkpoint
from tests.support.seeing_models import seeing
from tests.support.tiers import one_in

FAMILIES = [family for architecture in ARCHITECTURES.values() for family in architecture.families]
# What no architecture says: dense layers among MoEs, other activations.
UNSAID = ("qwen3_moe-dense-layers", "qwen2_moe-dense-layers", "phi-tied-wide-heads")
CASES = [name for name, config in CONFIGS.items() if config["model_type"] in FAMILIES and name not in UNSAID]
HEADS_APART = ("qwen2_moe",)  # where llama.cpp needs an output of its own
WIDE = {**BASE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_key_value_heads": 1}


def config_of(name, **changes):
    config = CONFIGS[name] | changes
    config |= {"use_sliding_window": False} if "use_sliding_window" in config else {}
    config |= {"num_key_value_heads": 4} if name == "olmoe" else {}
    config |= {"attention_bias": False} if config["model_type"] in ("qwen3", "gemma", "deepseek_v3") else {}
    config |= {"query_pre_attn_scalar": 12} if "query_pre_attn_scalar" in config else {}
    return config | ({"norm_topk_prob": True} if name == "qwen3_moe" else {})


def checkpoint(folder, config, dtype="float32"):
    """A checkpoint of random numbers, biases among them."""
    tensors = {
        key: value + np.asarray(0.1, value.dtype) if key.endswith("bias") else value
        for key, value in random_tensors(config, dtype).items()
    }
    return write_checkpoint(folder, config | {"torch_dtype": dtype}, tensors), tensors


def assert_same_numbers(a, b, *, tolerance=0):
    """The leaves of `b` may have the output of a tied model, too. Of Gemma's norms, 1 + weight is rounded."""
    assert b.specs().keys() - {"lm_head/kernel"} == a.specs().keys() - {"lm_head/kernel"}
    if a.config.tie_embeddings and not b.config.tie_embeddings:
        assert np.array_equal(b.read("lm_head/kernel"), a.read("embed/embedding").T)
    for path in a.specs():
        close = tolerance if path.endswith("/scale") else 0
        np.testing.assert_allclose(
            a.read(path).astype(np.float32), b.read(path).astype(np.float32), 0, close, err_msg=path
        )


@one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_out_and_in_is_the_same_model(tmp_path, name, dtype):
    folder, _ = checkpoint(tmp_path / "hf", config_of(name), dtype)
    theirs = HuggingFaceDirectory(folder)
    ours = GGUFModel(moe_jax.export(folder, tmp_path / "model.gguf", format="gguf"))
    assert_same_numbers(theirs, ours, tolerance=2e-7 if "gemma" in name else 0)
    unsaid = {"foreign": {}, "bos_id": None, "eos_ids": (), "family": "", "rope": None}
    unsaid |= {"tie_embeddings": None} if name in HEADS_APART else {}
    assert vars(ours.config) | unsaid == vars(theirs.config) | unsaid
    assert ours.config.rope == theirs.config.rope or name == "llama-llama3"
    # Matrices keep their type; llama.cpp adds and multiplies by vectors in float32 only.
    assert {str(spec.dtype) for spec in ours.specs().values() if spec.ndim == 1} == {"float32"}
    assert str(ours.specs()["layers/0/attention/o/kernel"].dtype) == dtype


@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "qwen3_moe", "olmoe", "stablelm", "phi", "deepseek_v2", "deepseek_v3"]
)
def test_tensors_are_those_that_the_package_makes_of_a_checkpoint(tmp_path, name):
    """Names by the package's own table, rows of Llama in its order, experts stacked."""
    config = config_of(name)
    folder, tensors = checkpoint(tmp_path / "hf", config)
    path = moe_jax.export(folder, tmp_path / "model.gguf", format="gguf", gguf_type="F32")
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    expected = tensors_of(config, tensors)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert np.array_equal(found[key].reshape(values.shape), values), key


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_matrices_are_cast(tmp_path, kind):
    folder, _ = checkpoint(tmp_path / "hf", config_of("llama"))
    ours = GGUFModel(moe_jax.export(folder, tmp_path / "m.gguf", format="gguf", gguf_type=kind))
    dtype = ours.specs()["lm_head/kernel"].dtype
    assert str(dtype) == {"F16": "float16", "BF16": "bfloat16"}[kind]
    kernel = HuggingFaceDirectory(folder).read("layers/1/mlp/down/kernel")
    assert np.array_equal(ours.read("layers/1/mlp/down/kernel"), kernel.astype(dtype))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_L", "Q4_K_M", "Q5_K_S", "Q6_K"])
def test_blocks_are_read_as_the_package_decodes_them(tmp_path, kind):
    """Our leaves are its decoded numbers; and they are near to those of the checkpoint."""
    folder, tensors = checkpoint(tmp_path / "hf", {**WIDE, "model_type": "mixtral", "num_local_experts": 3,
                                                   "num_experts_per_tok": 2})  # fmt: skip
    path = moe_jax.export(folder, tmp_path / "m.gguf", format="gguf", gguf_type=kind)
    ours = GGUFModel(path)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    decoded = {name: gguf.quants.dequantize(one.data, one.tensor_type) for name, one in found.items()}
    experts = ours.read("layers/1/mlp/experts/down/kernel")
    assert np.array_equal(experts.swapaxes(1, 2), decoded["blk.1.ffn_down_exps.weight"])
    assert np.array_equal(ours.read("embed/embedding"), decoded["token_embd.weight"])
    # Steps of 2 to 8 bits over the range of normal numbers.
    bound = {"Q2": 0.35, "Q3": 0.2, "Q4": 0.12, "Q5": 0.06, "Q6": 0.03, "Q8": 0.01}[kind[:2]]
    for e in range(3):
        name = f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"
        error = np.sqrt(np.mean((experts[e].T - tensors[name]) ** 2))
        assert error < bound * tensors[name].std(), (e, error)
    types = {name: one.tensor_type.name for name, one in found.items()}
    assert types["blk.0.ffn_gate_inp.weight"] == types["output_norm.weight"] == "F32"
    assert ours.read("layers/0/mlp/router/kernel").dtype == np.float32


def test_an_upcycled_model_leaves_in_the_architecture_of_its_moe(tmp_path):
    folder, _ = checkpoint(tmp_path / "hf", config_of("qwen3"))
    moe = moe_jax.upcycle(folder, tmp_path / "moe", experts=3, top_k=2, step0_check=False)
    path = moe_jax.export(moe, tmp_path / "moe.gguf", format="gguf")
    assert gguf.GGUFReader(path).fields["general.architecture"].contents() == "qwen3moe"
    back = GGUFModel(path)
    kernel = HuggingFaceDirectory(folder).read("layers/2/mlp/up/kernel")
    experts = back.read("layers/2/mlp/experts/up/kernel")
    assert len(experts) == 3 and all(np.array_equal(expert, kernel) for expert in experts)


def test_a_command_prints_and_writes(tmp_path, capsys):
    folder, _ = checkpoint(tmp_path / "hf", {**WIDE, "model_type": "llama", "intermediate_size": 352})
    out = tmp_path / "model.gguf"
    given = ["export", str(folder), str(out), "--format", "gguf", "--gguf-type", "Q4_K_M"]
    assert main([*given, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "blk.{i}.ffn_down.weight (x1): Q5_0 in place of Q4_K, as rows of 352" in " ".join(printed.split())
    assert "Q6_K" in printed and "note: the model has no tokenizer.json" in printed and not out.exists()
    assert main(given) == 0
    assert "wrote" in capsys.readouterr().err and list(tmp_path.glob(".*")) == []
    reader = gguf.GGUFReader(out)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["output.weight"] == "Q6_K" and types["blk.0.attn_q.weight"] == types["token_embd.weight"] == "Q4_K"
    assert reader.fields["general.file_type"].contents() == 15
    assert reader.fields["general.name"].contents() == "model"


def test_a_window_is_noted(tmp_path, capsys):
    folder, _ = checkpoint(tmp_path / "hf", config_of("mistral"))
    assert main(["export", str(folder), str(tmp_path / "m.gguf"), "--format", "gguf"]) == 0
    assert "llama.attention.sliding_window (8)" in " ".join(capsys.readouterr().err.split())


def test_after_a_kill_the_same_command_goes_on(tmp_path, monkeypatch):
    from moe_jax.conversion.to_hugging_face import LeafWriting

    folder, _ = checkpoint(tmp_path / "hf", config_of("llama"))
    whole = moe_jax.export(folder, tmp_path / "once.gguf", format="gguf").read_bytes()
    out, write, written = tmp_path / "more" / "once.gguf", LeafWriting._write_leaf, []

    def stop(self, path):
        if path.startswith("layers/2/"):
            raise KeyboardInterrupt
        written.append(path)
        write(self, path)

    monkeypatch.setattr(LeafWriting, "_write_leaf", stop)
    with pytest.raises(KeyboardInterrupt):
        moe_jax.export(folder, out, format="gguf")
    assert not out.exists() and "layers/1/mlp/up/kernel" in written
    written.clear()
    monkeypatch.setattr(LeafWriting, "_write_leaf", lambda self, path: (written.append(path), write(self, path)))
    moe_jax.export(folder, out, format="gguf")
    assert "layers/1/mlp/up/kernel" not in written and "layers/2/mlp/up/kernel" in written
    assert out.read_bytes() == whole and [one.name for one in out.parent.iterdir()] == ["once.gguf"]


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        ("t5", {}, {}, "family 't5' are"),
        ("deepseek", {}, {}, "'deepseek'"),
        ("gemma2", {}, {}, "attention.scale"),
        ("gemma2", {"attn_logit_softcapping": None}, {}, "soft caps"),
        ("gemma2", {"tie_word_embeddings": False}, {}, "lm_head/kernel"),
        ("qwen3_moe", {"norm_topk_prob": False}, {}, "gate is 'softmax_topk'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, "'dynamic'"),
        ("qwen2", {"rope_scaling": CONFIGS["llama-llama3"]["rope_scaling"]}, {}, "'llama3'"),
        ("qwen3_moe-dense-layers", {}, {}, "'qwen3_moe'"),
        ("phi-tied-wide-heads", {}, {}, "4 x 20"),
        ("olmoe", {}, {}, "4 heads share 2"),
        ("phi", {"hidden_act": "relu"}, {}, "'relu'"),
        ("qwen3", {"attention_bias": True}, {}, "attn_output.bias"),
        ("llama", {}, {"gguf_type": "Q4"}, "'Q4'"),
        ("llama", {}, {"dtype": "float16"}, "--dtype"),
        ("llama", {}, {"max_shard_size": "1GB"}, "--max-shard-size"),
        ("llama", {}, {"bits": 4}, "--bits"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path, name, changes, options, message):
    folder, _ = checkpoint(tmp_path / "hf", CONFIGS[name] | changes)
    with pytest.raises(InputError, match=message) as caught:
        moe_jax.export(folder, tmp_path / "m.gguf", format="gguf", **options)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("name", ["model", "model.bin", ".gguf", "gs://bucket/m.gguf"])
def test_names_of_files(tmp_path, name):
    folder, _ = checkpoint(tmp_path / "hf", config_of("llama"))
    place = name if "://" in name else tmp_path / name
    with pytest.raises(InputError, match=r"GGUF files|NAME.gguf"):
        moe_jax.export(folder, place, format="gguf")
    assert main(["export", str(folder), str(place), "--format", "gguf"]) == 2


def test_a_file_that_is_there_stays(tmp_path):
    folder, _ = checkpoint(tmp_path / "hf", config_of("llama"))
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        moe_jax.export(folder, tmp_path / "m.gguf", format="gguf")
    with pytest.raises(InputError, match="export --format gguf"):
        moe_jax.export(folder, tmp_path / "other.gguf")
    with pytest.raises(InputError, match="only with"):
        moe_jax.ExportSpec(gguf_type="F16")
    assert (tmp_path / "m.gguf").read_text() == "mine"


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (np.nan, None, "not finite"),
        (1e30, "F16", "does not fit"),
        (1e30, "Q8_0", "halves"),
        (1e30, "Q4_K_S", "halves"),
    ],
)
def test_numbers_that_a_type_cannot_hold(tmp_path, value, kind, message):
    folder, tensors = checkpoint(tmp_path / "hf", {**WIDE, "model_type": "llama"})
    tensors["model.layers.1.mlp.down_proj.weight"][3, 7] = value
    write_checkpoint(folder, json.loads((folder / "config.json").read_text()), tensors)
    with pytest.raises(InputError, match=message):
        moe_jax.export(folder, tmp_path / "m.gguf", format="gguf", gguf_type=kind)
    assert not (tmp_path / "m.gguf").exists() and list(tmp_path.glob(".*")) == []


def test_a_file_that_another_command_spoilt_is_found(tmp_path, monkeypatch):
    from moe_jax.conversion.gguf.gguf_file import GGUFFile

    folder, _ = checkpoint(tmp_path / "hf", config_of("llama"))
    leave = GGUFFile.__exit__

    def cut(self, *error):
        leave(self, *error)
        with open(self._path, "r+b") as file:
            file.truncate(self.size - 100)

    monkeypatch.setattr(GGUFFile, "__exit__", cut)
    with pytest.raises(InputError, match="after the end"):
        moe_jax.export(folder, tmp_path / "m.gguf", format="gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_without_the_package_the_export_asks_for_it(tmp_path, monkeypatch):
    folder, _ = checkpoint(tmp_path / "hf", config_of("llama"))
    monkeypatch.setattr(gguf_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'moe-jax\[gguf\]'$"):
        moe_jax.export(folder, tmp_path / "m.gguf", format="gguf")


def test_what_was_written_is_a_model_for_commands(tmp_path):
    folder, _ = checkpoint(tmp_path / "hf", config_of("mixtral"))
    path = moe_jax.export(folder, tmp_path / "m.gguf", format="gguf", gguf_type="BF16")
    again = moe_jax.export(path, tmp_path / "again.gguf", format="gguf")
    assert_same_numbers(open_source(path), open_source(again))


def test_models_that_see_are_of_no_architecture(tmp_path):
    config = seeing(dense_config(num_layers=1))
    model = write_model(tmp_path / "seeing", config, random_leaves(config))
    with pytest.raises(InputError, match="takes pictures"):
        moe_jax.export(model, tmp_path / "out.gguf", format="gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", [name for name, keys in CONFIGS.items() if keys["model_type"] not in FAMILIES])
def test_families_without_an_architecture_are_refused_by_name(name):
    config = read_hf_config(CONFIGS[name])
    with pytest.raises(InputError, match=f"family '{config.family}' are not"):
        check_written(config)


def test_an_upcycled_family_is_refused_by_name_before_its_layers_are(tmp_path):
    """Its format needs MoEs in every layer; to make them would not help."""
    config = upcycled_config(read_hf_config(CONFIGS["granite-plain"]), UpcycleSpec(experts=4, top_k=2, every=2))
    with pytest.raises(InputError, match="family 'granitemoe' are"):
        moe_jax.export(moe_jax.Model(Decoder(config, rngs=nnx.Rngs(0))), tmp_path / "m.gguf", format="gguf")
