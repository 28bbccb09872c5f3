"""A dense model becomes a Mixture-of-Experts."""

import os
from collections.abc import Sequence

import numpy as np

from moe_jax.api.built_in_text import probe_text
from moe_jax.api.model import Model, ModelOrPath, OutPath, destination, open_model, result
from moe_jax.api.verb import model_verb, work_bars
from moe_jax.core.errors import InputError, shown
from moe_jax.data.tokenizer import Tokenizer, find_tokenizer
from moe_jax.evaluation.held_out import read_text
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_source import ModelSource
from moe_jax.upcycling.beginnings import Prompt
from moe_jax.upcycling.dense_to_moe import upcycle as _upcycle
from moe_jax.upcycling.new_config import upcycled_config
from moe_jax.upcycling.spec import UpcycleSpec


@model_verb(UpcycleSpec)
def upcycle(model: ModelOrPath, out: OutPath, spec: UpcycleSpec) -> Model:
    """Turns a dense model into a Mixture-of-Experts that gives the same logits until it is trained.

        >>> moe = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, top_k=2, every=2, delta="low-rank:2")
        >>> moe.config.moe_layers
        (1,)
        >>> measured = moe.lineage[-1]["measured"]
        >>> measured["step0_max_abs_difference"] <= measured["step0_allowed"]
        True

    Args:
      model: a dense model, or the path of one.
      out: where a directory appears, which must not exist; None: the model stays in memory. With `method="pesc"`,
        unless `rest` is `full`, it is an adapter directory, which refers to the dense model and needs the path of one.
      spec: the options.

    Returns:
      The MoE.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if the model is an MoE already, the options do not go with it or each other, weights are not
        finite, the logits differ, or `out` exists. Nothing is left behind.
    """
    target, source = destination(out), open_model(model, spec.base)
    text = probe_text(source, upcycled_config(source.config, spec), spec.text, check=spec.step0_check)
    with work_bars() as progress:
        made = _upcycle(
            source,
            target,
            spec,
            text=text,
            prompts=read_prompts(source, spec.router_from),
            experts_from=[open_model(one) for one in spec.experts_from],
            progress=progress,
        )
    return result(target, model, made)


def read_prompts(source: ModelSource, texts: Sequence[str]) -> list[Prompt]:
    """Returns the tokens of texts, with BOS before them where documents of the model begin with one.

    Args:
      source: the model that will read them.
      texts: each a text, or `@` and the path of a file with it.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if the source has no tokenizer, a file is not UTF-8, or a text is the path of a file.
    """
    if not texts:
        return []
    tokenizer = Tokenizer(find_tokenizer(source.tokenizer_files, source.path), source.config)
    begin = tokenizer.prompt("")
    prompts = []
    for text in texts:
        if text.startswith("@"):
            ids = read_text(as_path(text[1:]), tokenizer)
        elif os.path.isfile(text):
            raise InputError(f"--router-from {shown(text)} is a file; write @{text} for the text in it")
        else:
            ids = tokenizer.encode(text)
        prompts.append(Prompt(np.concatenate([begin, np.asarray(ids, np.int32)]).astype(np.int32), len(begin)))
    return prompts
