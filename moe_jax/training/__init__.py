"""Training by hand: the step of `moe-jax train` as a pure function, for a loop of your own.

With a recipe, `moe_jax.load(recipe)` returns the model that it begins with, and `moe_jax.peft` divides the
parameters; losses and weights are then those of `moe-jax train` to the last bit (`examples/train_loop.py`). Without
one, a step is made of any decoder and any optimizer of Optax's:

    >>> import jax, optax
    >>> from moe_jax import peft, training
    >>> decoder, ids = moe_jax.tiny_model(experts=4).decoder, jax.numpy.ones((2, 6), int)
    >>> graphdef, params, frozen = peft.split_model(decoder, peft.trainable_paths(decoder))
    >>> step = jax.jit(training.make_step(graphdef, optax.sgd(0.1)), donate_argnums=0)
    >>> state = training.init_state(params, optax.sgd(0.1))
    >>> state, metrics = step(state, frozen, {"tokens": ids[:, :-1], "targets": ids[:, 1:]})
    >>> sorted(training.to_record(decoder, 1, metrics))[:3]
    ['aux_loss', 'balance_loss', 'cv_loss']

Names are imported when they are first asked for.

The step:
    make_step                        `(state, frozen, batch) -> (state, metrics)`
    init_state, TrainState           all that a step changes
    StepMetrics, to_record           what it reports, and the same for a file
    Teacher                          a model whose logits are distilled
    FurtherTokens                    the loss of layers that predict tokens after the next
    moved_biases                     paths of biases of selection, which steps with a `bias_update_rate` move

Of a recipe:
    load_recipe                      from a TOML file
    open_batches, Batches            its data, on devices
    FrozenTower                      features of pictures, which a tower that is not trained looks at once
    optimizer_of, schedule_of        its optimizer, and learning rate

Inside, `program` holds model, optimizer and step of a run, and `training_run` runs it. `run_directory` holds the
outputs of a run and says what may differ when it is continued, `restart` begins a run with a checkpoint of another
one, and `saved_model` writes the model at the end and reads that of a checkpoint.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.model_io.frozen_tower import FrozenTower as FrozenTower
    from moe_jax.training.balance.selection_bias import moved_biases as moved_biases
    from moe_jax.training.batches import Batches as Batches
    from moe_jax.training.batches import open_batches as open_batches
    from moe_jax.training.metrics import to_record as to_record
    from moe_jax.training.program import optimizer_of as optimizer_of
    from moe_jax.training.program import schedule_of as schedule_of
    from moe_jax.training.recipe import load_recipe as load_recipe
    from moe_jax.training.step import FurtherTokens as FurtherTokens
    from moe_jax.training.step import StepMetrics as StepMetrics
    from moe_jax.training.step import Teacher as Teacher
    from moe_jax.training.step import make_step as make_step
    from moe_jax.training.train_state import TrainState as TrainState
    from moe_jax.training.train_state import init_state as init_state
