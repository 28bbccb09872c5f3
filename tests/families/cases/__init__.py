"""Small models of every family that Transformers has, one file each.

A file names the classes of Transformers, `CONFIG` and `MODEL`, and its `CASES`: name -> keys of the config, which
take the place of those in `SMALL`.

Compiling for every shape would take longer than all other tests. So by default the logits of the first two cases of a
family are compared, and generation and gradients of the first; with `make test-all`, of all.
"""

import importlib
import pkgutil

from tests.support.tiers import EVERY

SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
FILES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
CASES = {name: file for file in FILES for name in file.CASES}


def first_of_each(count: int) -> list[str]:
    """The first cases of every family; all of them if every shape is asked for."""
    return [name for file in FILES for name in list(file.CASES)[: None if EVERY else count]]
