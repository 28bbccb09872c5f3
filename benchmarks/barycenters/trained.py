"""Small MoEs that are trained for their experts: wide ones from random weights, and stories260K upcycled."""

import dataclasses
import json
from pathlib import Path

import rich.console

from moe_jax.api.open_source import open_source
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.tokenizer import find_tokenizer
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import BankConfig, FFNConfig, ModelConfig, MoEConfig, config_to_json
from moe_jax.training.recipe import (
    CheckpointSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    ScheduleSection,
    TrainSection,
)
from moe_jax.training.training_run import train
from moe_jax.upcycling import UpcycleSpec, upcycle

# Two layers of 4 experts of 1024 gated neurons, and of 8 experts of 1024 plain ones with biases.
WIDE = {
    "wide gated": (FFNConfig(dim=1024), 4),
    "wide plain": (FFNConfig(dim=1024, gated=False, activation="gelu", bias=True), 8),
}
UPCYCLED = "upcycled"


def trained_models(data: Path, work: Path, steps: int) -> dict[str, ModelSource]:
    """Trains the models that are not in `work` yet.

    Args:
      data: folder with `weights/stories260K/hf` and `text/tinyshakespeare/input.txt`.
      work: folder the models are kept in.
      steps: of training.
    """
    dense = open_source(data / "weights" / "stories260K" / "hf")
    text = data / "text" / "tinyshakespeare" / "input.txt"
    return {name: _trained(name, dense, text, work, steps) for name in (*WIDE, UPCYCLED)}


def _trained(name: str, dense: ModelSource, text: Path, work: Path, steps: int) -> ModelSource:
    run_dir = work / f"{name.replace(' ', '_')}_{steps}"
    done = run_dir / "done"
    if done.exists():
        return ModelDirectory(Path(done.read_text()))
    run_dir.mkdir(parents=True, exist_ok=True)
    if name == UPCYCLED:
        start = run_dir / "start"
        upcycle(dense, start, UpcycleSpec(experts=8, top_k=2, every=1, step0_check=False))
        source, section = ModelDirectory(start), ModelSection(path=str(start))
        config = source.config
    else:
        file = run_dir / "config.json"
        config = _wide_config(dense.config, *WIDE[name])
        file.write_text(json.dumps(config_to_json(config)))
        source, section = None, ModelSection(config=str(file), init="random")
    recipe = Recipe(
        run_dir=str(run_dir / "run"),
        model=section,
        seed=0,
        data=DataSection(
            sources=(SourceSection(path=str(text)),),
            seq_len=128,
            piece_kib=1,
            tokenizer=str(find_tokenizer(dense.tokenizer_files, dense.path)),
        ),
        optimizer=OptimizerSection(learning_rate=3e-3, weight_decay=0.0),
        schedule=ScheduleSection(warmup_steps=min(10, steps - 1)),
        train=TrainSection(steps=steps, batch_size=8),
        checkpoint=CheckpointSection(every=steps, keep=1),
        log=LogSection(tensorboard=False),
    )
    path = train(recipe, config, source, console=rich.console.Console(quiet=True))
    done.write_text(str(path))
    return ModelDirectory(path)


def _wide_config(dense: ModelConfig, expert: FFNConfig, num_experts: int) -> ModelConfig:
    moe = MoEConfig(expert=expert, bank=BankConfig(), num_experts=num_experts, top_k=2, balance_coef=0.01)
    return dataclasses.replace(
        dense, layers=tuple(dataclasses.replace(layer, mlp=moe) for layer in dense.layers[:2]), foreign={}
    )
