"""Adapters beside a frozen model."""

from moe_jax.api.built_in_text import probe_text
from moe_jax.api.model import Model, ModelOrPath, OutPath, destination, open_model, result
from moe_jax.api.verb import model_verb, work_bars
from moe_jax.peft.adapt import adapt as _adapt
from moe_jax.peft.adapt import adapted_config
from moe_jax.peft.spec import AdaptSpec


@model_verb(AdaptSpec)
def adapt(model: ModelOrPath, out: OutPath, spec: AdaptSpec) -> Model:
    """Puts fresh adapters beside a model, to be trained while the model is frozen: PERFT beside the MoEs, or LoRA.

        >>> tuned = moe_jax.adapt(moe_jax.tiny_model(experts=4), method="lora", adapter="lora:2", targets="q,v")
        >>> tuned.config.layers[0].attention.lora.rank
        2

    Args:
      model: a model, or the path of one.
      out: where an adapter directory appears, which must not exist. It refers to the model, so that a path is needed.
        None: the model stays in memory, with its adapters.
      spec: the options.

    Returns:
      The model with its adapters.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if the model has adapters already, the options do not go with it or each other, weights are not
        finite, the logits differ, or `out` exists. Nothing is left behind.
    """
    target, source = destination(out), open_model(model)
    text = probe_text(source, adapted_config(source.config, spec), spec.text, check=spec.step0_check)
    with work_bars() as progress:
        made = _adapt(source, target, spec, text=text, progress=progress)
    return result(target, model, made)
