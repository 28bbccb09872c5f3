"""GGUF files, written by the `gguf` package: bit for bit the leaves of the checkpoint that they were made of."""

import importlib.util
import json

import gguf
import ml_dtypes
import numpy as np
import pytest

from moe_jax.api.open_source import open_source, read_config  # noqa: E402
from moe_jax.commands.cli import main  # noqa: E402
from moe_jax.conversion import GGUFModel, HuggingFaceDirectory, checkpoint_source  # noqa: E402
from moe_jax.conversion.gguf.architectures.gguf_architectures import architecture_of  # noqa: E402
from moe_jax.conversion.gguf.architectures.gguf_description import Metadata  # noqa: E402
from moe_jax.conversion.gguf.gguf_config import llama3_factors  # noqa: E402
from moe_jax.conversion.gguf.gguf_header import BLOCKS  # noqa: E402
from moe_jax.core.errors import InputError  # noqa: E402
from moe_jax.functional.position_embeddings import rope_tables  # noqa: E402
from tests.support.gguf_files import ARCHITECTURES, tensors_of, write_gguf  # noqa: E402
from tests.support.hf_checkpoints import BASE, CONFIGS, random_tensors, write_checkpoint  # noqa: E402

Q = gguf.GGMLQuantizationType
# What no GGUF file can say of a model: biases and windows that llama.cpp does not have, dense layers among MoEs.
UNSAID = ("llama-llama3", "qwen3_moe-dense-layers", "phi-tied-wide-heads")
WITHOUT_WINDOWS = {"use_sliding_window": False}
CASES = [name for name, config in CONFIGS.items() if config["model_type"] in ARCHITECTURES and name not in UNSAID]


def both(folder, name, dtype="float32", **kwargs):
    """The same model in a Hugging Face directory and in a GGUF file."""
    config = CONFIGS[name] | (WITHOUT_WINDOWS if "use_sliding_window" in CONFIGS[name] else {})
    config |= {"torch_dtype": dtype} | ({"norm_topk_prob": True} if name == "qwen3_moe" else {})
    config |= {"attention_bias": False} if name == "deepseek_v3" else {}
    tensors = random_tensors(config, dtype)
    if "bias" in name or name.startswith("stablelm"):
        tensors = {key: value + np.asarray(0.1, value.dtype) for key, value in tensors.items()}
    return (
        HuggingFaceDirectory(write_checkpoint(folder / "hf", config, tensors)),
        GGUFModel(write_gguf(folder / "model.gguf", config, tensors, **kwargs)),
    )


def assert_same_model(a, b):
    assert a.specs() == b.specs()
    for path in a.specs():
        assert a.read(path).tobytes() == b.read(path).tobytes(), path


@pytest.mark.parametrize("name", CASES)
def test_leaves_and_config_are_those_of_the_checkpoint(tmp_path, monkeypatch, name):
    monkeypatch.setattr(checkpoint_source, "CHUNK_BYTES", 1000)  # chunks that end inside of a head
    theirs, ours = both(tmp_path, name)
    assert_same_model(theirs, ours)
    without_tokens = {"foreign": {}, "bos_id": None, "eos_ids": ()}
    assert vars(ours.config) | without_tokens == vars(theirs.config) | without_tokens


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_keep_their_bits(tmp_path, dtype):
    assert_same_model(*both(tmp_path, "llama", dtype))
    assert GGUFModel(tmp_path / "model.gguf").config.dtype == dtype


def test_fused_queries_keys_and_values_of_phi(tmp_path):
    config, tensors = CONFIGS["phi"], random_tensors(CONFIGS["phi"])
    theirs = HuggingFaceDirectory(write_checkpoint(tmp_path / "hf", config, tensors))
    fused, names = {}, tensors_of(config, tensors)
    for i in range(config["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            fused[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate([names.pop(f"blk.{i}.attn_{x}.{kind}") for x in "qkv"])
    path = tmp_path / "model.gguf"
    write_gguf(path, config, {}, raw=names | fused)
    assert_same_model(theirs, GGUFModel(path))


def test_experts_with_a_tensor_each(tmp_path):
    config, tensors = CONFIGS["mixtral"], random_tensors(CONFIGS["mixtral"])
    theirs = HuggingFaceDirectory(write_checkpoint(tmp_path / "hf", config, tensors))
    names = tensors_of(config, tensors)
    for name in [name for name in names if "_exps." in name]:
        for e, values in enumerate(names.pop(name)):
            names[name.replace("_exps.", f".{e}.")] = values
    assert_same_model(theirs, GGUFModel(write_gguf(tmp_path / "model.gguf", config, {}, raw=names)))


@pytest.mark.parametrize("kind", [blocks.name for blocks in BLOCKS.values()])
def test_blocks_are_what_the_package_makes_of_them(tmp_path, monkeypatch, kind):
    """Blocks of random bits, decoded whole by the package; here in small runs of rows, put in order and transposed."""
    monkeypatch.setattr(checkpoint_source, "CHUNK_BYTES", 3000)
    config = {**BASE, "model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    tensors, rng = tensors_of(config, random_tensors(config)), np.random.default_rng(0)
    size, nbytes = gguf.GGML_QUANT_SIZES[Q[kind]]
    expected, raw = {}, {}
    for name, values in tensors.items():
        if values.ndim == 2:
            blocks = rng.integers(0, 256, (values.size // size, nbytes), np.uint8)
            # Scales are halves at the beginning or the end of a block: no exponent of infinity or NaN.
            blocks[:, [1, 3, -1, -3]] &= 0x3B
            if kind == "IQ1_M":  # its scale is spread over four shorts
                blocks[:, 49::2] &= 0x3F
            raw[name] = blocks.reshape(values.shape[0], -1)
            with np.errstate(all="ignore"):  # random scales are large
                expected[name] = gguf.quants.dequantize(raw[name], Q[kind])
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    plain = write_gguf(tmp_path / "plain.gguf", config, {}, raw=tensors)
    for field in gguf.GGUFReader(plain).fields.values():
        if field.name.startswith("llama."):
            value = field.contents()
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(field.name, value)
    for name, values in tensors.items():
        if name in raw:
            writer.add_tensor(name, raw[name], raw_dtype=Q[kind])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    model = GGUFModel(tmp_path / "m.gguf")
    assert model.quantized == {kind: len(raw)}
    assert np.array_equal(model.read("embed/embedding"), expected["token_embd.weight"], equal_nan=True)
    assert np.array_equal(model.read("layers/0/mlp/down/kernel"), expected["blk.0.ffn_down.weight"].T, equal_nan=True)
    q = expected["blk.0.attn_q.weight"].reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    assert np.array_equal(model.read("layers/0/attention/q/kernel"), q.T, equal_nan=True)
    assert model.stored_bytes("embed/embedding") == raw["token_embd.weight"].nbytes


def test_rope_factors_are_llama_3s_or_any_others(tmp_path):
    factors = llama3_factors(
        8, 5e5, 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    keys = {"llama.rope.freq_base": 5e5}
    _, ours = both(tmp_path, "llama", raw={"rope_freqs.weight": factors.astype(np.float32)}, metadata=keys)
    assert (ours.config.rope.scaling, ours.config.rope.factor) == ("llama3", 8.0)
    assert ours.config.rope.original_max_positions == 8192 and ours.specs()
    odd = np.array([1.0, 1.25, 3.0, 7.5], np.float32)
    _, ours = both(tmp_path / "odd", "llama", raw={"rope_freqs.weight": odd})
    positions = np.arange(200)[None]
    cos, sin = rope_tables(ours.config.rope, 8, 128, positions)
    angles = positions[0][:, None] / (10000.0 ** (np.arange(4) / 4) * odd)
    np.testing.assert_allclose(cos[0, :, :4], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[0, :, 4:], np.sin(angles), atol=1e-5)
    theirs, ours = both(tmp_path / "ones", "llama", raw={"rope_freqs.weight": np.ones(4, np.float32)})
    assert ours.config.rope == theirs.config.rope  # which changes nothing
    for factor in (0, -1, np.inf):
        with pytest.raises(InputError, match=r"not finite"):
            both(tmp_path / "bad", "llama", raw={"rope_freqs.weight": np.array([1, 1, factor, 1], np.float32)})


def test_scalings_that_the_metadata_name(tmp_path):
    keys = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 32}  # fmt: skip
    _, ours = both(tmp_path, "qwen2", metadata=keys)
    assert (ours.config.rope.scaling, ours.config.rope.factor, ours.config.rope.original_max_positions) == (
        "yarn",
        4.0,
        32,
    )
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    _, ours = both(tmp_path / "linear", "llama", metadata=keys)
    assert (ours.config.rope.scaling, ours.config.rope.factor) == ("linear", 2.0)
    for value, message in (("longrope", "expected none, linear or yarn"), ("x" * 1000, "expected none")):
        with pytest.raises(InputError, match=message):
            both(tmp_path / "bad", "llama", metadata={"llama.rope.scaling.type": value})


def test_split_files_are_read_as_one(tmp_path):
    config, tensors = CONFIGS["llama"], random_tensors(CONFIGS["llama"])
    theirs = HuggingFaceDirectory(write_checkpoint(tmp_path / "hf", config, tensors))
    names = list(tensors_of(config, tensors).items())
    split = {"split.count": 3, "split.tensors.count": len(names)}
    files = [tmp_path / f"m-{i + 1:05d}-of-00003.gguf" for i in range(3)]
    for i, file in enumerate(files):
        write_gguf(file, config, {}, raw=dict(names[i::3]), metadata=split | {"split.no": i})
    assert_same_model(theirs, open_source(files[0]))
    for changes, message in (
        ({"split.no": 1}, "m-00003-of-00003.gguf does not say .* file 3 of 3"),
        ({"split.no": 2, "split.count": 2}, "m-00003-of-00003.gguf does not say .* file 3 of 3"),
    ):
        write_gguf(files[2], config, {}, raw=dict(names[2::3]), metadata=split | changes)
        with pytest.raises(InputError, match=message):
            open_source(files[0])
    write_gguf(files[2], config, {}, raw=dict(names[5::3]), metadata=split | {"split.no": 2})
    with pytest.raises(InputError, match=f"hold {len(names) - 1} tensors, it says {len(names)}"):
        open_source(files[0])
    with pytest.raises(InputError, match="is one of 3 files; .* first, m-00001-of-00003.gguf"):
        open_source(files[1])
    write_gguf(files[2], config, {}, raw=dict(names[1::3]), metadata=split | {"split.no": 2})
    with pytest.raises(InputError, match="is in .*m-00003-of-00003.gguf and .* it"):
        open_source(files[0])
    files[2].unlink()
    with pytest.raises(InputError, match="'m-00003-of-00003.gguf' is missing; fetch"):
        open_source(files[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"llama.attention.scale": 0.3}}, "'llama.attention.scale' is unknown"),
        ({"metadata": {"llama.attention.causal": False}}, "llama.attention.causal is False"),
        ({"metadata": {"llama.attention.value_length": 16}}, "value_length is 16, only 8 is supported"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, "rope.dimension_count is 4, but heads have 8"),
        ({"metadata": {"llama.block_count": [1, 2]}}, "llama.block_count differs between layers"),
        ({"metadata": {"llama.block_count": 0}}, "num_hidden_layers=0 must .* least 1"),
        ({"metadata": {"llama.embedding_length": "x"}}, "llama.embedding_length is 'x', expected a number"),
        ({"without": ("llama.context_length",)}, "has no llama.context_length, which cannot"),
        ({"metadata": {"general.type": "adapter"}}, "general.type is 'adapter', only a"),
        ({"raw": {"rope_freqs.weight": np.zeros(4, np.float32)}}, "rope_freqs.weight holds numbers"),
        ({"raw": {"rope_freqs.weight": np.ones((2, 2), np.float32)}}, r"shape \[2, 2\], expected"),
        ({"raw": {"rope_freqs.weight": np.full(4, 2, np.float32)},
          "metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}}, "type 'linear', which"),
        ({"metadata": {"split.count": 2}}, "is one of 2 files, which .* NAME-00001-of-00002.gguf"),
        ({"metadata": {"split.count": 2**31 - 1}}, "split.count is 2147483647, expected a"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_one_line(tmp_path, change, message):
    with pytest.raises(InputError, match=message) as caught:
        both(tmp_path, "llama", **change)
    assert len(str(caught.value).splitlines()) == 1 and str(tmp_path / "model.gguf") in str(caught.value)


def test_numbers_of_layers_are_one_where_they_are_equal():
    values = {"llama.a": np.array([3, 3, 3]), "llama.b": np.array([3, 3, 4]), "llama.c": np.array([])}
    metadata = Metadata(values, "llama", {})
    assert metadata.number("a") == 3
    for key in ("b", "c"):
        with pytest.raises(InputError, match="between layers"):
            metadata.number(key)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("lama", "did you mean 'llama'"), ("glm4moe", "is 'glm4moe'"), (5, "is 5; known"), (None, "is None;")],
)
def test_an_unknown_architecture_is_named(name, hint):
    with pytest.raises(InputError) as caught:
        architecture_of({"general.architecture": name})
    assert hint in str(caught.value)


def test_tensors_must_be_those_of_the_metadata(tmp_path):
    _, ours = both(tmp_path, "llama", raw={"blk.0.attn_rot_embd.weight": np.zeros(4, np.float32)})
    with pytest.raises(InputError, match="model its metadata describes: blk.0.attn_rot_embd.weight"):
        ours.specs()


def test_a_file_that_is_replaced_in_the_meantime(tmp_path):
    _, ours = both(tmp_path, "llama")
    ours.read("embed/embedding")
    both(tmp_path, "llama-tied")
    with pytest.raises(InputError, match="replaced while"):
        ours.read("embed/embedding")


def test_without_the_package_quantised_tensors_ask_for_it(tmp_path, monkeypatch):
    _, plain = both(tmp_path / "plain", "llama")
    _, ours = both(tmp_path, "llama", kinds={"token_embd.weight": Q.Q8_0})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plain.specs() and read_config(tmp_path / "model.gguf")
    with pytest.raises(InputError, match=r"need the package gguf: pip install 'moe-jax\[gguf\]'$"):
        ours.specs()


def test_commands_take_the_file_as_a_model(tmp_path, capsys):
    kinds = {f"blk.{i}.ffn_up.weight": Q.Q8_0 for i in range(3)}
    theirs, ours = both(tmp_path, "llama", kinds=kinds)
    file = tmp_path / "model.gguf"
    assert main(["convert", str(file), str(tmp_path / "model"), "--dtype", "bfloat16"]) == 0
    assert "quantised tensors become bfloat16: 3 in Q8_0" in capsys.readouterr().err
    converted = open_source(tmp_path / "model")
    assert converted.config.dtype == "bfloat16"
    assert np.array_equal(converted.read("embed/embedding"), theirs.read("embed/embedding").astype(ml_dtypes.bfloat16))
    (entry,) = json.loads((tmp_path / "model" / "lineage.json").read_text())
    assert entry["sources"] == [{"path": str(file), "fingerprint": ours.fingerprint()}]
    assert main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_params"] == sum(np.prod(s.shape) for s in ours.specs().values())
    options = ["--experts", "2", "--top-k", "2", "--no-step0-check"]
    assert main(["upcycle", str(file), str(tmp_path / "moe"), *options]) == 0
    assert main(["export", str(file), str(tmp_path / "back")]) == 0
    back = HuggingFaceDirectory(tmp_path / "back")
    assert np.array_equal(back.read("embed/embedding"), theirs.read("embed/embedding"))
