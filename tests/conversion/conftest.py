"""Small checkpoints: by hand, without Transformers, and saved by Transformers itself."""

import pathlib

import pytest

from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint


@pytest.fixture
def llama(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small Llama in one safetensors file."""
    return write_checkpoint(tmp_path / "llama", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
