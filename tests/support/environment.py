"""What tests and the processes that they start have in common: the root of the checkout, and flags of the compiler."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Test models are tiny: compiling them dominates. Unoptimised machine code compiles in half the time, and the older
# emitters of loops write far less of it. A worker has one core: programs split for several are only more work. And in
# the order that favours concurrency, collectives of eight devices wait for each other for ever on two cores.
COMPILER_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_enable_concurrency_optimized_scheduler=false"
)
