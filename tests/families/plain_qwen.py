"""The first Qwen in NumPy, written from its published definition: one row of tokens, tensors by their foreign names."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def logits(config: Mapping[str, Any], tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Float64[T, V] of tokens Int[T]."""
    x = tensors["transformer.wte.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        block = f"transformer.h.{i}"
        x = x + _attention(config, tensors, f"{block}.attn", _norm(config, tensors, f"{block}.ln_1", x))
        x = x + _ffn(tensors, f"{block}.mlp", _norm(config, tensors, f"{block}.ln_2", x))
    head = tensors["transformer.wte.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return _norm(config, tensors, "transformer.ln_f", x) @ head.T


def loss(config: Mapping[str, Any], tensors: Tensors, tokens: np.ndarray) -> float:
    """Mean cross-entropy of predicting every token of rows Int[B, T] but their first."""
    losses = []
    for row in tokens:
        scores = logits(config, tensors, row)[:-1]
        scores = scores - scores.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(scores, row[1:, None], axis=-1)[:, 0]
        losses.append(np.log(np.exp(scores).sum(axis=-1)) - chosen)
    return float(np.mean(losses))


def continuation(config: Mapping[str, Any], tensors: Tensors, prompt: np.ndarray, count: int) -> list[int]:
    """The `count` most likely tokens after a prompt, each found by a pass over all before it."""
    row = list(prompt)
    for _ in range(count):
        row.append(int(logits(config, tensors, np.asarray(row))[-1].argmax()))
    return row[len(prompt) :]


def _attention(config: Mapping[str, Any], tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    length, heads, width = len(x), config["num_attention_heads"], config["kv_channels"]
    q, k, v = (part.reshape(length, heads, width) for part in np.split(_linear(tensors, f"{at}.c_attn", x), 3, axis=-1))
    rotated = int(width * config["rotary_pct"])
    alpha = max(2 ** math.ceil(math.log2(length / config["seq_length"]) + 1) - 1, 1) if config["use_dynamic_ntk"] else 1
    base = config["rotary_emb_base"] * alpha ** (rotated / (rotated - 2))
    angles = np.arange(length)[:, None] / base ** (np.arange(0, rotated, 2) / rotated)
    q, k = (_rotate(part, angles) for part in (q, k))
    if config["use_logn_attn"]:
        logs = np.log(np.arange(1, length + 1)) / math.log(config["seq_length"])
        q = q * np.maximum(logs, 1)[:, None, None]
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return _linear(tensors, f"{at}.c_proj", np.einsum("hqk,khd->qhd", shares, v).reshape(length, -1))


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    pairs = angles.shape[-1]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _ffn(tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    gate = _linear(tensors, f"{at}.w2", x)
    return _linear(tensors, f"{at}.c_proj", _linear(tensors, f"{at}.w1", x) * gate / (1 + np.exp(-gate)))


def _norm(config: Mapping[str, Any], tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + config["layer_norm_epsilon"]) * tensors[f"{at}.weight"]


def _linear(tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    y = x @ tensors[f"{at}.weight"].T
    return y + tensors[f"{at}.bias"] if f"{at}.bias" in tensors else y
