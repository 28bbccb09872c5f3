"""Four processes that share a disk and a bucket: each reads and writes its own share of a model, and nothing twice;
compression too."""

import json
import os
import socket
import subprocess
import sys

import numpy as np

import moe_jax
from moe_jax.compression import compress, make_method
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.environment import COMPILER_FLAGS, ROOT
from tests.support.moe_models import memory_moe, same_weights
from tests.support.tiers import long

PROCESSES = 4

PROGRAM = """
import faulthandler, json, os, sys
faulthandler.dump_traceback_later(150, exit=True)  # a process that waits for the others for ever
from pathlib import Path
folder, index = Path(sys.argv[1]), int(sys.argv[3])
os.environ["MOE_JAX_DISTRIBUTED"] = f"localhost:{sys.argv[2]},4,{index}"
from moe_jax.distributed.processes import join_processes, leave_processes
join_processes()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from moe_jax.checkpoints.orbax_store import TrainingCheckpoints
from moe_jax.conversion import convert
from moe_jax.model_io.loading import load_model, model_leaves
from moe_jax.model_io.model_dir import ModelDirectory, ModelDirectoryWriter
from moe_jax.files.regular_files import traffic_so_far
from moe_jax.files.storage_path import as_path
from moe_jax.distributed.sharding import make_mesh

said, before = {}, traffic_so_far()
def step(name):
    global before
    now = traffic_so_far()
    said[name] = [(now - before).read, (now - before).written]
    before = now

convert(folder / "hf", folder / "converted")
step("convert")
source = ModelDirectory(folder / "converted")
said["one fourth"] = sum(spec.size * spec.dtype.itemsize for spec in source.specs().values()) / 4
places = [({"fsdp": 4}, folder / "saved-1"), ({"tensor": 2, "fsdp": 2}, as_path("gs://bucket/saved-2"))]
for axes, target in places:
    before = traffic_so_far()
    model = load_model(source, mesh=make_mesh(axes))
    step(f"load {axes}")
    with ModelDirectoryWriter(target, model.config, tokenizer_files=[], lineage=[{"command": "test"}]) as writer:
        for path, leaf in model_leaves(model):
            writer.write_sharded(path, leaf, np.dtype(np.float32))
    step(f"save {axes}")
    source = ModelDirectory(target)

from moe_jax.upcycling import UpcycleSpec, upcycle
spec = UpcycleSpec(experts=4, delta="low-rank:2", every=1, step0_check=False)
before = traffic_so_far()
upcycle(ModelDirectory(folder / "converted"), folder / "upcycled", spec)
step("upcycle")

from moe_jax.compression import compress, make_method
moe, targets = ModelDirectory(folder / "moe"), [folder / "small", as_path("gs://bucket/small")]
said["one fourth of the MoE"] = sum(map(moe.stored_bytes, moe.specs())) / 4
for target in targets:
    before = traffic_so_far()
    compress(moe, target, make_method("quantize", {"bits": 8}), described={"bits": 8})
    step(f"compress {target}")

rows, columns = (NamedSharding(make_mesh({"fsdp": 4}), P(*axes)) for axes in (["fsdp"], [None, "fsdp"]))
values = np.arange(64, dtype=np.float32).reshape(8, 8)
checkpoints = TrainingCheckpoints(as_path("gs://bucket/run"), keep=1)
for number in (1, 2):
    state = {"kernel": jax.make_array_from_callback((8, 8), rows, lambda at: values[at] + number)}
    checkpoints.save(number, state, {"position": number})
assert checkpoints.steps() == [2]
restored, extra = checkpoints.restore(2, {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=columns)})
(shard,) = restored["kernel"].addressable_shards
assert (np.asarray(shard.data) == values[shard.index] + 2).all() and extra == {"position": 2}
checkpoints.close()
(folder / f"said{index}").write_text(json.dumps(said))
leave_processes()
"""


def run(program, folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": COMPILER_FLAGS, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder), str(port), str(index)],
            stdout=open(folder / f"out{index}", "w"),
            stderr=open(folder / f"err{index}", "w"),
            env=environment,
        )
        for index in range(PROCESSES)
    ]
    codes = [process.wait() for process in started]
    return codes, [(folder / f"err{index}").read_text() for index in range(PROCESSES)]


@long
def test_each_process_reads_and_writes_its_share(bucket, tmp_path):
    config = dense_config(num_layers=4, d_model=64, dim=128, vocab_size=256)
    leaves = random_leaves(config)
    write_model(tmp_path / "dense", config, leaves)
    moe_jax.export(tmp_path / "dense", tmp_path / "hf")
    full = memory_moe(*[BankConfig()] * 4, shape={"d_model": 64, "dim": 128})
    write_model(tmp_path / "moe", full.config, full.leaves)
    codes, errors = run(PROGRAM, tmp_path)
    assert codes == [0] * PROCESSES, errors
    said = [json.loads((tmp_path / f"said{index}").read_text()) for index in range(PROCESSES)]
    shares = {name: said[0].pop(name) for name in ("one fourth", "one fourth of the MoE")}
    traffic = {name: [one[name] for one in said] for name in said[0]}
    for name, each in traffic.items():
        share = shares["one fourth of the MoE" if name.startswith("compress") else "one fourth"]
        reads, writes = zip(*each, strict=True)
        if name == "upcycle":
            # The first process has read all of it for its fingerprint. The embeddings are half a share of this model.
            assert sum(reads[1:]) <= 1.1 * (PROCESSES - 1) * share and max(reads[1:]) <= 1.3 * share
            assert max(writes) <= 1.3 * sum(writes) / PROCESSES
            continue
        if name.startswith("compress"):
            # A kernel is read once, for the mean and for the deltas. The first process has read the model, which is
            # small, for its fingerprint too.
            assert 0.9 * share <= max(reads[1:]) <= 1.1 * share and reads[0] <= (PROCESSES + 1.1) * share
            assert max(writes) <= 1.1 * sum(writes) / PROCESSES
            continue
        if not name.startswith("save"):
            assert 0.9 * share <= max(reads) <= 1.1 * share, name
        if not name.startswith("load"):
            assert 0.9 * share <= max(writes) <= 1.1 * share, name
    method = make_method("quantize", {"bits": 8})
    alone = compress(ModelDirectory(tmp_path / "moe"), tmp_path / "one", method, described={})
    for small in (tmp_path / "small", as_path("gs://bucket/small")):
        assert same_weights(tmp_path / "one", small)
        layers = ModelDirectory(small).lineage[-1]["measured"]["layers"]
        assert [layer["relative_error"] for layer in layers] == [layer.relative_error for layer in alone.layers]
    for saved in (tmp_path / "converted", tmp_path / "saved-1", as_path("gs://bucket/saved-2")):
        model = ModelDirectory(saved)
        for name, leaf in leaves.items():
            np.testing.assert_array_equal(model.read(name), leaf)
