"""Two processes that share a file system, as the hosts of a pod do."""

import os
import socket
import subprocess
import sys

from moe_jax.model_dir import ModelDirectory
from tests.conftest import COMPILER_FLAGS, ROOT

PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later(120, exit=True)  # a process that waits for the other for ever
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from pathlib import Path

folder, port, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, index)
from moe_jax.checkpoint import TrainingCheckpoints
from moe_jax.loading import leaf_specs
from moe_jax.model_dir import ModelDirectory, ModelDirectoryWriter
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig

layer = LayerConfig(attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8), mlp=FFNConfig(dim=24))
config = ModelConfig(family="llama", vocab_size=32, d_model=16, max_positions=64, layers=(layer,) * 2)
with ModelDirectoryWriter(folder / "model", config, tokenizer_files=[], lineage=[{"command": "test"}]) as writer:
    for path, spec in leaf_specs(config).items():
        writer.write({path: np.full(spec.shape, 3, spec.dtype)})
assert ModelDirectory(folder / "model").specs().keys() == leaf_specs(config).keys()

mesh = jax.make_mesh((2,), ("x",))
values = np.arange(16, dtype=np.float32).reshape(4, 4)
rows = NamedSharding(mesh, P("x"))
state = {"kernel": jax.make_array_from_callback((4, 4), rows, lambda at: values[at]), "key": jax.random.key(5)}
checkpoints = TrainingCheckpoints(folder / "run", keep=1)
for step in (1, 2):
    checkpoints.save(step, state, {"position": step})
assert checkpoints.steps() == [2]
columns = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(mesh, P(None, "x")))
restored, extra = checkpoints.restore(2, {"kernel": columns, "key": jax.eval_shape(lambda: jax.random.key(0))})
(shard,) = restored["kernel"].addressable_shards
assert (np.asarray(shard.data) == values[shard.index]).all() and shard.data.shape == (4, 2)
assert jax.random.key_data(restored["key"]).tolist() == [0, 5] and extra == {"position": 2}
checkpoints.close()
print("done")
"""


def test_two_processes_write_one_model_and_one_checkpoint(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": COMPILER_FLAGS, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(port), str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0 and out.splitlines()[-1] == "done", err
    model = ModelDirectory(tmp_path / "model")
    assert all((model.read(path) == 3).all() for path in model.specs())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]
