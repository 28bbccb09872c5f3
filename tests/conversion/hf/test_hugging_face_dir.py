"""`HuggingFaceDirectory`: leaves are exactly what the tensors say, or one message lists what is wrong."""

import json
import pathlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_jax.api.open_source import open_source
from moe_jax.conversion import HuggingFaceDirectory, checkpoint_source, is_hugging_face_directory
from moe_jax.conversion.checkpoint_source import row_chunks
from moe_jax.conversion.table import FUSED, LAYOUTS
from moe_jax.core.errors import InputError
from moe_jax.files.tokenizer_files import by_name
from moe_jax.model_io.loading import leaf_specs
from tests.support.hf_checkpoints import BASE, CONFIGS, DTYPES, random_tensors, write_checkpoint

LAYER = "model.layers.1"


def problems(folder: pathlib.Path) -> str:
    with pytest.raises(InputError) as error:
        HuggingFaceDirectory(folder).specs()
    return str(error.value)


def by_hand(tensors: dict[str, np.ndarray], leaf: str, layout: str) -> np.ndarray:
    """A few leaves of a Mixtral checkpoint, spelled out."""
    foreign = {"gate": "w1", "up": "w3", "down": "w2"}
    if leaf == "embed/embedding":
        return tensors["model.embed_tokens.weight"]
    if leaf.endswith("attention/q/kernel"):
        return tensors[f"{LAYER}.self_attn.q_proj.weight"].T
    name = leaf.split("/")[-2]
    if layout == FUSED:
        if name == "router":
            return tensors[f"{LAYER}.mlp.gate.weight"].T
        if name == "down":
            return tensors[f"{LAYER}.mlp.experts.down_proj"].swapaxes(1, 2)
        both = tensors[f"{LAYER}.mlp.experts.gate_up_proj"].swapaxes(1, 2)
        return both[..., :48] if name == "gate" else both[..., 48:]
    if name == "router":
        return tensors[f"{LAYER}.block_sparse_moe.gate.weight"].T
    return np.stack([tensors[f"{LAYER}.block_sparse_moe.experts.{e}.{foreign[name]}.weight"].T for e in range(4)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_leaves_are_what_the_tensors_say(tmp_path: pathlib.Path, layout: str, dtype: str):
    tensors = random_tensors(CONFIGS["mixtral"], dtype, layout)
    source = HuggingFaceDirectory(write_checkpoint(tmp_path / "m", CONFIGS["mixtral"], tensors, shards=3))
    specs, expected = source.specs(), leaf_specs(source.config)
    assert {path: spec.shape for path, spec in specs.items()} == {path: spec.shape for path, spec in expected.items()}
    assert all(spec.dtype == DTYPES[dtype] for spec in specs.values())
    layer = "layers/1"
    for leaf in (
        "embed/embedding",
        f"{layer}/attention/q/kernel",
        f"{layer}/mlp/router/kernel",
        *(f"{layer}/mlp/experts/{name}/kernel" for name in ("gate", "up", "down")),
    ):
        array = source.read(leaf)
        assert array.dtype == DTYPES[dtype] and array.shape == specs[leaf].shape
        assert array.tobytes() == np.ascontiguousarray(by_hand(tensors, leaf, layout)).tobytes(), leaf
        buffer = np.ones(array.nbytes + 7, np.uint8)
        assert source.read(leaf, buffer=buffer).tobytes() == array.tobytes()
        assert np.shares_memory(source.read(leaf, buffer=buffer), buffer)


def test_large_tensors_are_read_in_many_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    source = HuggingFaceDirectory(
        write_checkpoint(tmp_path / "m", CONFIGS["mixtral"], random_tensors(CONFIGS["mixtral"]))
    )
    leaves = ("embed/embedding", "layers/1/mlp/experts/up/kernel", "layers/1/mlp/experts/down/kernel", "lm_head/kernel")
    whole = {leaf: source.read(leaf).tobytes() for leaf in leaves}
    monkeypatch.setattr(checkpoint_source, "CHUNK_BYTES", 1000)
    assert {leaf: source.read(leaf).tobytes() for leaf in leaves} == whole


def test_reading_casts_on_request(tmp_path: pathlib.Path):
    tensors = random_tensors(CONFIGS["llama"])
    tensors["model.norm.weight"] = np.full(32, 1e30, np.float32)
    source = HuggingFaceDirectory(write_checkpoint(tmp_path / "m", CONFIGS["llama"], tensors))
    kernel = source.read("layers/0/attention/q/kernel", np.dtype(DTYPES["bfloat16"]))
    expected = tensors["model.layers.0.self_attn.q_proj.weight"].T.astype(DTYPES["bfloat16"])
    assert np.array_equal(kernel, expected)
    with pytest.raises(InputError, match=r"final_norm/scale: 1e\+30 does .* in float16, .*; choose bfloat16"):
        source.read("final_norm/scale", np.dtype(np.float16))
    with pytest.raises(InputError, match="has no leaf 'nothing'"):
        source.read("nothing")


def test_all_that_is_wrong_is_listed_in_one_message(tmp_path: pathlib.Path):
    tensors = random_tensors(CONFIGS["llama"])
    del tensors[f"{LAYER}.mlp.up_proj.weight"]
    tensors["model.strange"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    tensors["lm_head.weight"] = np.zeros((64, 32), np.int8)
    message = problems(write_checkpoint(tmp_path / "m", CONFIGS["llama"], tensors))
    assert message.startswith(f"{tmp_path / 'm'} does not hold the model its config.json describes: 4 problems")
    for line in (
        f"{LAYER}.mlp.up_proj.weight is missing",
        "model.strange is unexpected",
        "model.norm.weight has shape [31], config.json says [32]",
        "lm_head.weight has dtype I8, expected one of F32, F16, BF16",
    ):
        assert f"  - {line}" in message


def test_a_transposed_tensor_is_misshapen(tmp_path: pathlib.Path):
    tensors = random_tensors(CONFIGS["llama"])
    name = f"{LAYER}.mlp.up_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    message = problems(write_checkpoint(tmp_path / "m", CONFIGS["llama"], tensors))
    assert message.endswith(f": {name} has shape [32, 48], config.json says [48, 32]")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F64", "I64", "BOOL"])
def test_dtypes_that_are_not_weights(llama: pathlib.Path, dtype: str):
    bits = {"F8_E4M3": 1, "BOOL": 1, "F64": 8, "I64": 8}[dtype]
    content = (llama / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    shift = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])[0]):
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        size = (stop - start) // 4 * bits if name == "model.norm.weight" else stop - start
        entry["data_offsets"] = [start + shift, start + shift + size]
        if name == "model.norm.weight":
            entry["dtype"] = dtype
            shift += size - (stop - start)
    text = json.dumps(header).encode()
    body = b"\0" * (len(content) - end + shift)
    (llama / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    assert f"model.norm.weight has dtype {dtype}, expected one of F32, F16, BF16" in problems(llama)


def test_every_expert_missing_is_an_error(tmp_path: pathlib.Path):
    tensors = {name: array for name, array in random_tensors(CONFIGS["mixtral"]).items() if ".experts." not in name}
    message = problems(write_checkpoint(tmp_path / "m", CONFIGS["mixtral"], tensors))
    assert "36 problems" in message and "block_sparse_moe.experts.3.w2.weight is missing" in message


def test_experts_under_another_family_s_names(tmp_path: pathlib.Path):
    tensors = {name.replace(".w1.", ".gate_proj."): a for name, a in random_tensors(CONFIGS["mixtral"]).items()}
    message = problems(write_checkpoint(tmp_path / "m", CONFIGS["mixtral"], tensors))
    assert "experts.0.w1.weight is missing" in message and "experts.0.gate_proj.weight is unexpected" in message


def test_experts_of_several_dtypes(tmp_path: pathlib.Path):
    tensors = random_tensors(CONFIGS["mixtral"])
    name = f"{LAYER}.block_sparse_moe.experts.2.w1.weight"
    tensors[name] = tensors[name].astype(np.float16)
    message = problems(write_checkpoint(tmp_path / "m", CONFIGS["mixtral"], tensors))
    assert "layers/1/mlp/experts/gate/kernel would be stacked from tensors of dtypes F16, F32" in message


def test_leaves_of_several_dtypes_keep_theirs(tmp_path: pathlib.Path):
    tensors = random_tensors(CONFIGS["mixtral"], "bfloat16")
    tensors[f"{LAYER}.block_sparse_moe.gate.weight"] = np.ones((4, 32), np.float32)
    specs = HuggingFaceDirectory(write_checkpoint(tmp_path / "m", CONFIGS["mixtral"], tensors)).specs()
    assert specs["layers/1/mlp/router/kernel"].dtype == np.float32
    assert specs["layers/0/mlp/router/kernel"].dtype == DTYPES["bfloat16"]


def test_frequencies_may_be_there(tmp_path: pathlib.Path):
    tensors = random_tensors(CONFIGS["llama"])
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    source = HuggingFaceDirectory(write_checkpoint(tmp_path / "m", CONFIGS["llama"], tensors))
    assert source.specs() and set(source.weights.ignored) == {
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    }


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_layers_that_predict_further_tokens_are_those_that_the_config_counts(tmp_path: pathlib.Path, key: str):
    config, layers = CONFIGS["deepseek_v3"], CONFIGS["deepseek_v3"]["num_hidden_layers"]
    tensors = random_tensors(config)
    further = {
        f"model.layers.{layers + i}.{name}": np.ones(4, np.float32) for i in (0, 1) for name in ("enorm.weight",)
    }
    path = write_checkpoint(tmp_path / "m", {**config, key: 2}, tensors | further)
    assert HuggingFaceDirectory(path).weights.ignored.keys() == further.keys()
    for count in (0, 1):
        path = write_checkpoint(tmp_path / f"{count}", {**config, key: count}, tensors | further)
        assert f"model.layers.{layers + 1}.enorm.weight is unexpected" in problems(path)
        assert (f"model.layers.{layers}.enorm.weight is unexpected" in problems(path)) == (count == 0)
    path = write_checkpoint(tmp_path / "many", {**config, key: 10**6}, tensors)
    with pytest.raises(InputError, match=f"{key}=1000000 must lie between 0 and 100"):
        HuggingFaceDirectory(path)


def test_a_tied_head_may_be_stored_if_it_is_equal(tmp_path: pathlib.Path):
    tensors = random_tensors(CONFIGS["llama-tied"])
    assert "lm_head.weight" not in tensors
    same = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    source = HuggingFaceDirectory(write_checkpoint(tmp_path / "same", CONFIGS["llama-tied"], same))
    assert np.array_equal(source.read("embed/embedding"), tensors["model.embed_tokens.weight"])

    other = tensors["model.embed_tokens.weight"].copy()
    other[-1, -1] += 1
    for name, head in {"other": other, "half": other.astype(np.float16)}.items():
        folder = write_checkpoint(tmp_path / name, CONFIGS["llama-tied"], {**tensors, "lm_head.weight": head})
        with pytest.raises(InputError, match="ties lm_head.weight to model.embed_tokens.weight, but"):
            HuggingFaceDirectory(folder).read("embed/embedding")
    wrong = {**tensors, "lm_head.weight": other[:-1]}
    assert "lm_head.weight has shape [63, 32]" in problems(
        write_checkpoint(tmp_path / "shape", CONFIGS["llama-tied"], wrong)
    )


@pytest.mark.parametrize("row", [0, 31, 63])
def test_a_tied_head_is_compared_as_a_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, row: int):
    monkeypatch.setattr(checkpoint_source, "CHUNK_BYTES", 1000)
    tensors = random_tensors(CONFIGS["llama-tied"])
    head = tensors["model.embed_tokens.weight"].copy()
    assert len(row_chunks(head.shape, head.itemsize)) > 3
    head[row, 5] += 1
    tensors["lm_head.weight"] = head
    source = HuggingFaceDirectory(write_checkpoint(tmp_path, CONFIGS["llama-tied"], tensors))
    with pytest.raises(InputError, match="the two differ"):
        source.read("embed/embedding")


def test_an_untied_model_needs_its_head(tmp_path: pathlib.Path):
    folder = write_checkpoint(tmp_path / "m", CONFIGS["llama"], random_tensors(CONFIGS["llama-tied"]))
    assert problems(folder).endswith(": lm_head.weight is missing")


def test_pytorch_files_give_the_same_leaves(tmp_path: pathlib.Path):
    import torch

    tensors = random_tensors(CONFIGS["mixtral"])
    safe = HuggingFaceDirectory(write_checkpoint(tmp_path / "safe", CONFIGS["mixtral"], tensors))
    state = {name: torch.tensor(array) for name, array in tensors.items()}
    # Non-contiguous, as after a transpose, and a view into a larger storage.
    name = f"{LAYER}.self_attn.q_proj.weight"
    state[name] = state[name].T.contiguous().T
    state["model.norm.weight"] = torch.cat([torch.zeros(5), state["model.norm.weight"]])[5:]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "config.json").write_text(json.dumps(CONFIGS["mixtral"]))
    torch.save(state, tmp_path / "torch" / "pytorch_model.bin")
    source = HuggingFaceDirectory(tmp_path / "torch")
    assert source.specs() == safe.specs()
    for leaf in source.specs():
        assert source.read(leaf).tobytes() == safe.read(leaf).tobytes(), leaf


def test_a_config_is_enough_until_weights_are_asked_for(tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    source = HuggingFaceDirectory(tmp_path)
    assert source.config.d_model == 32 and source.tokenizer_files == ()
    with pytest.raises(InputError, match="has no weights"):
        source.specs()


def test_what_is_a_hugging_face_directory(llama: pathlib.Path, tmp_path: pathlib.Path):
    assert is_hugging_face_directory(llama)
    assert not is_hugging_face_directory(tmp_path) and not is_hugging_face_directory(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    assert not is_hugging_face_directory(tmp_path)
    assert isinstance(open_source(llama), HuggingFaceDirectory)


def test_directories_that_cannot_be_read(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError, match="Hugging Face directory"):
        HuggingFaceDirectory(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        HuggingFaceDirectory(tmp_path)
    (tmp_path / "config.json").write_text("{,")
    with pytest.raises(InputError, match="config.json is not valid JSON"):
        HuggingFaceDirectory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "model_type": "gpt9"}))
    with pytest.raises(InputError, match=f"{tmp_path}: config.json: unknown model_type 'gpt9'"):
        HuggingFaceDirectory(tmp_path)


def test_the_fingerprint_is_of_the_content(llama: pathlib.Path):
    before = HuggingFaceDirectory(llama).fingerprint()
    assert HuggingFaceDirectory(llama).fingerprint() == before
    content = bytearray((llama / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (llama / "model.safetensors").write_bytes(content)
    assert HuggingFaceDirectory(llama).fingerprint() != before


@pytest.mark.parametrize("begun", ["config", "checkpoint", "leaf"])
def test_a_directory_that_is_replaced_while_it_is_read_is_not_mixed_with_the_other(llama: pathlib.Path, begun: str):
    other = write_checkpoint(llama.parent / "other", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    source = HuggingFaceDirectory(llama)
    if begun != "config":
        leaf = next(iter(source.specs()))
        assert begun == "checkpoint" or source.read(leaf).size
    llama.rename(llama.parent / "gone")
    other.rename(llama)
    with pytest.raises(InputError, match="replaced while"):
        source.read("final_norm/scale")
    with pytest.raises(InputError, match="replaced while"):
        _ = source.tokenizer_files


def test_the_cache_of_the_hub_consists_of_links(tmp_path: pathlib.Path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    write_checkpoint(snapshot, CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    blobs.mkdir()
    (blobs / "9f").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/9f")
    templates = snapshot / "additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").symlink_to("../../../blobs/9f")
    names = ["additional_chat_templates/rag.jinja", "tokenizer.json"]
    assert [*by_name(HuggingFaceDirectory(snapshot).tokenizer_files)] == names
    (tmp_path / "environ").write_text("SECRET=1")
    (templates / "x.jinja").symlink_to(tmp_path / "environ")
    with pytest.raises(InputError, match="x.jinja is .* to .*environ, outside"):
        _ = HuggingFaceDirectory(snapshot).tokenizer_files
    (templates / "x.jinja").unlink()
    (snapshot / "merges.txt").symlink_to(tmp_path / "environ")
    with pytest.raises(InputError, match="merges.txt is .* to .*environ, outside"):
        _ = HuggingFaceDirectory(snapshot).tokenizer_files


def test_tokenizer_files_are_those_that_belong_to_the_model(llama: pathlib.Path):
    for name in ("tokenizer.json", "generation_config.json", "tokenizer.model", "chat_template.jinja", "README.md"):
        (llama / name).write_text("x")
    found = [file.name for file in HuggingFaceDirectory(llama).tokenizer_files]
    assert found == ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer.model"]


@pytest.fixture
def good(tmp_path: pathlib.Path) -> tuple[pathlib.Path, bytes, dict[str, bytes]]:
    """A checkpoint of one layer, the content of its file, and its leaves."""
    config = {**CONFIGS["llama-tied"], "num_hidden_layers": 1}
    source = HuggingFaceDirectory(write_checkpoint(tmp_path / "m", config, random_tensors(config)))
    leaves = {leaf: source.read(leaf).tobytes() for leaf in source.specs()}
    return source.path, (source.path / "model.safetensors").read_bytes(), leaves


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_corrupt_header_never_gives_wrong_weights(good: tuple[pathlib.Path, bytes, dict], data: st.DataObject):
    """Any damage to length or header: an error, or every leaf as it was."""
    folder, original, expected = good
    content = bytearray(original)
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content)
    damaged = HuggingFaceDirectory(folder)
    try:
        found = {leaf: damaged.read(leaf).tobytes() for leaf in damaged.specs()}
    except InputError:
        return
    assert found == expected


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_is_replaced_while_it_is_read_is_not_mixed_with_the_other(
    tmp_path: pathlib.Path, name: str, is_open: bool
):
    first = random_tensors(CONFIGS["llama"])
    for folder, factor in (("model", 1), ("other", 2)):
        tensors = {key: value * np.float32(factor) for key, value in first.items()}
        write_checkpoint(tmp_path / folder, CONFIGS["llama"], tensors)
        if name == "pytorch_model.bin":
            import torch

            (tmp_path / folder / "model.safetensors").unlink()
            torch.save({key: torch.from_numpy(value) for key, value in tensors.items()}, tmp_path / folder / name)
    source = HuggingFaceDirectory(tmp_path / "model")
    source.specs()
    if is_open:
        source.read("final_norm/scale")
    (tmp_path / "other" / name).replace(tmp_path / "model" / name)
    if is_open:
        assert np.array_equal(source.read("embed/embedding"), first["model.embed_tokens.weight"])
    else:
        with pytest.raises(InputError, match=f"{name} was replaced"):
            source.read("embed/embedding")
