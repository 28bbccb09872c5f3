"""Small models of every family that Transformers has, one file each.

A file names the classes of Transformers, `CONFIG` and `MODEL`, and its `CASES`: name -> keys of the config, which
take the place of those in `SMALL`. The first case is also the one that generates and has its gradient compared.
"""

import importlib
import pkgutil

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
FIRST = [next(iter(file.CASES)) for file in FILES]
