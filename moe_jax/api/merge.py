"""Folds LoRA into the kernels that it belongs to."""

from moe_jax.api.model import Model, ModelOrPath, OutPath, destination, open_model, result
from moe_jax.api.verb import model_verb, work_bars
from moe_jax.peft.merge import merge as _merge
from moe_jax.peft.spec import MergeSpec


@model_verb(MergeSpec)
def merge(model: ModelOrPath, out: OutPath, spec: MergeSpec) -> Model:
    """Folds LoRA into the kernels that it stands beside; the model then needs no base.

    NF4 kernels are dequantised before, so that the model computes what was trained.

        >>> tuned = moe_jax.adapt(moe_jax.tiny_model(), method="lora", adapter="lora:2", targets=["q", "v"])
        >>> merged = moe_jax.merge(tuned)
        >>> merged.config.layers[0].attention.lora is None
        True

    Args:
      model: a model with LoRA or NF4 kernels, or the path of one.
      out: where a model directory appears, which must not exist; None: the model stays in memory.
      spec: the options.

    Returns:
      The merged model.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if there is nothing to fold, something cannot be folded and `partly` is not said, weights are
        not finite, or `out` exists.
    """
    target, source = destination(out), open_model(model, spec.base)
    with work_bars() as progress:
        made = _merge(source, target, spec, progress=progress)
    return result(target, model, made)
