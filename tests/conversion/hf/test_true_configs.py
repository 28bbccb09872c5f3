"""Every true config is read, and a checkpoint of it would hold as many parameters as the true one."""

import io
import pathlib
import re

from rich.console import Console

from moe_jax.api.open_source import read_config
from moe_jax.conversion import convert
from moe_jax.planning.model_costs import make_plan

# Published, or the sum over the tensors of the published checkpoint.
TOTALS = {
    "mistralai__Mixtral-8x7B-v0.1": 46_702_792_704,
    "allenai__OLMoE-1B-7B-0924": 6_919_161_856,
    "allenai__OLMoE-1B-7B-0125-Instruct": 6_919_161_856,
    "Qwen__Qwen3-30B-A3B": 30_532_122_624,
    "Qwen__Qwen3-30B-A3B-Base": 30_532_122_624,
    "deepseek-ai__deepseek-moe-16b": 16_375_728_128,
    "meta-llama__Llama-2-7b-hf": 6_738_415_616,
    "meta-llama__Llama-2-13b-hf": 13_015_864_320,
}


def parameters_of(config: pathlib.Path) -> int:
    """The number that a dry run prints at its end."""
    printed = io.StringIO()
    convert(config, config.parent / "not-there", dry_run=True, console=Console(file=printed, width=400))
    return int(re.findall(r"([\d,]+) parameters", printed.getvalue())[-1].replace(",", ""))


def test_every_true_config(data_dir: pathlib.Path):
    files = sorted(file for folder in ("as_found", "derived") for file in (data_dir / "configs" / folder).iterdir())
    assert files and TOTALS.keys() <= {file.stem for file in files}
    for file in files:
        found = parameters_of(file)
        assert found == make_plan(read_config(file)).total_params == TOTALS.get(file.stem, found), file
