"""A command with other beginnings of experts goes on after a full disk, and writes what it would have written."""

import os

import numpy as np
import pytest

from moe_jax.checkpoints.leaf_files import LeafWriter
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.upcycling import UpcycleSpec, upcycle
from moe_jax.upcycling.beginnings import Prompt
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.tiers import long

PROMPTS = [Prompt(np.array([1, 5, 7])), Prompt(np.array([2, 4, 30])), Prompt(np.array([6, 8]))]


@pytest.mark.parametrize("models", [pytest.param(0, marks=long), 3])
def test_it_goes_on_at_the_leaf(models, tmp_path, monkeypatch):
    config = dense_config()
    (tmp_path / "given").mkdir()
    leaves = random_leaves(config)
    sources = []
    for number in range(1 + models):
        scaled = {path: leaf * np.float32(1 + number / 10) for path, leaf in leaves.items()}
        sources.append(ModelDirectory(write_model(tmp_path / "given" / str(number), config, scaled)))
    models = [source.path for source in sources[1:]]
    how = {"noise": 0.1, "drop": 0.25, "granularity": 2, "experts_from": models, "experts": 3}
    spec = UpcycleSpec(**how, step0_check=False)

    def run(dst):
        upcycle(sources[0], dst, spec, experts_from=sources[1:], prompts=PROMPTS)

    def content(name):
        written = ModelDirectory(tmp_path / name)
        return {path: written.read(path).tobytes() for path in written.specs()}

    run(tmp_path / "undisturbed")
    saved, save = [], LeafWriter.write

    def full(writer, leaves):
        if len(saved) >= 12:
            raise OSError(28, "No space left on device", str(writer._directory))
        saved.extend(leaves)
        save(writer, leaves)

    with monkeypatch.context() as patch:
        patch.setattr(LeafWriter, "write", full)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [".out.partial", "given", "undisturbed"]
    again: list[str] = []
    monkeypatch.setattr(LeafWriter, "write", lambda writer, leaves: (again.extend(leaves), save(writer, leaves))[1])
    run(tmp_path / "out")
    assert content("out") == content("undisturbed")
    assert again and not set(again) & set(saved)
    assert sorted(os.listdir(tmp_path)) == ["given", "out", "undisturbed"]
