"""Jobs of half an hour and more: models that are trained by a recipe, and go on where they were stopped."""

import dataclasses
import shutil
from collections.abc import Sequence
from typing import Any

import rich.console

from evidence.studies.corpus import RECIPES, Corpus, given_model, middle_config, tokenizer_file
from evidence.studies.jobs import Place, new_folder
from evidence.studies.models import grown, keep, model_of, read_leaves
from evidence.studies.scales import MIDDLE, SCALES, SMOLLM
from evidence.studies.shapes import shape_of
from evidence.studies.texts import DOMAINS
from evidence.studies.trainer import Trainer
from evidence.studies.training_job import DENSE, MODEL, TEST, kept_folder
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import ModelConfig
from moe_jax.training.recipe import Recipe, load_recipe
from moe_jax.training.training_run import train


def train_middle(place: Place) -> dict[str, Any]:
    """The dense model of the scale `middle`, kept as its `dense`."""
    scale = MIDDLE
    tokenizer = tokenizer_file(place, scale)
    config_file = RECIPES / "middle.json"
    corpus = Corpus(place, scale, middle_config(), tokenizer)
    recipe = load_recipe(
        RECIPES / "middle.toml",
        [f"model.config={str(config_file)!r}", f"data.tokenizer={str(tokenizer)!r}"],
    )
    return _trained(place, scale.name, DENSE, recipe, corpus, middle_config(), None)


def train_smollm_moe(place: Place, shape: str, name: str) -> dict[str, Any]:
    """SmolLM2-135M as an MoE of a shape, trained and kept under a name."""
    scale, source = SMOLLM, given_model(place, SMOLLM)
    folder = kept_folder(place, scale.name, f"{shape}, untrained") / MODEL
    config = shape_of(shape).config(source.config)
    if not folder.exists():
        keep(model_of(grown(config, read_leaves(source))), folder, source.tokenizer_files)
    start = ModelDirectory(folder)
    recipe = load_recipe(RECIPES / "smollm2_moe.toml", [f"model.path={str(folder)!r}"])
    corpus = Corpus(place, scale, config, tokenizer_file(place, scale))
    return _trained(place, scale.name, name, recipe, corpus, config, start)


def _trained(
    place: Place,
    scale: str,
    name: str,
    recipe: Recipe,
    corpus: Corpus,
    config: ModelConfig,
    source: ModelDirectory | None,
) -> dict[str, Any]:
    """Trains by a recipe, goes on if it was begun, keeps the model, and scores it."""
    run_dir = place.work / "runs" / scale / name
    recipe = dataclasses.replace(
        recipe,
        run_dir=str(run_dir),
        data=dataclasses.replace(recipe.data, sources=corpus.sources("domains")),
    )
    trained = train(recipe, config, source, resume=True, console=rich.console.Console(quiet=True))
    target = new_folder(kept_folder(place, scale, name)) / MODEL
    shutil.rmtree(target.parent, ignore_errors=True)
    shutil.copytree(trained, target)
    return {"steps": recipe.train.steps, "losses": score(ModelDirectory(target), corpus, scale)}


def score(source: ModelDirectory, corpus: Corpus, scale: str, texts: Sequence[str] = DOMAINS) -> dict[str, float]:
    """The test losses of a model, nats per token."""
    trainer = Trainer(source.config, steps=1, warmup_steps=0)
    model, seq_len = model_of(read_leaves(source)), SCALES[scale].seq_len
    return {name: trainer.score(model, ids, seq_len) for name, ids in corpus.scored(TEST, tuple(texts)).items()}
