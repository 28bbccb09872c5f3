"""Convert, then export: every tensor bit for bit, for every family, layout, dtype and kind of file."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from rich.console import Console

from moe_jax.conversion import HuggingFaceDirectory, convert, export
from moe_jax.conversion.safetensors_file import PlannedTensor, plan_shards
from moe_jax.conversion.spec import ConvertSpec, ExportSpec
from moe_jax.conversion.table import FUSED, LAYOUTS, PER_EXPERT
from moe_jax.conversion.tensors import TensorEntry
from moe_jax.conversion.to_hugging_face import _check_planned
from moe_jax.core.errors import InputError
from moe_jax.model_io.lineage import read_lineage
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.disks import content_of
from tests.support.hf_checkpoints import (
    CONFIGS,
    DTYPES,
    assert_same_bits,
    random_tensors,
    read_tensors,
    write_checkpoint,
)
from tests.support.tiers import one_in

QUIET = Console(quiet=True)


def bits(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors full of arbitrary bits, NaNs and infinities among them."""
    rng = np.random.default_rng(1)
    return {
        name: rng.integers(0, 256, array.nbytes, np.uint8).view(array.dtype).reshape(array.shape)
        for name, array in tensors.items()
    }


def there_and_back(folder: pathlib.Path, **options: object) -> pathlib.Path:
    """Converts `folder`/foreign and exports it to `folder`/back, NaNs and infinities too."""
    convert(folder / "foreign", folder / "ours", ConvertSpec(allow_nonfinite=True), console=QUIET)
    export(ModelDirectory(folder / "ours"), folder / "back", ExportSpec(allow_nonfinite=True, **options), console=QUIET)
    return folder / "back"


# Of three cases of a family one, each time of another dtype.
@one_in(len(DTYPES))
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, [*DTYPES, *DTYPES][n % len(DTYPES) + i]) for n, name in enumerate(CONFIGS) for i in range(len(DTYPES))],
)
def test_every_bit_of_every_family(tmp_path: pathlib.Path, name: str, dtype: str):
    config = {**CONFIGS[name], "torch_dtype": dtype}
    tensors = bits(random_tensors(config, dtype))
    write_checkpoint(tmp_path / "foreign", config, tensors)
    back = there_and_back(tmp_path)
    assert_same_bits(read_tensors(back), tensors)
    written = json.loads((back / "config.json").read_text())
    assert {key: written[key] for key in config} == config
    assert HuggingFaceDirectory(back).config == HuggingFaceDirectory(tmp_path / "foreign").config


@one_in(7)
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2_moe-dense-layers", "qwen3_moe-dense-layers", "deepseek"])
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_layouts_of_experts_and_shards(tmp_path: pathlib.Path, name: str, before: str, after: str):
    write_checkpoint(tmp_path / "foreign", CONFIGS[name], random_tensors(CONFIGS[name], "bfloat16", before), shards=4)
    back = there_and_back(tmp_path, expert_layout=after, max_shard_size="20kB")
    assert HuggingFaceDirectory(back).weights.layout == after
    files = sorted(file.name for file in back.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    if before == after:
        assert_same_bits(read_tensors(back), read_tensors(tmp_path / "foreign"))
    convert(back, tmp_path / "again", console=QUIET)
    first, again = ModelDirectory(tmp_path / "ours"), ModelDirectory(tmp_path / "again")
    assert first.specs() == again.specs()
    assert all(first.read(leaf).tobytes() == again.read(leaf).tobytes() for leaf in first.specs())


def test_mixed_dtypes_stay_mixed_and_aligned(tmp_path: pathlib.Path):
    tensors = random_tensors(CONFIGS["mixtral"], "bfloat16")
    for name in tensors:
        if "norm" in name or "block_sparse_moe.gate" in name:
            tensors[name] = tensors[name].astype(np.float32)
    write_checkpoint(tmp_path / "foreign", {**CONFIGS["mixtral"], "torch_dtype": "float32"}, tensors)
    back = there_and_back(tmp_path)
    assert_same_bits(read_tensors(back), tensors)
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"  # as most of it is
    for entry in HuggingFaceDirectory(back).checkpoint.tensors.values():
        assert entry.start % (4 if entry.dtype == "F32" else 2) == 0


@pytest.mark.parametrize("target", ["float32", "float16"])
def test_dtype_casts_everything(tmp_path: pathlib.Path, target: str):
    tensors = random_tensors(CONFIGS["mixtral"], "bfloat16")
    source = write_checkpoint(tmp_path / "foreign", CONFIGS["mixtral"], tensors)
    expected = {name: array.astype(DTYPES[target]) for name, array in tensors.items()}
    convert(source, tmp_path / "cast", ConvertSpec(dtype=target), console=QUIET)
    cast = ModelDirectory(tmp_path / "cast")
    assert cast.config.dtype == target and {spec.dtype for spec in cast.specs().values()} == {np.dtype(target)}
    export(cast, tmp_path / "a", console=QUIET)
    export(HuggingFaceDirectory(source), tmp_path / "b", ExportSpec(dtype=target), console=QUIET)
    for back in (tmp_path / "a", tmp_path / "b"):
        assert_same_bits(read_tensors(back), expected)
        assert json.loads((back / "config.json").read_text())["torch_dtype"] == target


def test_numbers_that_do_not_fit_leave_nothing_behind(tmp_path: pathlib.Path):
    tensors = random_tensors(CONFIGS["llama"])
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = 1e30
    source = write_checkpoint(tmp_path / "foreign", CONFIGS["llama"], tensors)
    for command in (
        lambda: convert(source, tmp_path / "out", ConvertSpec(dtype="float16"), console=QUIET),
        lambda: export(HuggingFaceDirectory(source), tmp_path / "out", ExportSpec(dtype="float16"), console=QUIET),
    ):
        with pytest.raises(InputError, match=r"layers/2/mlp/down/kernel: 1e\+30 does .* in float16"):
            command()
        assert [child.name for child in tmp_path.iterdir()] == ["foreign"]


def test_tokenizer_files_and_lineage_travel(tmp_path: pathlib.Path):
    source = write_checkpoint(tmp_path / "foreign", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    (source / "additional_chat_templates").mkdir()
    names = ("tokenizer.json", "tokenizer.model", "tekken.json", "generation_config.json")
    names += ("additional_chat_templates/tool_use.jinja",)
    for name in (*names, "additional_chat_templates/notes.txt"):
        (source / name).write_bytes(name.encode())
    back = there_and_back(tmp_path)
    assert not (back / "additional_chat_templates" / "notes.txt").exists()
    for name in names:
        assert (back / name).read_bytes() == name.encode()
    convert(back, tmp_path / "again", console=QUIET)
    lineage = read_lineage(tmp_path / "again")
    assert [entry["command"] for entry in lineage] == ["convert", "export", "convert"]
    assert lineage[0]["sources"][0]["fingerprint"] == HuggingFaceDirectory(source).fingerprint()
    assert lineage[1]["options"]["expert_layout"] == PER_EXPERT
    assert all(entry["measured"]["peak_memory_bytes"] > 0 for entry in lineage)


def test_a_dry_run_shows_the_mapping_and_writes_nothing(tmp_path: pathlib.Path):
    source = write_checkpoint(tmp_path / "foreign", CONFIGS["mixtral"], random_tensors(CONFIGS["mixtral"]))
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))
    convert(source, tmp_path / "out", ConvertSpec(dtype="bfloat16"), dry_run=True, console=console)
    export(
        HuggingFaceDirectory(source), tmp_path / "out", ExportSpec(expert_layout=FUSED), dry_run=True, console=console
    )
    text = console.export_text()
    for line in (
        ["model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", "x12", "48x32", "transpose, stack",
         "layers/{i}/mlp/experts/gate/kernel", "x3", "4x32x48", "float32 -> bfloat16"],
        ["model.layers.{i}.mlp.experts.gate_up_proj", "x3", "4x96x32", "transpose, split",
         "layers/{i}/mlp/experts/gate/kernel", "x3", "4x32x48", "float32"],
    ):  # fmt: skip
        assert any(all(word in printed for word in line) for printed in text.splitlines()), line
    assert "60 tensors, 33 leaves" in text
    assert [child.name for child in tmp_path.iterdir()] == ["foreign"]


def test_existing_targets_are_refused(tmp_path: pathlib.Path):
    source = write_checkpoint(tmp_path / "foreign", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    (tmp_path / "out").mkdir()
    for command in (
        lambda: convert(source, tmp_path / "out", console=QUIET),
        lambda: export(HuggingFaceDirectory(source), tmp_path / "out", console=QUIET),
    ):
        with pytest.raises(InputError, match="out already exists"):
            command()
    assert not any((tmp_path / "out").iterdir())


def test_nothing_unknown_is_published(tmp_path: pathlib.Path):
    """Links and stray files in a model directory, one of them with the name of what is written."""
    write_checkpoint(tmp_path / "foreign", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    (tmp_path / "foreign" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "foreign", tmp_path / "ours", console=QUIET)
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "expected", console=QUIET)
    (tmp_path / "secret").write_text("of nobody's business")
    for name in ("notes", "model.safetensors", "config.yaml"):
        (tmp_path / "ours" / name).symlink_to(tmp_path / "secret")
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "back", console=QUIET)
    assert content_of(tmp_path / "back") == content_of(tmp_path / "expected")
    (tmp_path / "ours" / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="vocab.txt is .* to .*secret, outside"):
        export(ModelDirectory(tmp_path / "ours"), tmp_path / "third", console=QUIET)
    assert not list(tmp_path.glob("*third*"))


def test_a_disk_that_is_full_from_the_start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    source = write_checkpoint(tmp_path / "foreign", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    usage = dataclasses.make_dataclass("Usage", ["free"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1000))
    for command in (
        lambda: convert(source, tmp_path / "out", console=QUIET),
        lambda: export(HuggingFaceDirectory(source), tmp_path / "out", console=QUIET),
    ):
        with pytest.raises(InputError, match="takes .* kB, but .* has 1.0 kB free"):
            command()
    assert [child.name for child in tmp_path.iterdir()] == ["foreign"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_shard_size": "5XB"}, "--max-shard-size '5XB': expected bytes, such as 12GB, 800MB or 1.5GiB"),
        ({"max_shard_size": "0"}, "--max-shard-size '0': expected bytes"),
        ({"expert_layout": "fuse"}, "unknown expert layout 'fuse' (did you mean 'fused'?)"),
        ({"dense_layers": "drop"}, "dense layers 'drop'"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
    ],
)
def test_bad_options(llama: pathlib.Path, options: dict, expected: str):
    with pytest.raises(InputError) as error:
        export(HuggingFaceDirectory(llama), llama.parent / "out", ExportSpec(**options), console=QUIET)
    assert expected in str(error.value)


def test_keys_to_ignore_come_from_the_command_line_or_as_a_list():
    assert ConvertSpec().ignored_keys == () == ConvertSpec(ignore_keys=[]).ignored_keys
    for keys in ("one,other", ["one", "other"]):
        assert ConvertSpec(ignore_keys=keys).ignored_keys == ("one", "other")
    assert ConvertSpec(ignore_keys="one").ignored_keys == ("one",)


def test_files_that_somebody_else_has_written_into_are_not_published():
    place = pathlib.Path("model.safetensors")
    tensors = {"a": PlannedTensor("F32", (2,)), "b": PlannedTensor("F32", (2,))}
    found = {name: TensorEntry(place, tensor.dtype, tensor.shape, 0, None) for name, tensor in tensors.items()}
    _check_planned(found, tensors)
    for other, named in (
        (found | {"b": found["b"]._replace(dtype="F16")}, "^b is"),
        (found | {"a": found["a"]._replace(shape=(1, 2))}, "^a is"),
        (found | {"c": found["a"]}, "^c is"),
        ({"a": found["a"]}, "^a tensor is"),
    ):
        with pytest.raises(InputError, match=f"{named} not what"):
            _check_planned(other, tensors)


def test_a_model_directory_is_not_converted_again(llama: pathlib.Path, tmp_path: pathlib.Path):
    convert(llama, tmp_path / "ours", console=QUIET)
    with pytest.raises(InputError, match="Hugging Face directory"):
        convert(tmp_path / "ours", tmp_path / "again", console=QUIET)


def test_shards_are_filled_in_order():
    tensors = {name: PlannedTensor("F32", (n,)) for name, n in {"a": 2, "b": 2, "c": 9, "d": 1, "e": 1}.items()}
    assert plan_shards(tensors, 16) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }
    assert plan_shards(tensors, 1000) == {"model.safetensors": list(tensors)}


def test_stories(data_dir: pathlib.Path, tmp_path: pathlib.Path):
    """A real pretrained model: tensors, config and tokenizer come back as they were."""
    foreign = data_dir / "weights" / "stories260K" / "hf"
    convert(foreign, tmp_path / "ours", console=QUIET)
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "back", console=QUIET)
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(foreign))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (foreign, tmp_path / "back"))
    assert after == {**before, "rope_scaling": None}
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (foreign / "tokenizer.json").read_bytes()
