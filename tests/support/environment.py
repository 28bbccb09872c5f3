"""What tests and the processes that they start have in common: the root of the checkout, and flags of the compiler."""

import importlib.metadata
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]

# `make test-gpu` sets it to "cuda": Triton's kernels then run on the GPU, and elsewhere in the interpreter.
PLATFORM = os.environ.get("MOE_JAX_TEST_PLATFORM", "cpu")
INTERPRET = PLATFORM == "cpu"

# Test models are tiny: compiling them dominates. Unoptimised machine code compiles in half the time, and the older
# emitters of loops write far less of it; from 0.12 on there are the new ones alone, and a process ends at once, without
# a word, for a flag that its XLA does not know. A worker has one core: programs split for several are only more work.
# And in the order that favours concurrency, collectives of eight devices wait for each other for ever on two cores.
# On a GPU the compiler would try many kernels for every product of the references.
HAS_OLD_EMITTERS = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 12)
COMPILER_FLAGS = "--xla_gpu_autotune_level=0" if PLATFORM != "cpu" else " ".join((
    "--xla_backend_optimization_level=0",
    *["--xla_cpu_use_fusion_emitters=false"] * HAS_OLD_EMITTERS,
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
))  # fmt: skip
