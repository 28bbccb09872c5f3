"""The first DeepSeekMoE, which Transformers lacks, against its published definition in NumPy (arXiv 2401.06066)."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.conversion import HuggingFaceDirectory, read_hf_config
from moe_jax.conversion.hf_config import write_hf_config
from moe_jax.model_io.loading import load_model
from moe_jax.planning.model_costs import make_plan
from tests.families.reference import mean_loss
from tests.support.generated import generate
from tests.support.hf_checkpoints import BASE, CONFIGS, expected_tensors, write_checkpoint
from tests.support.tiers import EVERY, long, one_in

TOKENS = np.random.default_rng(0).integers(0, BASE["vocab_size"], (2, 40))
SMALL = BASE | {
    "model_type": "deepseek",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
}
CASES = {
    "deepseek": {},
    "normalised-biases-tied": dict(norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True),
    "no-dense-layer-one-shared": dict(first_k_dense_replace=0, n_shared_experts=1, num_key_value_heads=4),
    "every-second-linear-rope": dict(
        num_hidden_layers=5, moe_layer_freq=2, rope_scaling={"type": "linear", "factor": 4.0}, rms_norm_eps=1e-2
    ),
    "nothing-shared-one-expert": dict(
        n_shared_experts=None, num_experts_per_tok=1, norm_topk_prob=True, num_hidden_layers=3, first_k_dense_replace=2
    ),
}


def checkpoint(folder: pathlib.Path, name: str) -> tuple[HuggingFaceDirectory, dict, dict[str, np.ndarray]]:
    """A checkpoint of random numbers that all matter, its config and its tensors."""
    config, rng = SMALL | CASES[name], np.random.default_rng(0)
    tensors = {}
    for tensor, shape in expected_tensors(config).items():
        noise = rng.normal(size=shape)
        tensors[tensor] = (1 + 0.1 * noise if "norm" in tensor else 0.15 * noise).astype(np.float32)
    return HuggingFaceDirectory(write_checkpoint(folder, config, tensors)), config, tensors


class Reference:
    """The model as it is published, a token and an expert at a time, in float64."""

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]):
        self.config = config
        self.weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        x = self.weights["model.embed_tokens.weight"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            x = x + np.stack([self.attention(row, f"{at}.self_attn") for row in self.norm(x, f"{at}.input_layernorm")])
            normed = self.norm(x, f"{at}.post_attention_layernorm")
            x = x + (self.moe(normed, f"{at}.mlp") if self.is_moe(i) else self.ffn(normed, f"{at}.mlp"))
        tied = self.config.get("tie_word_embeddings")
        head = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return self.norm(x, "model.norm") @ head.T

    def is_moe(self, i: int) -> bool:
        return i >= self.config["first_k_dense_replace"] and i % self.config.get("moe_layer_freq", 1) == 0

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x**2, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def ffn(self, x: np.ndarray, at: str) -> np.ndarray:
        gate = self.linear(x, f"{at}.gate_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, f"{at}.up_proj"), f"{at}.down_proj")

    def moe(self, x: np.ndarray, at: str) -> np.ndarray:
        top_k, y = self.config["num_experts_per_tok"], np.zeros_like(x)
        exponentials = np.exp(self.linear(x, f"{at}.gate"))
        scores = exponentials / exponentials.sum(-1, keepdims=True)
        for place in np.ndindex(x.shape[:-1]):
            chosen = np.argsort(-scores[place])[:top_k]
            weights = scores[place][chosen]
            if top_k > 1 and self.config["norm_topk_prob"]:
                weights = weights / weights.sum()
            for expert, weight in zip(chosen, weights, strict=True):
                y[place] += weight * self.ffn(x[place], f"{at}.experts.{expert}")
        return y + self.ffn(x, f"{at}.shared_experts") if self.config["n_shared_experts"] else y

    def attention(self, x: np.ndarray, at: str) -> np.ndarray:
        heads, length = self.config["num_attention_heads"], len(x)
        width = self.config["hidden_size"] // heads
        q, k, v = (self.linear(x, f"{at}.{name}_proj").reshape(length, -1, width) for name in "qkv")
        q, k = self.rotated(q), self.rotated(k)
        seen = np.tril(np.ones((length, length), bool))
        results = []
        for head in range(heads):
            shared = head // (heads // self.config["num_key_value_heads"])
            scores = np.where(seen, q[:, head] @ k[:, shared].T / np.sqrt(width), -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            results.append(shares / shares.sum(-1, keepdims=True) @ v[:, shared])
        return self.linear(np.concatenate(results, axis=-1), f"{at}.o_proj")

    def rotated(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        positions = np.arange(len(x)) / (self.config.get("rope_scaling") or {}).get("factor", 1.0)
        angles = (positions[:, None] * 10000.0 ** (-np.arange(half) / half))[:, None, :]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


@one_in(2)
@pytest.mark.parametrize("name", CASES if EVERY else list(CASES)[:2])
def test_logits_equal_the_definition(name, tmp_path, strict_numerics):
    source, config, tensors = checkpoint(tmp_path / "m", name)
    expected = Reference(config, tensors).logits(TOKENS)
    assert np.std(expected) > 0.1  # otherwise equality would say little
    got = nnx.jit(lambda model: model(jnp.asarray(TOKENS, jnp.int32)).logits)(load_model(source))
    assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()


@long
def test_greedy_continuations_equal_the_definition(tmp_path):
    source, config, tensors = checkpoint(tmp_path / "m", "deepseek")
    reference, rows = Reference(config, tensors), TOKENS[:, :6]
    for _ in range(24):
        rows = np.concatenate([rows, reference.logits(rows)[:, -1].argmax(-1)[:, None]], axis=1)
    assert generate(load_model(source), TOKENS[:, :6].tolist(), max_new_tokens=24) == rows[:, 6:].tolist()


def test_loss_and_gradient_equal_the_definition(tmp_path, strict_numerics):
    """The gradient by differences of the definition's loss, along random directions in every leaf at once."""
    source, config, tensors = checkpoint(tmp_path / "m", "normalised-biases-tied")
    graphdef, params = nnx.split(load_model(source))
    tokens = jnp.asarray(TOKENS, jnp.int32)
    found, gradient = jax.jit(
        jax.value_and_grad(lambda params: mean_loss(nnx.merge(graphdef, params)(tokens).logits, tokens))
    )(params)

    def loss(tensors):
        logits = Reference(config, tensors).logits(TOKENS)[:, :-1]
        largest = logits.max(-1, keepdims=True)
        logsumexp = np.log(np.exp(logits - largest).sum(-1)) + largest[..., 0]
        return np.mean(logsumexp - np.take_along_axis(logits, TOKENS[:, 1:, None], -1)[..., 0])

    np.testing.assert_allclose(found, loss(tensors), rtol=1e-4)
    rng = np.random.default_rng(2)
    for only in ("self_attn", "experts.", "shared_experts", "mlp.gate.", "norm", "embed_tokens", ""):
        direction = {name: rng.normal(size=t.shape).astype(np.float32) * (only in name) for name, t in tensors.items()}
        ahead, behind = (
            loss({name: tensor.astype(np.float64) + step * direction[name] for name, tensor in tensors.items()})
            for step in (1e-6, -1e-6)
        )
        folder = write_checkpoint(tmp_path / f"along-{only}", config, direction)
        _, along = nnx.split(load_model(HuggingFaceDirectory(folder)))
        slope = sum(np.vdot(a, b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(along), strict=True))
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-4, atol=1e-4, err_msg=only)


def test_the_published_model_has_its_published_size(data_dir):
    config = json.loads((data_dir / "configs/as_found/deepseek-ai__deepseek-moe-16b.json").read_text())
    derived = data_dir / "configs/weight_names_derived/deepseek-ai__deepseek-moe-16b-base.json"
    names = json.loads(derived.read_text())
    assert make_plan(read_hf_config(config)).total_params == names["total_parameters"] == 16_375_728_128
    assert len(expected_tensors(config)) == names["num_tensors"]


@pytest.mark.parametrize("name", ["deepseek", "kimi_k2"])
@pytest.mark.parametrize("of_sequences", [True, False])
def test_the_balance_loss_is_of_sequences_or_of_batches_as_the_config_says(name, of_sequences):
    keys = CONFIGS[name] | {"aux_loss_alpha": 0.25, "seq_aux": of_sequences}
    config = read_hf_config(keys)
    moe = config.moe(config.moe_layers[0])
    assert (moe.sequence_balance_coef, moe.balance_coef) == ((0.25, 0.0) if of_sequences else (0.0, 0.25))
    written = write_hf_config(config)
    assert (written["aux_loss_alpha"], written["seq_aux"]) == (0.25, of_sequences)
    # The classes that come with the checkpoints take the loss of sequences where nothing is said.
    assert (
        read_hf_config({key: value for key, value in keys.items() if key != "seq_aux"}).layers
        == read_hf_config(keys | {"seq_aux": True}).layers
    )
