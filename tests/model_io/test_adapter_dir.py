import json
import shutil

import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.functional.codes import quantize_nf4
from moe_jax.model_io.adapter_dir import AdapterDirectory, AdapterDirectoryWriter
from moe_jax.model_io.lineage import read_lineage
from moe_jax.model_io.loading import check_leaves, leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.tuned_base import base_config, own_leaves
from moe_jax.peft.adapt import initial_leaves
from tests.support.dense_models import random_leaves, write_model
from tests.support.tuned_models import FFN, model, tuned_and_base

TUNED, BASE = tuned_and_base()["PESC"]
ENTRY = {"command": "adapt", "options": {}, "sources": []}


def write_base(path, config=BASE, seed=0):
    leaves = {name: leaf + np.float32(seed) for name, leaf in random_leaves(config).items()}
    (path.parent / "tokenizer.json").write_text("{}")
    return write_model(path, config, leaves, (path.parent / "tokenizer.json",))


def write_adapter(path, base, config=TUNED, seed=0, **options):
    source = open_source(base)
    files = source.tokenizer_files
    with AdapterDirectoryWriter(
        path, config, base=source, tokenizer_files=files, lineage=[*read_lineage(source.path), ENTRY], **options
    ) as writer:
        for name, leaf in initial_leaves(config, seed):
            writer.write({name: leaf})
        for name in options.get("trained", ()):
            writer.write({name: np.full(leaf_specs(config)[name].shape, 0.5, np.float32)})
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with `base`, and `one` and `two` that stand on it."""
    folder = tmp_path_factory.mktemp("adapters")
    write_base(folder / "base")
    write_adapter(folder / "one", folder / "base")
    write_adapter(folder / "two", folder / "base", seed=1, trained=("final_norm/scale", "layers/0/mlp_norm/scale"))
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(written, tmp_path / "copy")


@pytest.fixture
def failing(capsys):
    """Runs a command that must fail with one line, which it returns."""

    def check(*arguments) -> str:
        capsys.readouterr()
        assert cli.main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("moe-jax: error: ") and err.count("\n") == 1
        return err

    return check


def test_it_is_the_whole_model(written):
    base, source = ModelDirectory(written / "base"), open_source(written / "one")
    assert isinstance(source, AdapterDirectory) and source.config == TUNED and source.base.path == written / "base"
    check_leaves(leaf_specs(TUNED), source.specs(), "one")
    for path, spec in source.specs().items():
        leaf = source.read(path)
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype), path
    for below in ("up/bias", "down/bias"):
        shared = source.read(f"layers/0/mlp/experts/base/{below}")
        assert shared.tobytes() == base.read(f"layers/0/mlp/{below}").tobytes()
    for tuned, kernel in {"mlp/experts/base/up": "mlp/up", "attention/q": "attention/q"}.items():
        for name, leaf in quantize_nf4(base.read(f"layers/0/{kernel}/kernel")).items():
            assert source.read(f"layers/0/{tuned}/nf4/{name}").tobytes() == np.asarray(leaf).tobytes()
    for path, leaf in initial_leaves(TUNED, 0):
        assert source.read(path).tobytes() == leaf.tobytes()


def test_only_what_the_base_has_not_is_stored(written):
    one, two = open_source(written / "one"), open_source(written / "two")
    assert one.own_specs().keys() == own_leaves(TUNED)
    assert two.own_specs().keys() - one.own_specs().keys() == {"final_norm/scale", "layers/0/mlp_norm/scale"}
    assert two.read("final_norm/scale")[0] == 0.5 != one.read("final_norm/scale")[0]
    assert sorted(path.name for path in one.path.iterdir()) == [
        "adapter",
        "base.json",
        "config.json",
        "lineage.json",
        "tokenizer.json",
    ]
    assert [file.name for file in one.tokenizer_files] == ["tokenizer.json"]
    assert [entry["command"] for entry in read_lineage(one.path)] == ["test", "adapt"]
    # What all leaves take on the disk is what lies there, here and in the base; but for files beside the leaves.
    stored = sum(map(one.stored_bytes, one.specs()))
    own = sum(map(one.stored_bytes, one.own_specs()))
    base = ModelDirectory(written / "base")
    assert stored == own + sum(map(base.stored_bytes, base.specs())) and own > 0


def test_fingerprints_are_of_base_config_and_own_leaves(written, tmp_path):
    one = open_source(written / "one").fingerprint()
    assert one == open_source(shutil.copytree(written / "one", tmp_path / "again")).fingerprint()
    assert one != open_source(written / "two").fingerprint()
    others = [write_base(tmp_path / "shifted", seed=1), write_base(tmp_path / "dense")]
    shifted = open_source(write_adapter(tmp_path / "a", others[0])).fingerprint()
    assert one != shifted
    assert one == open_source(write_adapter(tmp_path / "b", others[1])).fingerprint()


def refer(adapter, **changed):
    """Changes base.json. Without "absolute" the base is not found where it was when the adapter was written."""
    reference = json.loads((adapter / "base.json").read_text())
    (adapter / "base.json").write_text(json.dumps({**reference, "absolute": None, **changed}))


def test_each_can_be_moved_alone_and_both_together(folder, tmp_path):
    absolute = str(folder / "base")
    refer(folder / "one", absolute=absolute)
    alone = shutil.move(folder / "one", tmp_path / "deep" / "down" / "one")
    assert open_source(alone).base.path == folder / "base"
    refer(folder / "two", absolute=str(folder / "gone"))
    shutil.move(folder / "base", tmp_path / "base")
    assert open_source(folder / "two", base=tmp_path / "base").base.path == tmp_path / "base"
    shutil.move(tmp_path / "base", folder / "base")
    together = shutil.move(folder, tmp_path / "together")
    assert open_source(together / "two").base.path == together / "base"


def test_a_moved_base_can_be_named_wherever_a_model_is_taken(folder, capsys, failing):
    for name in ("one", "two"):
        refer(folder / name)
    moved = shutil.move(folder / "base", folder / "elsewhere")
    (folder / "text").write_text("ab")
    assert "which is not there; say with --base where it is, put it back, or" in failing("inspect", folder / "one")
    for command in (
        ("inspect", folder / "one"),
        ("merge", folder / "one", folder / "merged", "--partly"),
    ):
        assert cli.main([*map(str, command), "--base", str(moved)]) == 0, command
    for command in (
        ("eval", folder / "one", "--text", folder / "text"),
        ("generate", folder / "one", "--prompt", "a"),
        ("export", folder / "one", folder / "hf"),
    ):
        # These get as far as the model; what is wrong then is another thing.
        assert "which is not there" not in failing(*command, "--base", moved)
    for command in (("upcycle", folder / "one", folder / "up"), ("compress", folder / "one", folder / "small")):
        flag = "--base" if command[0] == "upcycle" else "--model-base"
        more = () if command[0] == "upcycle" else ("--method", "drop")
        assert "which is not there" not in failing(*command, *more, flag, moved)


def test_both_can_be_moved(folder, tmp_path):
    shutil.move(folder / "base", folder / "elsewhere")
    refer(folder / "one", path="../elsewhere")
    moved = shutil.move(folder, tmp_path / "moved")
    assert open_source(moved / "one").read("final_norm/scale").any()
    assert open_source(moved / "two", base=moved / "elsewhere").base.path == moved / "elsewhere"


def test_a_missing_base_is_one_clear_line(folder, failing):
    refer(folder / "one", path="../gone")
    err = failing("inspect", folder / "one")
    assert f"stands on {folder}/gone, which is not there; say with --base where it is, put it back, or change " in err


def test_another_base_is_one_clear_line(folder, failing):
    other = write_base(folder / "other", seed=1)
    with pytest.raises(InputError, match="made for: its fingerprint"):
        open_source(folder / "one", base=other)
    refer(folder / "one", path="../other")
    err = failing("inspect", folder / "one")
    assert "--base where the old" in err


def test_a_config_of_another_model_is_one_clear_line(folder, failing):
    data = json.loads((folder / "one" / "config.json").read_text())
    (folder / "one" / "config.json").write_text(json.dumps({**data, "vocab_size": 41}))
    assert "does not describe adapters over" in failing("inspect", folder / "one")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "is not valid JSON"),
        ({"format": "something"}, "has no format 'moe_jax.adapter': it was not written by moe_jax"),
        ({"version": 2}, "has version 2, this library reads version 1"),
        ({"fingerprint": None}, "base.json: fingerprint: expected a string, got null"),
        ({"path": "../two"}, "an adapter directory itself; merge that first"),
    ],
)
def test_a_spoilt_reference_is_one_clear_line(change, message, folder, failing):
    file = folder / "one" / "base.json"
    broken = change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change)
    file.write_text(broken)
    assert message in failing("inspect", folder / "one")


def test_what_is_no_adapter_of_the_base_is_not_begun(written, tmp_path):
    with pytest.raises(InputError, match="adapters over"):
        write_adapter(tmp_path / "new", written / "base", config=model(FFN, frozen_base=True))
    with pytest.raises(InputError, match="adapter directory; merge"):
        write_adapter(tmp_path / "new", written / "one")
    with pytest.raises(InputError, match="already exists"):
        write_adapter(written / "two", written / "base")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_written_in_full_leaves_nothing(written, tmp_path):
    def begin():
        base = ModelDirectory(written / "base")
        return AdapterDirectoryWriter(tmp_path / "new", TUNED, base=base, tokenizer_files=(), lineage=[ENTRY])

    leaves = dict(initial_leaves(TUNED, 0))
    with pytest.raises(RuntimeError, match="in the middle"), begin() as writer:
        writer.write(leaves)
        raise RuntimeError("in the middle")
    with pytest.raises(ValueError, match="1 leaves were not"), begin() as writer:
        leaves.pop("layers/0/mlp/experts/adapters/up")
        writer.write(leaves)
    with pytest.raises(ValueError, match="not stored here"), begin() as writer:
        writer.write({"final_norm/scale": np.ones(16, np.float32)})
    assert list(tmp_path.iterdir()) == []


def test_inspect_tells_of_base_and_adapters(written, capsys):
    assert cli.main(["inspect", str(written / "one")]) == 0
    out = capsys.readouterr().out
    one = open_source(written / "one")
    own = sum(spec.size for spec in one.own_specs().values())
    assert f"stored here: {own:,} parameters" in out
    assert f"base: {written}/base ({one.base.fingerprint()[:12]})" in out
    assert "NF4 kernels in attention of layers/{0,1}" in out
    assert "LoRA beside the experts of layers/0: up, down; rank 3, scale 2, dropout 0" in out
    assert cli.main(["inspect", str(written / "one"), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["base"] == {"path": str(written / "base"), "fingerprint": one.base.fingerprint()}
    assert described["own"]["parameters"] == own and set(described["own"]["leaves"]) == own_leaves(TUNED)
    # A kernel counts the weights that it stands for.
    below = sum(spec.size for spec in leaf_specs(base_config(TUNED)).values())
    assert described["parameters"] == below + own
