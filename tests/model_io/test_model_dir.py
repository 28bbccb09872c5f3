import json
import os
import pickle
import shutil
import signal

import jax
import ml_dtypes
import numpy as np
import pytest

from moe_jax.checkpoints.leaf_files import LeafWriter
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh
from moe_jax.model_io import loading
from moe_jax.model_io.lineage import new_lineage_entry, read_lineage
from moe_jax.model_io.loading import leaf_specs, load_model, model_leaves
from moe_jax.model_io.model_dir import ModelDirectory, ModelDirectoryWriter, is_model_directory
from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from tests.support.disks import run_python, small_disk
from tests.support.tiers import one_in

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
DENSE = LayerConfig(attention=ATTENTION, mlp=FFNConfig(dim=48))
MOE = MoEConfig(expert=FFNConfig(dim=48), num_experts=4, top_k=2, bank=BankConfig(kind="low-rank", rank=2))
CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    d_model=32,
    max_positions=64,
    layers=(DENSE, LayerConfig(attention=ATTENTION, mlp=MOE)) * 2,
    foreign={"kept": [1, {"as": "is"}]},
)
ENTRY = {"command": "test", "options": {"seed": 0}, "sources": []}


@pytest.fixture(scope="module")
def leaves() -> dict[str, np.ndarray]:
    """Random bits, part of them as bfloat16."""
    rng = np.random.default_rng(0)
    dtypes = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
    made = {}
    for i, (path, spec) in enumerate(leaf_specs(CONFIG).items()):
        dtype = dtypes[i % 2]
        made[path] = rng.integers(0, 128, spec.size * dtype.itemsize, np.uint8).view(dtype).reshape(spec.shape)
    return made


def write(dst, leaves, *, lineage=(ENTRY,), files=(), config=CONFIG, resume=False) -> None:
    with ModelDirectoryWriter(dst, config, tokenizer_files=files, lineage=lineage, resume=resume) as writer:
        writer.write({path: leaf for path, leaf in leaves.items() if path not in writer.done})


def test_a_model_comes_back_as_it_was(tmp_path, leaves):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(b'{"\xc3\xa9": 1}\n')
    write(tmp_path / "model", leaves, files=[tokenizer])
    model = ModelDirectory(tmp_path / "model")
    assert is_model_directory(tmp_path / "model")
    assert model.config == CONFIG and model.config.foreign == CONFIG.foreign
    assert model.specs().keys() == leaves.keys()
    for path, leaf in leaves.items():
        assert model.read(path).dtype == leaf.dtype and model.read(path).tobytes() == leaf.tobytes()
    assert [file.name for file in model.tokenizer_files] == ["tokenizer.json"]
    assert model.tokenizer_files[0].read_bytes() == tokenizer.read_bytes()
    assert read_lineage(tmp_path / "model") == [ENTRY]
    assert sorted(os.listdir(tmp_path)) == ["model", "tokenizer.json"]


def test_the_decoder_can_be_loaded_from_it(tmp_path, leaves):
    write(tmp_path / "model", leaves)
    decoder = load_model(ModelDirectory(tmp_path / "model"), param_dtype="float32")
    assert sum(leaf.size for leaf in jax.tree.leaves(decoder)) == sum(leaf.size for leaf in leaves.values())


@one_in(2, first=1)
@pytest.mark.parametrize("axes", [None, {"fsdp": 2, "expert": 4}])
def test_layers_are_stacked_and_taken_apart_on_the_host_as_on_the_device(tmp_path, leaves, monkeypatch, axes):
    write(tmp_path / "model", leaves)
    mesh = None if axes is None else make_mesh(axes)
    on_host = load_model(ModelDirectory(tmp_path / "model"), mesh=mesh)
    taken_apart = dict(model_leaves(on_host))
    assert isinstance(taken_apart["layers/0/mlp/up/kernel"], np.ndarray)
    monkeypatch.setattr(loading, "_ON_HOST", 0)
    on_device = load_model(ModelDirectory(tmp_path / "model"), mesh=mesh)
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(on_device), jax.tree.leaves(on_host), strict=True
    ):
        assert leaf.sharding == other.sharding and leaf.dtype == other.dtype, path
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes(), path
    for path, leaf in model_leaves(on_device):
        assert np.asarray(leaf).tobytes() == np.asarray(taken_apart[path]).tobytes(), path
        assert leaf.shape == taken_apart[path].shape, path


def test_measured_figures_can_be_added_until_the_end(tmp_path, leaves):
    write(tmp_path / "first", leaves)
    source = ModelDirectory(tmp_path / "first")
    entry = new_lineage_entry("next", {"dst": tmp_path}, [source, tmp_path / "first" / "config.json"])
    lineage = [*read_lineage(tmp_path / "first"), entry]
    with ModelDirectoryWriter(tmp_path / "second", CONFIG, tokenizer_files=[], lineage=lineage) as writer:
        writer.write(leaves)
        writer.lineage[-1]["measured"]["error"] = 0.25
    first, second = read_lineage(tmp_path / "second")
    assert first == ENTRY
    assert second["measured"] == {"error": 0.25} and second["options"] == {"dst": str(tmp_path)}
    assert second["versions"].keys() >= {"moe_jax", "jax", "flax"}
    assert second["sources"][0]["fingerprint"] == source.fingerprint()


def test_an_existing_target_is_refused_and_untouched(tmp_path, leaves):
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match="already exists; choose"):
        write(tmp_path / "model", leaves)
    assert os.listdir(tmp_path) == ["model"] and not os.listdir(tmp_path / "model")


def test_a_missing_tokenizer_file_is_found_before_anything_is_written(tmp_path, leaves):
    with pytest.raises(InputError, match="tokenizer.json is not there"):
        write(tmp_path / "model", leaves, files=[tmp_path / "tokenizer.json"])
    assert not os.listdir(tmp_path)


def test_an_error_leaves_nothing_behind(tmp_path, leaves):
    with pytest.raises(RuntimeError, match="in the middle"):
        with ModelDirectoryWriter(tmp_path / "model", CONFIG, tokenizer_files=[], lineage=[ENTRY]) as writer:
            writer.write(leaves)
            raise RuntimeError("in the middle")
    assert not os.listdir(tmp_path)


def test_a_model_without_all_its_leaves_never_appears(tmp_path, leaves):
    some = dict(leaves)
    del some["layers/1/mlp/experts/delta/up/a"]
    with pytest.raises(ValueError, match="1 leaves .* is layers/1/mlp/experts/delta/up/a"):
        write(tmp_path / "model", some)
    with pytest.raises(ValueError, match="part of the"):
        write(tmp_path / "model", {"layers/9/mlp/up/kernel": np.ones((32, 48))})
    with pytest.raises(ValueError, match=r"has shape \(48, 32\), the config says \(32, 48\)"):
        write(tmp_path / "model", {"layers/0/mlp/up/kernel": np.ones((48, 32))})
    assert not os.listdir(tmp_path)


def test_what_a_killed_command_left_is_replaced(tmp_path, leaves):
    stale = tmp_path / ".model.partial"
    (stale / "params").mkdir(parents=True)
    (stale / "config.json").write_text("half")
    write(tmp_path / "model", leaves)
    assert os.listdir(tmp_path) == ["model"] and ModelDirectory(tmp_path / "model").config == CONFIG


def test_two_commands_cannot_write_one_target(tmp_path, leaves):
    with ModelDirectoryWriter(tmp_path / "model", CONFIG, tokenizer_files=[], lineage=[ENTRY]) as writer:
        with pytest.raises(InputError, match="command is writing"):
            write(tmp_path / "model", leaves)
        writer.write(leaves)
    assert ModelDirectory(tmp_path / "model").specs().keys() == leaves.keys()


KILLED = """
import os, pickle, signal, sys
from pathlib import Path
from moe_jax.model_io.model_dir import ModelDirectoryWriter
from tests.support.tiers import one_in

config, lineage, leaves = pickle.loads(Path(sys.argv[2]).read_bytes())
with ModelDirectoryWriter(Path(sys.argv[1]), config, tokenizer_files=[], lineage=lineage, resume=True) as writer:
    for number, (path, leaf) in enumerate(leaves.items()):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        writer.write({path: leaf})
"""


@pytest.fixture(scope="module")
def left_by_a_kill(tmp_path_factory, leaves):
    """A folder with what is left of a command that was killed after five leaves."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "job").write_bytes(pickle.dumps((CONFIG, [ENTRY], leaves)))
    ran = run_python(KILLED, folder / "model", folder / "job")
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert not (folder / "model").exists()
    assert not is_model_directory(folder / ".model.partial")
    return folder


@pytest.fixture
def killed(left_by_a_kill, tmp_path):
    """A target whose command was killed after five leaves."""
    return shutil.copytree(left_by_a_kill, tmp_path / "folder") / "model"


def done_of(dst, lineage) -> frozenset[str]:
    with pytest.raises(ZeroDivisionError):
        with ModelDirectoryWriter(dst, CONFIG, tokenizer_files=[], lineage=lineage, resume=True) as writer:
            done = writer.done
            raise ZeroDivisionError
    return done


def test_the_same_job_goes_on_where_it_was_killed(killed, leaves):
    # Dates and measured figures differ between two runs of the same job.
    again = [ENTRY | {"date": "later", "measured": {"seconds": 3}}]
    assert done_of(killed, again) == frozenset(list(leaves)[:5])
    write(killed, leaves, lineage=again, resume=True)
    model = ModelDirectory(killed)
    assert all(model.read(path).tobytes() == leaf.tobytes() for path, leaf in leaves.items())
    assert read_lineage(killed) == again


def test_a_job_that_is_interrupted_twice_goes_on_twice(killed, leaves):
    again = [ENTRY | {"date": "2026-01-02T00:00:00+00:00"}]
    with pytest.raises(KeyboardInterrupt):
        with ModelDirectoryWriter(killed, CONFIG, tokenizer_files=[], lineage=again, resume=True) as writer:
            assert writer.done == frozenset(list(leaves)[:5])
            for path in list(leaves)[5:8]:
                writer.write({path: leaves[path]})
            raise KeyboardInterrupt
    begun = killed.with_name(".model.partial") / "params" / "state"
    (begun / list(leaves)[7].replace("/", ".") / ".zarray").write_bytes(b"")  # as a kill may leave it
    assert done_of(killed, again) == frozenset(list(leaves)[:7])
    write(killed, leaves, lineage=again, resume=True)
    model = ModelDirectory(killed)
    assert all(model.read(path).tobytes() == leaf.tobytes() for path, leaf in leaves.items())
    assert sorted(os.listdir(killed)) == ["config.json", "lineage.json", "params"]
    assert sorted(os.listdir(killed.parent)) == ["job", "model"]


def test_files_that_the_source_has_no_more_are_not_left(killed, leaves):
    """Such as a template that was removed because it was wrong."""
    stale = killed.with_name(".model.partial") / "chat_template.jinja"
    stale.write_text("{{ messages }}")
    write(killed, leaves, lineage=[ENTRY], resume=True)
    assert sorted(os.listdir(killed)) == ["config.json", "lineage.json", "params"]


def test_another_job_does_not_go_on_with_it(killed):
    assert done_of(killed, [ENTRY | {"options": {"seed": 1}}]) == frozenset()


def test_notes_are_there_until_the_directory_is_whole(tmp_path, leaves):
    def begin(lineage):
        return ModelDirectoryWriter(tmp_path / "model", CONFIG, tokenizer_files=[], lineage=lineage, resume=True)

    with pytest.raises(ZeroDivisionError):
        with begin([ENTRY]) as writer:
            writer.note("3", {"error": 0.5})
            writer.note("3", {"error": 0.25})
            raise ZeroDivisionError
    with begin([ENTRY]) as writer:
        assert writer.notes(["3", "4"]) == {"3": {"error": 0.25}}
        writer.write(leaves)
    assert sorted(os.listdir(tmp_path / "model")) == ["config.json", "lineage.json", "params"]


def test_what_cannot_be_gone_on_with_is_removed(tmp_path, leaves):
    with pytest.raises(InputError):
        with ModelDirectoryWriter(tmp_path / "m", CONFIG, tokenizer_files=[], lineage=[ENTRY], resume=True) as writer:
            writer.write(leaves)
            raise InputError("weights that will be no better next time")
    assert not os.listdir(tmp_path)


def test_stored_bytes_are_those_of_the_files(tmp_path, leaves):
    write(tmp_path / "model", leaves)
    model = ModelDirectory(tmp_path / "model")
    for path, leaf in leaves.items():
        assert leaf.nbytes < model.stored_bytes(path) < leaf.nbytes + 1000
    files = sum(file.stat().st_size for file in (tmp_path / "model" / "params").rglob("*") if file.is_file())
    assert 0 < files - sum(map(model.stored_bytes, leaves)) < 50_000


def test_fingerprint_is_that_of_the_content(tmp_path, leaves):
    path = "layers/0/mlp/up/kernel"
    changed = leaves[path].copy()
    changed[3, 4] += 1
    write(tmp_path / "a", leaves)
    write(tmp_path / "same", leaves, lineage=[ENTRY, ENTRY])
    write(tmp_path / "changed", leaves | {path: changed})
    one, same, other = (ModelDirectory(tmp_path / name).fingerprint() for name in ("a", "same", "changed"))
    assert one == same != other


def test_broken_directories_are_named(tmp_path, leaves):
    assert not is_model_directory(tmp_path)
    with pytest.raises(FileNotFoundError, match="model directory"):
        ModelDirectory(tmp_path)
    write(tmp_path / "model", leaves)
    config = tmp_path / "model" / "config.json"
    whole = config.read_text()
    config.write_text(whole[:50])
    with pytest.raises(InputError, match="config.json is not valid JSON"):
        ModelDirectory(tmp_path / "model")
    config.write_text(json.dumps(json.loads(whole) | {"vocab_sise": 3}))
    with pytest.raises(InputError, match="unknown key 'vocab_sise'.*did you mean 'vocab_size'"):
        ModelDirectory(tmp_path / "model")
    config.write_text(json.dumps({"model_type": "llama"}))
    assert not is_model_directory(tmp_path / "model")
    (tmp_path / "model" / "lineage.json").write_text("{}")
    with pytest.raises(InputError, match="list of entries"):
        read_lineage(tmp_path / "model")


def test_a_full_disk_leaves_nothing_behind(tmp_path, leaves, monkeypatch):
    config = ModelConfig(family="llama", vocab_size=1 << 15, d_model=32, max_positions=64, layers=CONFIG.layers)
    large = {path: np.ones(spec.shape, spec.dtype) for path, spec in leaf_specs(config).items()}
    with small_disk(tmp_path / "disk", 3) as disk:
        with pytest.raises(OSError, match="left on device"):
            write(disk / "model", large, config=config)
        assert not os.listdir(disk)


@pytest.mark.parametrize("name", ["run[1]", "a*b", "[!x]?"])
def test_paths_are_no_patterns(tmp_path, leaves, name, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    write("model", leaves)
    assert ModelDirectory("model").specs().keys() == leaves.keys()
    write(tmp_path / name / name, leaves)
    model = ModelDirectory(tmp_path / name / name)
    assert all(model.read(path).tobytes() == leaf.tobytes() for path, leaf in leaves.items())
    assert sorted(os.listdir()) == sorted([name, "model"])


def test_what_was_written_is_opened_before_it_appears(tmp_path, leaves, monkeypatch):
    close = LeafWriter.close

    def lose_a_leaf(writer):
        close(writer)
        file = writer._directory / "state" / "layers.0.mlp.up.kernel" / "0.0"
        file.write_bytes(file.read_bytes()[:-1])

    monkeypatch.setattr(LeafWriter, "close", lose_a_leaf)
    with pytest.raises(InputError, match=r"layers.0.mlp.up.kernel/0.0 has .* bytes, .* expected"):
        write(tmp_path / "model", leaves)
    assert not os.listdir(tmp_path)


def test_when_all_leaves_are_there_none_is_written_again(tmp_path, leaves, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("moe_jax.files.staging.Workplace.complete", lambda *_: (_ for _ in ()).throw(OSError(5, "gone")))
        with pytest.raises(OSError, match="gone") as failed:
            write(tmp_path / "model", leaves, resume=True)
    (note,) = failed.value.__notes__
    assert note.startswith("what is done so far is kept: the same command goes on from there, and ")
    assert note.endswith(f"and moe-jax clean {tmp_path / 'model'} removes it")
    monkeypatch.setattr(LeafWriter, "_write_chunks", lambda *_: pytest.fail("written again"))
    write(tmp_path / "model", leaves, resume=True)
    model = ModelDirectory(tmp_path / "model")
    assert all(model.read(path).tobytes() == leaf.tobytes() for path, leaf in leaves.items())


def test_only_known_files_go_with_a_model(tmp_path, leaves):
    write(tmp_path / "model", leaves)
    (tmp_path / "secret").write_text("of nobody's business")
    for name in ("notes", "model.safetensors", "README.md"):
        (tmp_path / "model" / name).symlink_to(tmp_path / "secret")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "vocab.json").symlink_to("tokenizer.json")
    model = ModelDirectory(tmp_path / "model")
    assert [file.name for file in model.tokenizer_files] == ["tokenizer.json", "vocab.json"]
    (tmp_path / "model" / "merges.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="merges.txt is .* to .*secret, outside of .*model; put .* there"):
        _ = model.tokenizer_files


def _broken_metadata():
    yield ".zarray", lambda content: b"", "is not valid JSON"
    yield ".zarray", lambda content: content[: len(content) // 2], "is not valid JSON"
    yield ".zarray", lambda content: b"[]", "expected an object"
    yield ".zarray", lambda content: content.replace(b"32,", b"-32,"), "is damaged"
    yield ".zarray", lambda content: content.replace(b"32,", b"1e300,"), "is damaged"
    yield ".zarray", lambda content: content.replace(b'"<f4"', b'"|O"'), "is damaged"
    yield ".zarray", lambda content: content.replace(b"32,", b"31,"), r"has shape \(31, 48\), config.json says"
    yield ".zarray", None, "is missing"
    yield "_METADATA", lambda content: content.replace(b"key_metadata", b"key_metadat0"), "is damaged"
    yield "_METADATA", lambda content: content.replace(b'"up"', b'"../up"'), "is damaged"
    yield "_METADATA", None, "is not a complete Orbax checkpoint"


@pytest.mark.parametrize("file, change, message", list(_broken_metadata()))
def test_damaged_metadata_names_the_file(tmp_path, leaves, file, change, message):
    write(tmp_path / "model", leaves)
    state = tmp_path / "model" / "params" / "state"
    path = state / "layers.0.mlp.up.kernel" / file if file == ".zarray" else state / file
    if change is None:
        path.unlink()
    else:
        changed = change(path.read_bytes())
        assert changed != path.read_bytes()
        path.write_bytes(changed)
    with pytest.raises(InputError, match=message) as refused:
        ModelDirectory(tmp_path / "model").specs()
    assert file in str(refused.value) or "layers/0/mlp/up/kernel" in str(refused.value)


def test_a_directory_that_is_replaced_while_it_is_read_is_still_read_whole(tmp_path, leaves):
    write(tmp_path / "model", leaves)
    write(tmp_path / "other", {path: np.zeros_like(leaf) for path, leaf in leaves.items()}, lineage=[])
    model, opened = ModelDirectory(tmp_path / "model"), ModelDirectory(tmp_path / "model")
    assert opened.specs()  # one has begun with the weights, the other has not
    (tmp_path / "model").rename(tmp_path / "gone")
    (tmp_path / "other").rename(tmp_path / "model")
    for one in (model, opened):
        assert all(one.read(path).tobytes() == leaf.tobytes() for path, leaf in leaves.items())
        assert one.lineage == [ENTRY] and one.fingerprint() == ModelDirectory(tmp_path / "gone").fingerprint()
        with pytest.raises(InputError, match="replaced while"):
            _ = one.tokenizer_files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "list of entries"),
        ('[{"command": 5}]', "lineage.json, entry 0: command is 5"),
        ('[{"command": "a"}, {"command": "a", "options": [], "measured": 1}]', "entry 1: 2 problems"),
        ('[{"command": "a", "sources": [{"path": 1, "fingerprint": "x"}]}]', "entry 0: a source is {'path': 1"),
        ('[{"command": "a", "sources": ["' + "x" * 100_000 + '"]}]', "entry 0: a source is 'xxx"),
        ("[" * 50_000, "lineage.json is nested more than 100 levels deep"),
    ],
)
def test_a_lineage_that_is_none_is_refused(tmp_path, content, message):
    (tmp_path / "lineage.json").write_text(content)
    with pytest.raises(InputError) as error:
        read_lineage(tmp_path)
    assert message in str(error.value) and len(str(error.value)) < 400


def test_a_lineage_may_hold_figures_that_are_not_finite(tmp_path):
    (tmp_path / "lineage.json").write_text('[{"command": "a", "measured": {"x": NaN, "y": 1000000000000000000000}}]')
    assert read_lineage(tmp_path)[0]["measured"]["y"] == 10**21
