"""Operations that a step spares, by hand for a model with LoRA."""

import json

import pytest

from moe_jax.commands import cli
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import BankConfig
from moe_jax.peft import trainable_paths
from moe_jax.peft.adapt import adapted_config
from moe_jax.peft.spec import AdaptSpec
from moe_jax.planning.frozen_gradients import frozen_gradients
from moe_jax.training.flops import active_matmul_params, batch_flops
from tests.support.training_models import FFN, config_of, moe, recipe_of, write_config


def spared(config, **partition) -> float:
    """The entries whose gradients are spared for one of the 8 x 16 tokens of a batch."""
    paths = trainable_paths(abstract_model(config), **partition)
    return frozen_gradients(recipe_of(), config, paths) / (2 * 8 * 16)


def test_what_is_frozen_is_multiplied_and_has_no_gradient():
    """Half of four experts are active; what is looked up, added or normed is no product."""
    config = config_of(FFN, moe())
    assert spared(config) == 0
    assert spared(config, train=["final_norm/scale"]) == pytest.approx(active_matmul_params(config))
    assert spared(config, train=[".*"], freeze=[".*/experts/.*"]) == pytest.approx(2 * 3 * 16 * 32)
    tied = config_of(FFN, tie_embeddings=True)
    assert spared(tied, train=["final_norm/scale"]) == pytest.approx(active_matmul_params(tied))


def test_lora_over_nf4_is_counted_as_what_it_is(tmp_path, capsys):
    """Of a kernel 4 operations a weight are left, and of LoRA all 6: a plan from shapes says so too."""
    dense = config_of(FFN, d_model=64)
    tuned = adapted_config(dense, AdaptSpec(method="lora", adapter="lora:2", targets="q,up", base="nf4"))
    matrices = active_matmul_params(dense)
    assert spared(tuned) == pytest.approx(matrices)
    file = write_config(tmp_path / "config.json", tuned)
    assert cli.main(["plan", str(file), "--mesh", "fsdp=2", "--platform", "v5p", "--tokens", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["training"]
    recipe = recipe_of(batch_size=2, seq_len=64)
    assert found["model_flops"] == pytest.approx(batch_flops(recipe, tuned) / 2 - 2 * 64 * matrices)
    assert found["roofline"]["matrix"] == pytest.approx(
        (found["model_flops"] + batch_flops(recipe, tuned) / 2 / 3) / 459e12
    )


def test_kernels_in_codes_are_multiplied_though_they_are_no_parameters():
    coded = config_of(moe(BankConfig(kind="quantized", bits=4)))
    paths = [path for path in trainable_paths(abstract_model(coded)) if "/router/" in path]
    found = frozen_gradients(recipe_of(), coded, paths) / (2 * 8 * 16)
    assert found == pytest.approx(active_matmul_params(coded) - 16 * 4)
