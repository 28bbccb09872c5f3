"""Compiles the training step for an absent accelerator.

The step is the one that `loop` runs, here on abstract arrays: no weights are loaded or made.
"""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from moe_jax.core.data_sheets import chip_of_kind
from moe_jax.core.errors import InputError, first_line
from moe_jax.distributed.sharding import path_name
from moe_jax.models import ModelConfig
from moe_jax.planning.frozen_gradients import frozen_gradients
from moe_jax.planning.hlo import largest_arrays, sums_by_kind, transfers
from moe_jax.planning.planned_devices import described_devices, gpu_hosts, is_gpu
from moe_jax.planning.slice_names import topology_of
from moe_jax.planning.step_time import StateNumbers, step_roofline
from moe_jax.training.flops import batch_flops, picture_flops
from moe_jax.training.program import Program, abstract_batch, make_program
from moe_jax.training.recipe import Recipe

TIGHT = 0.9
"""A step should need no more than this share of a device's memory."""

# "Used 16.50G of 15.75G hbm", in the message of the TPU compiler.
_USED = re.compile(r"\bUsed ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_only(
    recipe: Recipe,
    config: ModelConfig,
    topology: str,
    *,
    pictures: int = 0,
    teacher: ModelConfig | None = None,
    largest: int = 3,
) -> dict[str, Any]:
    """Compiles the step of a recipe for a topology such as `v5e:4x4` or `h100:8`.

    There are so many `pictures` in every row; of a recipe with `data.feature_cache`, their features. `teacher` is the
    config of the model that the recipe's `distill` names, if it does. The compiled step and its bytes include the
    teacher's parameters and forward pass; `model_flops` and `estimate` do not.

    Returns:
      JSON-able: `topology`, `device_kind`, `chips`, `mesh`; per chip `bytes` (`arguments`, `outputs`, `aliased`,
      `temporaries`, `code`, `total`, `hbm`), `model_flops` (see `flops.py`; without the gradients of frozen kernels)
      and `compiler_flops` (which counts a loop over layers once); `fits`, None if the memory of a chip is unknown;
      so many `largest` arrays that the step makes, in words; `collectives` by kind with `count` and `bytes`, loops
      counted in full; and `estimate`, the least time of a step by data sheets (`StepRoofline`); None: the chip has
      no data sheet. With pictures also `tower_share`, of the model's operations.

    Raises:
      InputError: no compiler for the topology, an unknown one, a step that does not fit into the chips' memory, or a
        mesh that does not fit the slice.
    """
    topology = topology_of(topology)
    devices = described_devices(topology)
    features = pictures > 0 and recipe.data.feature_cache is not None
    program = make_program(recipe, config, devices, pictures=pictures, features=features, teacher=teacher)
    # The compiler dumps the program's text itself: `compiled.as_text()` cannot parse output of a newer compiler.
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = compiled_step(program, recipe, {"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except DoesNotFit as error:
            raise InputError(f"the step does not fit into {topology}: {error}{_named(error.largest)}") from None
        (text,) = Path(folder).glob(f"*.{'sm_*_gpu_' if is_gpu(topology) else ''}after_optimizations.txt")
        program_text = text.read_text("utf-8")
    sent, sizes = transfers(program_text), bytes_of(compiled)
    kind = devices[0].device_kind
    chip = chip_of_kind(kind)
    memory = None if chip is None else chip.memory
    model_flops = batch_flops(recipe, config, pictures=pictures, tower=program.tower_use) / len(devices)
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(program.state.params)]
    frozen = frozen_gradients(recipe, config, paths) / len(devices)
    roofline = None
    if chip is not None:
        per_host = gpu_hosts(topology)[1] if is_gpu(topology) else None
        roofline = step_roofline(
            recipe,
            config,
            chip,
            model_flops,
            StateNumbers.of(program),
            sizes["temporaries"],
            sent,
            len(devices),
            per_host,
            frozen,
        )._asdict() | {"source": chip.source}
    share: dict[str, float] = {}
    if pictures:
        in_step = recipe.train.batch_size * pictures
        of_tower = in_step * picture_flops(config).of_tower(program.tower_use) / len(devices)
        share = {"tower_share": of_tower / (model_flops - frozen)}
    return (
        {
            "topology": topology,
            "device_kind": kind,
            "chips": len(devices),
            "mesh": dict(program.mesh.shape),
            "bytes": sizes | {"hbm": memory},
            "fits": None if memory is None else sizes["total"] <= memory,
            "largest": largest_arrays(program_text, largest),
            "model_flops": model_flops - frozen,
            "compiler_flops": (compiled.cost_analysis() or {}).get("flops"),
            "collectives": {kind: counted._asdict() for kind, counted in sums_by_kind(sent).items()},
            "estimate": roofline,
        }
        | share
        | ({} if teacher is None else {"without_teacher": ["model_flops", "estimate"]})
    )


class DoesNotFit(Exception):
    """The compiler finds no room for the step in the memory of a device.

    `used` are the bytes that it would need, if the compiler says, and `largest` its largest arrays, each in words.
    """

    def __init__(self, message: str, used: int | None, largest: Sequence[str] = ()):
        super().__init__(message)
        self.used, self.largest = used, tuple(largest)


def compiled_step(program: Program, recipe: Recipe, options: dict[str, Any] | None = None) -> Compiled:
    """Compiles the step of a program for the devices of its mesh; `DoesNotFit` if these have too little memory."""
    with jax.set_mesh(program.mesh):
        batch = abstract_batch(
            recipe, program.config, program.mesh, pictures=program.pictures, features=program.features
        )
        step: Any = program.step
        lowered = step.lower(program.state, program.frozen, batch, *program.arguments)
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DoesNotFit(first_line(error), _used(str(error)), allocations(str(error))) from None


def bytes_of(compiled: Any) -> dict[str, int]:
    """Returns the bytes that a compiled program takes on every device.

    They are `arguments`, `outputs`, `aliased` (outputs that lie in the buffers of donated arguments, and count once in
    the total), `temporaries`, `code` and `total`.
    """
    memory = compiled.memory_analysis()
    assert memory is not None, "these compilers all say it"
    names = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporaries": "temp"}
    names["code"] = "generated_code"
    sizes = {name: getattr(memory, f"{what}_size_in_bytes") for name, what in names.items()}
    return sizes | {"total": sum(sizes.values()) - 2 * sizes["aliased"]}


def is_tight(used: int, memory: int) -> bool:
    """Whether so little of a device's memory is left that it may not suffice with another version of the compiler."""
    return used > TIGHT * memory


def print_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Prints the report of `compile_only`, as a table or as JSON and nothing else."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    sizes = report["bytes"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items())
    print(f"compiled for {report['topology']}: {report['chips']} chips ({report['device_kind']}), mesh {mesh}")
    print("bytes per chip:")
    for name in ("arguments", "outputs", "aliased", "temporaries", "code", "total"):
        print(f"  {name:12} {sizes[name] / 2**30:9.3f} GiB")
    if sizes["hbm"]:
        print(f"  {'memory':12} {sizes['hbm'] / 2**30:9.3f} GiB   {sizes['total'] / sizes['hbm']:.0%} used")
        if is_tight(sizes["total"], sizes["hbm"]):
            print(f"warning: more than {TIGHT:.0%} of the memory; another version of the compiler may need more")
    if "without_teacher" in report:
        print("the teacher is in these bytes and in the collectives, and not in the FLOPs and the estimate")
    print(f"model FLOPs per chip and step: {report['model_flops']:.3g}")
    print("collectives per step and chip, bytes of whole arrays:" if report["collectives"] else "no collectives")
    for name, found in report["collectives"].items():
        print(f"  {name:18} {found['count']:6} x {found['bytes'] / 2**20:12.1f} MiB")
    if estimate := report["estimate"]:
        links = "links not known" if estimate["links"] is None else f"links {1000 * estimate['links']:.3g}"
        print(
            f"estimate, at the peaks of data sheets: at least {1000 * estimate['seconds']:.3g} ms a step, at most "
            f"{estimate['utilisation']:.0%} utilisation, bound by {estimate['bound']}\n  milliseconds: matrix units "
            f"{1000 * estimate['matrix']:.3g}, memory {1000 * estimate['memory']:.3g}, {links}\n  {estimate['source']}"
        )


def check_fits(report: dict[str, Any]) -> None:
    """Raises `InputError` if the step that `compile_only` reports needs more than the memory of a chip."""
    if report["fits"] is False:
        sizes = report["bytes"]
        needed = f"{sizes['total'] / 2**30:.2f} GiB of the {sizes['hbm'] / 2**30:.2f} GiB of a chip"
        raise InputError(
            f"the step does not fit into {report['topology']}: it needs {needed}{_named(report['largest'])}"
        )


def _named(arrays: Sequence[str]) -> str:
    return f"; the largest arrays: {', '.join(arrays)}" if arrays else ""


def allocations(message: str, count: int = 3) -> list[str]:
    """Returns the largest arrays in a message of the TPU compiler: size, shape, and the operation that makes it."""
    found = []
    for part in re.split(r"\n\s*\d+\. Size: ", message)[1 : count + 1]:
        size, shape = part.split(None, 1)[0], re.search(r"Shape: (\w+\[[\d,]*\])", part)
        operation = re.search(r'op_name="([^"]*)"', part)
        made = " of " + "/".join(operation[1].split("/")[-3:]) if operation else ""
        found.append(f"{size} {shape[1] if shape else ''}{made}")
    return found


def _used(message: str) -> int | None:
    found = _USED.search(message)
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])
