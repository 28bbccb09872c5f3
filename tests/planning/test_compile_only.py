"""The same step compiled for TPU chips that are not there; and collectives counted in the compiler's text."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import make_mesh
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, config_from_json
from moe_jax.planning.compile_only import print_report
from moe_jax.planning.hlo import Collectives, sums_by_kind, transfers
from moe_jax.planning.model_costs import training_memory
from moe_jax.training.flops import train_flops_per_token
from tests.support.environment import ROOT
from tests.support.training_models import FFN, config_of, moe, write_config

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which holds the TPU compiler, is not installed; there are wheels for Linux on x86 only",
)

# libtpu of JAX 0.12 does not compile collectives of parts of 32 numbers: a width of 128 on 4 chips.
WIDTH = 256

# Prints the code, output and errors of one command after another, each a topology and what it sets.
PROGRAM = """
import contextlib, io, json, sys
from moe_jax.commands.cli import main
ended = []
for topology, *overrides in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    arguments = ["train", "recipe.toml", "--compile-only", "--topology", topology, "--json"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*arguments, *(("--set", *overrides) if overrides else ())])
    ended.append((code, out.getvalue(), err.getvalue()))
print("ended", json.dumps(ended))
"""


def compile_for(folder, *commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """Runs commands in a process of their own: the environment has to be described before JAX is imported."""
    clean = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        env=clean | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.partition("ended ")[2])


@pytest.fixture(scope="module")
def ended(folder) -> list[tuple[int, str, str]]:
    """What cannot be compiled, and then what can."""
    return compile_for(folder, ("v5e:3x",), ("v5e:2x4", "mesh.fsdp=3"), ("v5e:2x4", "mesh.expert=2"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recipe whose model is a config.json alone, and no data."""
    folder = tmp_path_factory.mktemp("compiled")
    attention = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=WIDTH // 4)
    layer = LayerConfig(attention=attention, mlp=dataclasses.replace(moe(), expert=FFNConfig(dim=WIDTH, gated=False)))
    config = config_of(FFN, d_model=WIDTH, vocab_size=256, bos_id=None, eos_ids=())
    config = dataclasses.replace(config, layers=(layer,) * 2)
    write_config(folder / "config.json", config)
    (folder / "recipe.toml").write_text(
        'run_dir = "run"\n[model]\nconfig = "config.json"\ncompute_dtype = "bfloat16"\nremat = "full"\n'
        "[data]\nseq_len = 64\n[train]\nbatch_size = 16\n[mesh]\nfsdp = 4\nexpert = 4\n"
    )
    return folder


@needs_libtpu
def test_the_step_compiles_for_a_pod_slice(folder, ended):
    code, out, err = ended[-1]
    assert code == 0, err
    report = json.loads(out)
    assert report["chips"] == 8 and report["device_kind"] == "TPU v5 lite"
    assert report["mesh"] == {"data": 1, "fsdp": 4, "expert": 2, "sequence": 1, "tensor": 1}
    sizes = report["bytes"]
    # Parameters and two moments in float32, split over the chips, come in and go out in the same buffers.
    params = 2 * (4 * WIDTH * WIDTH + WIDTH * 4 + 4 * 2 * WIDTH * WIDTH + 2 * WIDTH) + 2 * 256 * WIDTH + WIDTH
    assert 3 * 4 * params / 8 < sizes["arguments"] < 3 * 4 * params / 4
    assert sizes["aliased"] > 0.9 * sizes["arguments"]
    assert sizes["arguments"] < sizes["total"] < sizes["hbm"] == 16 * 2**30
    kinds = report["collectives"]
    # Parameters are gathered over fsdp and tokens over expert; gradients and expert outputs are scattered back.
    assert kinds["all-gather"]["count"] > 0 and kinds["all-reduce"]["count"] > 0
    assert all(entry["bytes"] > 0 for entry in kinds.values())
    # What `plan --mesh` says without a compiler is the same; of a batch there are a few kilobytes.
    config = config_from_json(json.loads((folder / "config.json").read_text()), where="config.json")
    planned = training_memory(config, {"fsdp": 4, "expert": 2})
    assert planned.params + planned.optimizer == pytest.approx(sizes["arguments"], rel=0.1)
    assert report["model_flops"] == pytest.approx(train_flops_per_token(config, 64) * 64 * 16 / 8, rel=0.1)
    assert {path.name for path in folder.iterdir()} == {"config.json", "recipe.toml"}


@needs_libtpu
@pytest.mark.parametrize(
    ("number", "message"),
    [(0, "unknown topology 'v5e:3x', expected for example v5e:4x4"), (1, "does not fit 8 devices")],
)
def test_what_cannot_be_compiled_is_one_line(ended, number, message):
    code, out, err = ended[number]
    error = [line for line in err.splitlines() if line.startswith("moe-jax: error:")]
    assert (code, out) == (2, "") and len(error) == 1 and message in error[0]


@pytest.mark.parametrize(("total", "warned"), [(14.3, False), (14.5, True), (17.0, True)])
def test_a_chip_that_is_nearly_full_is_said(capsys, total, warned):
    sizes = {name: 0 for name in ("arguments", "outputs", "aliased", "temporaries", "code")}
    report = {"topology": "v5e:2x2", "chips": 4, "device_kind": "TPU v5 lite", "mesh": {"fsdp": 4}, "model_flops": 1.0}
    bytes_per_chip = sizes | {"total": int(total * 2**30), "hbm": 16 * 2**30}
    print_report(report | {"bytes": bytes_per_chip, "collectives": {}, "estimate": None}, as_json=False)
    assert ("warning: more than 90% of the memory" in capsys.readouterr().out) == warned


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    mesh = make_mesh({"fsdp": 8})
    split, whole = NamedSharding(mesh, P("fsdp", None)), NamedSharding(mesh, P())

    def scanned(x, kernels):
        def layer(x, kernel):
            return jax.lax.with_sharding_constraint(x @ jax.lax.with_sharding_constraint(kernel, P()), P()), None

        return jax.lax.scan(layer, x, kernels)[0]

    x = jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=whole)
    kernels = jax.ShapeDtypeStruct((5, 16, 16), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp", None)))
    with jax.set_mesh(mesh):
        text = jax.jit(scanned).lower(x, kernels).compile().as_text()
    assert sums_by_kind(transfers(text)) == {"all-gather": Collectives(5, 5 * 16 * 16 * 4)}

    rows = jax.ShapeDtypeStruct((16, 3), jnp.bfloat16, sharding=split)
    with jax.set_mesh(mesh):
        text = jax.jit(lambda x: x.sum(axis=0, dtype=jnp.float32)).lower(rows).compile().as_text()
    assert sums_by_kind(transfers(text)) == {"all-reduce": Collectives(1, 3 * 4)}


def test_the_tpu_compilers_way_of_writing_collectives_is_understood():
    text = """HloModule jit_step

%all-reduce-scatter.1 (input.1: bf16[512,256]) -> bf16[128,256] {
  %input.1 = bf16[512,256]{1,0} parameter(0)
  %all-reduce.7 = bf16[512,256]{1,0} all-reduce(%input.1), channel_id=4, to_apply=%add
  ROOT %slice = bf16[128,256]{1,0} dynamic-slice(%all-reduce.7), dynamic_slice_sizes={128,256}
}

%overlapped.1 (p: bf16[4,8]) -> bf16[16,8] {
  ROOT %all-gather.1 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=2, frontend_attributes={chain_id="3"}
}

%overlapped.2 (p: bf16[4,8]) -> bf16[16,8] {
  ROOT %all-gather.2 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=2, frontend_attributes={chain_id="3"}
}

%body (arg: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %fusion.1 = bf16[16,8]{1,0} fusion(%arg), kind=kCustom, calls=%overlapped.1
  %fusion.2 = bf16[16,8]{1,0} fusion(%arg), kind=kCustom, calls=%overlapped.2
  %fusion.3 = bf16[128,256]{1,0} fusion(%arg), kind=kCustom, calls=%all-reduce-scatter.1
  %sums = f32[64,2]{1,0:T(8,128)} fusion(%arg), kind=kLoop, calls=%sum
  %reduce_scatter.9 = f32[16,2]{1,0} reduce-scatter(%sums), channel_id=1, dimensions={0}, to_apply=%add
}

%condition (arg: (s32[], bf16[4,8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%counter, %bound), direction=LT
}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %while.1 = (s32[], bf16[4,8]) while(%tuple), condition=%condition, body=%body
  %start = (f32[10]{0}, f32[10]{0}, u32[], u32[]) collective-permute-start(%y), channel_id=1
  %done = f32[10]{0} collective-permute-done(%start)
}
"""
    assert sums_by_kind(transfers(text)) == {
        "all-gather": Collectives(6, 6 * 16 * 8 * 2),
        "reduce-scatter": Collectives(12, 6 * (512 * 256 * 2 + 64 * 2 * 4)),
        "collective-permute": Collectives(1, 40),
    }


RING = """HloModule jit_step

%ring (arg: (bf16[4,8], u32[])) -> (bf16[4,8], u32[]) {
  %two = u32[]{:T(128)} constant(2)
  %fifteen = u32[]{:T(128)} constant(15)
  %block = bf16[4,8]{1,0} get-tuple-element(%arg), index=0
  %one-way = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%block), channel_id=1
  %halfway = bf16[4,8]{1,0} collective-permute-done(%one-way)
  %further = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%halfway), channel_id=2
  %arrived = bf16[4,8]{1,0} collective-permute-done(%further)
  %number = u32[]{:T(128)} get-tuple-element(%arg), index=1
  %other = u32[] add(%number, %fifteen)
  %next = u32[]{:T(128)} add(%number, %two), metadata={op_name="dot_general"}
  ROOT %results = (bf16[4,8]{1,0}, u32[]{:T(128)}) tuple(%arrived, /*index=1*/%next)
}

%goes_on (arg: (bf16[4,8], u32[])) -> pred[] {
  %unused = u32[] constant(3)
  %bound = u32[]{:T(128)} constant(8), metadata={op_name="dot_general"}
  %counter = u32[]{:T(128)} get-tuple-element(%arg), index=1
  ROOT %lt = pred[]{:T(512)} compare(%counter, %bound), direction=LT
}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %while.1 = (bf16[4,8], u32[]) while(%tuple), condition=%goes_on, body=%ring
}
"""


@pytest.mark.parametrize(
    ("before", "after", "iterations"),
    [
        ("", "", 4),  # of two steps
        ("add(%number, %two)", "add(%number, %fifteen)", 1),
        ("add(%number, %two)", "add(%two, %fifteen)", 8),  # nothing is known of such a counter
        ("%two = u32[]{:T(128)} constant(2)", "%two = u32[]{:T(128)} constant(0)", 8),
        ("index=1\n  %other", "index=2\n  %other", 4),
        ("constant(8)", "constant(9)", 5),  # the last iteration is counted too
        ("compare(%counter, %bound)", "compare(%counter, %other)", 1),
    ],
)
def test_a_ring_of_the_tpu_compiler_counts_its_devices_and_not_by_ones(before, after, iterations):
    sent = sums_by_kind(transfers(RING.replace(before, after)))
    assert sent == {"collective-permute": Collectives(2 * iterations, 2 * iterations * 4 * 8 * 2)}
