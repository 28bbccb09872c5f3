"""Trains the model of a recipe in a loop by hand: losses and weights are those of `moe-jax train`, bit for bit.

    python examples/train_loop.py [RECIPE [OUT]]

RECIPE is a recipe, such as `train/recipes/upcycle_small.toml`; by default a short one for a tiny model. The trained
model is written to OUT, by default `RUN_DIR/by-hand`. Checkpoints and the held-out loss are left out.
"""

import itertools
import string
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import tokenizers
from flax import nnx

import moe_jax
from moe_jax import peft, training


def main(path: str, out: str | None = None) -> list[dict[str, Any]]:
    """Returns what `moe-jax train` writes to metrics.jsonl, but for the speed; some of it is printed."""
    recipe = training.load_recipe(path)
    if recipe.ema is not None or recipe.distill is not None or recipe.mtp is not None:
        raise moe_jax.InputError(f"{path}: this loop has neither [ema] nor [distill] nor [mtp]")

    # The model on the recipe's devices, the parameters that are trained, their optimizer, and the data.
    model = moe_jax.load(recipe)
    trained = peft.trainable_paths(model.decoder, train=recipe.partition.train, freeze=recipe.partition.freeze)
    rate = recipe.moe.bias_update_rate
    moved = training.moved_biases(model.decoder, rate)
    graphdef, params, frozen = peft.split_model(model.decoder, trained | moved)
    optimizer, schedule = training.optimizer_of(recipe, model.decoder, trained), training.schedule_of(recipe)
    batches = training.open_batches(recipe, model.config, model.mesh, tokenizer_files=model.tokenizer_files)

    # A pure function, compiled once: its results take the place of its arguments, on the same devices.
    state = training.init_state(params, optimizer)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    options = {"seed": recipe.seed, "accumulation": recipe.train.accumulation, "bias_update_rate": rate}
    step = training.make_step(graphdef, optimizer, schedule, **options)
    step = jax.jit(step, donate_argnums=0, out_shardings=(places, places.step))

    records = []
    with jax.set_mesh(model.mesh):
        for number, batch in enumerate(itertools.islice(batches, recipe.train.steps), start=1):
            state, metrics = step(state, frozen, batch)
            record = training.to_record(model.decoder, number, metrics)
            records.append(record)
            print(f"step {number}: loss {record['loss']!r}, and {record['aux_loss']:.4g} of the routers")

    nnx.update(model.decoder, state.params)
    moe_jax.save(model, out or Path(recipe.run_dir) / "by-hand")
    return records


RECIPE = """
run_dir = "{folder}/run"
model.path = "{folder}/moe"
data = {{ seq_len = 32, tokenizer = "{folder}/tokenizer.json", sources = [{{ path = "{text}" }}] }}
optimizer.learning_rate = 1e-2
train = {{ steps = 4, batch_size = 8 }}
"""


def tiny_recipe(folder: Path) -> str:
    """Writes a recipe for a tiny model, whose tokens are letters, and this file as its text; returns the path."""
    moe_jax.save(moe_jax.tiny_model(experts=4), folder / "moe")
    letters = {letter: index for index, letter in enumerate(string.ascii_letters + " .")}
    tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).save(str(folder / "tokenizer.json"))
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=folder, text=__file__))
    return str(recipe)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:3])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(tiny_recipe(Path(folder)))
