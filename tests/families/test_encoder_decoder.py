"""Encoder–decoders against Transformers on the same weights: logits, generation, loss and gradient, all in float32."""

import dataclasses
import json
import pathlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from rich.console import Console

from moe_jax.conversion import HuggingFaceDirectory, convert, export  # noqa: E402
from moe_jax.functional.position_embeddings import RelativeBiasConfig  # noqa: E402
from moe_jax.model_io.loading import leaf_specs, load_model, model_leaves  # noqa: E402
from moe_jax.model_io.model_dir import ModelDirectory  # noqa: E402
from moe_jax.nn import init_cache  # noqa: E402
from tests.support.losses import next_token_loss  # noqa: E402
from tests.support.tiers import EVERY, long, one_in  # noqa: E402

SMALL = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
SWITCH = dict(
    num_layers=4, num_decoder_layers=4, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, num_experts=4,
    expert_capacity=1000,
)  # fmt: skip
ONE_OF_TWO = dict(num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
CASES = {
    "t5": {},
    "t5-gated": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5-wide-heads-deep-encoder": dict(d_kv=16, num_layers=4, num_decoder_layers=2, feed_forward_proj="gelu"),
    "t5-few-buckets": dict(
        relative_attention_num_buckets=7, relative_attention_max_distance=20, feed_forward_proj="gated-silu",
        layer_norm_epsilon=1e-2, decoder_start_token_id=3,
    ),
    "t5-deep-decoder": dict(num_layers=1, num_decoder_layers=3, num_heads=1, relative_attention_num_buckets=16),
    "switch": {**SWITCH, **ONE_OF_TWO},
    "switch-one-layer": {**SWITCH, **{key: 1 for key in ONE_OF_TWO}},
    "switch-one-of-two-twice": SWITCH,
    "switch-every-layer": {**SWITCH, "num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 4, "num_experts": 8},
    # Transformers makes the second layer sparse where none is asked for, and none where more are than there are layers.
    "switch-one-and-none": {
        **SWITCH, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 9, "dense_act_fn": "gelu_new",
    },
    "switch-wide-heads-odd-steps": {
        **SWITCH, "d_kv": 16, "num_layers": 5, "num_decoder_layers": 3, "num_sparse_decoder_layers": 1,
        "num_experts": 3, "relative_attention_num_buckets": 12, "relative_attention_max_distance": 9,
    },
}  # fmt: skip
CLASSES = {
    "t5": ("T5Config", "T5ForConditionalGeneration"),
    "switch": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration"),
}
# As in `cases`: some by default, all with `make test-all`.
SOME = CASES if EVERY else ["t5", "t5-gated", "switch"]
FIRST = CASES if EVERY else ["t5-gated", "switch-one-layer"]

random = np.random.default_rng(0)
INPUTS, TARGETS = random.integers(1, 96, (2, 40)), random.integers(1, 96, (2, 30))
VALID = np.ones((2, 40), bool)
VALID[0, 29:], VALID[1, :4] = False, False
THEIRS = dict(input_ids=torch.tensor(INPUTS), attention_mask=torch.tensor(VALID).long())
OURS: dict[str, Any] = dict(inputs=INPUTS.astype(np.int32), inputs_valid=VALID)
NEW_TOKENS = 40
# Of kernels. The larger they are, beside the embedding, the less a tied head prefers the token that was given.
SIZES = (0.35, 0.25, 0.5)


def random_model(name: str, folder: pathlib.Path, size: float = 0.15) -> tuple[Any, HuggingFaceDirectory]:
    """A model of Transformers whose every parameter is random and large enough to matter, and its checkpoint."""
    config_class, model_class = (getattr(transformers, c) for c in CLASSES[name.split("-")[0]])
    model = model_class._from_config(config_class(**{**SMALL, **CASES[name]}), attn_implementation="eager")
    if CASES[name].get("tie_word_embeddings") is False:
        # Transformers unties a head when it finds one in a checkpoint that has another embedding.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.1 * noise if "norm" in key else noise * (0.15 if "shared" in key else size))
    source = saved(name, model.float(), folder)
    loaded, report = model_class.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return loaded.eval(), source


def saved(name: str, model: Any, folder: pathlib.Path) -> HuggingFaceDirectory:
    model.save_pretrained(folder)
    if CASES[name].get("tie_word_embeddings") is False:
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(keys | {"tie_word_embeddings": False}))
    return HuggingFaceDirectory(folder)


class Cut:
    """The first layers of both stacks, without final norms: a `ModelSource`."""

    base, lineage, tokenizer_files = None, (), ()

    def __init__(self, source: HuggingFaceDirectory, encoder: int, decoder: int):
        self._source, self.path = source, source.path
        first, layers = source.config.num_encoder_layers, source.config.layers
        self.layers = [*range(encoder), *range(first, first + decoder)]
        kept = tuple(layers[i] for i in self.layers)
        self.config = dataclasses.replace(source.config, layers=kept, num_encoder_layers=encoder, final_norm=False)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        stored = self._source.specs()
        return {path: stored[self._there(path)] for path in leaf_specs(self.config)}

    def read(self, path: str) -> np.ndarray:
        return self._source.read(self._there(path))

    def _there(self, path: str) -> str:
        if not path.startswith("layers/"):
            return path
        _, layer, rest = path.split("/", 2)
        return f"layers/{self.layers[int(layer)]}/{rest}"


def first_difference(source: HuggingFaceDirectory, theirs: Any, tokens: jax.Array) -> str:
    """Where our activations leave those of Transformers, for people."""
    model, config = load_model(source), source.config
    encoder, decoder = config.num_encoder_layers, config.num_layers - config.num_encoder_layers
    encoded = model.encode(OURS["inputs"], valid=OURS["inputs_valid"])
    lines = []

    def compare(place: str, ours: jax.Array, state: Any, valid: np.ndarray) -> None:
        state = state.numpy()
        error = np.abs(np.where(valid[..., None], ours - state, 0)).max()
        lines.append(f"{place}: {error / np.abs(state).max():.1e}")

    for count in range(1, encoder + 1):
        cut = model if count == encoder else load_model(Cut(source, count, 1))
        output = cut.encode(OURS["inputs"], valid=OURS["inputs_valid"]).output
        compare(f"encoder layer {count - 1}", output, theirs.encoder_hidden_states[count], VALID)
    for count in range(1, decoder + 1):
        cut = model if count == decoder else load_model(Cut(source, encoder, count))
        given = dict(encoder_output=encoded.output, encoder_valid=encoded.valid)
        output = cut.stack(cut.embed(tokens), **given).x
        compare(f"decoder layer {count - 1}", output, theirs.decoder_hidden_states[count], np.ones(tokens.shape, bool))
    return "relative errors after " + ", ".join(lines)


def theirs_of(reference: Any, tokens: np.ndarray, **options: Any) -> Any:
    with torch.no_grad():
        return reference(**THEIRS, decoder_input_ids=torch.tensor(tokens), use_cache=False, **options)


@one_in(3)
@pytest.mark.parametrize("name", SOME)
def test_logits_equal_transformers(name, tmp_path, strict_numerics):
    reference, source = random_model(name, tmp_path)
    expected = theirs_of(reference, TARGETS, output_hidden_states=True)
    logits, tokens = expected.logits.numpy(), jnp.asarray(TARGETS, jnp.int32)
    assert np.std(logits) > 0.1  # otherwise equality would say little
    graphdef, state = nnx.split(load_model(source))
    got = np.asarray(jax.jit(lambda state: nnx.merge(graphdef, state)(tokens, **OURS).logits)(state))
    if not np.abs(got - logits).max() <= 2e-5 * np.abs(logits).max():
        pytest.fail(f"{np.abs(got - logits).max()=}; {first_difference(source, expected, tokens)}")


@long
@pytest.mark.parametrize("name", FIRST)
def test_greedy_continuations_equal_transformers(name, tmp_path):
    """With caches, in which cross-attention's keys are made once; without; and by Transformers."""
    options = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    for size in SIZES:
        reference, source = random_model(name, tmp_path / str(size), size)
        # Transformers makes no caches for the layers of a decoder that is deeper than its encoder.
        options["use_cache"] = reference.config.num_decoder_layers <= reference.config.num_layers
        with torch.no_grad():
            theirs = reference.generate(**THEIRS, **options, eos_token_id=None).numpy()
        if len(set(theirs[:, 1:].flatten().tolist())) > 4:  # otherwise equality would say little
            break
    else:
        pytest.fail("Transformers repeats a token or two whatever the kernels are")
    model = load_model(source)
    graphdef, state = nnx.split(model)

    @partial(jax.jit, static_argnames="first")
    def step(state, tokens, position, caches, first):
        model = nnx.merge(graphdef, state)
        given = {}
        if first:
            given["encoder_output"] = model.encode(OURS["inputs"], valid=OURS["inputs_valid"]).output
        positions = jnp.full(tokens.shape, position, jnp.int32)
        out = model(tokens, positions=positions, caches=caches, encoder_valid=OURS["inputs_valid"], **given)
        return jnp.argmax(out.logits[:, -1:], axis=-1).astype(jnp.int32), out.caches

    caches = init_cache(model.config, 2, NEW_TOKENS, jnp.float32, source_slots=INPUTS.shape[1])
    found = [jnp.full((2, 1), model.config.decoder_start_id, jnp.int32)]
    for position in range(NEW_TOKENS):
        tokens, caches = step(state, found[-1], position, caches, first=position == 0)
        found.append(tokens)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), theirs)
    at_once = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens, **OURS).logits)
    uncached = jnp.argmax(at_once(state, jnp.asarray(theirs[:, :-1], jnp.int32)), axis=-1)
    np.testing.assert_array_equal(uncached, theirs[:, 1:])


@one_in(2, first=1)
@pytest.mark.parametrize("name", FIRST)
def test_loss_and_gradient_equal_transformers(name, tmp_path, strict_numerics):
    reference, source = random_model(name, tmp_path / "weights")
    graphdef, params = nnx.split(load_model(source))
    start = np.full((2, 1), source.config.decoder_start_id)
    tokens = jnp.asarray(np.concatenate([start, TARGETS[:, :-1]], axis=1), jnp.int32)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(params):
        logits = nnx.merge(graphdef, params)(tokens, **OURS).logits
        loss, count = next_token_loss(logits, jnp.asarray(TARGETS, jnp.int32), jnp.ones(TARGETS.shape, jnp.float32))
        return loss / count

    loss, gradient = loss_and_gradient(params)
    theirs = reference(**THEIRS, labels=torch.tensor(TARGETS)).loss
    theirs.backward()
    np.testing.assert_allclose(loss, theirs.item(), rtol=1e-4)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    expected = saved(name, reference, tmp_path / "gradients")
    leaves = {path: expected.read(path) for path in expected.specs()}
    largest = max(np.abs(leaf).max() for leaf in leaves.values())
    assert {"encoder_relative_bias/table", "relative_bias/table", "encoder_norm/scale"} < leaves.keys()
    for path, leaf in model_leaves(nnx.merge(graphdef, gradient)):
        scale = max(np.abs(leaves[path]).max(), 1e-2 * largest)
        np.testing.assert_allclose(leaf, leaves[path], atol=1e-4 * scale, rtol=0, err_msg=path)


@pytest.mark.parametrize("name", ["t5-gated", "switch-wide-heads-odd-steps"])
def test_transformers_reads_what_we_export(name, tmp_path):
    reference, source = random_model(name, tmp_path / "theirs")
    quiet = Console(quiet=True)
    convert(source.path, tmp_path / "ours", console=quiet)
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "back", console=quiet)
    again, report = type(reference).from_pretrained(
        tmp_path / "back", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    np.testing.assert_array_equal(theirs_of(reference, TARGETS).logits, theirs_of(again.eval(), TARGETS).logits)


@pytest.mark.parametrize("buckets, farthest", [(32, 128), (7, 20), (12, 9), (64, 300), (4, 3)])
def test_buckets_are_those_of_transformers(buckets, farthest):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-farthest, farthest + 1)
    for mask in ("causal", "bidirectional"):
        both_ways = mask == "bidirectional"
        expected = T5Attention._relative_position_bucket(distances, both_ways, buckets, farthest).numpy()
        config = RelativeBiasConfig(buckets=buckets, max_distance=farthest)
        np.testing.assert_array_equal(config.bucket_of_distance(mask), expected, err_msg=mask)


def test_a_difference_is_found_where_it_arises(tmp_path):
    """What a failing test of logits prints names the first layer that is wrong, and which stack it is in."""
    reference, source = random_model("t5", tmp_path)
    with torch.no_grad():
        reference.decoder.block[1].layer[1].EncDecAttention.o.weight *= 1.5
    theirs = theirs_of(reference, TARGETS, output_hidden_states=True)
    found = first_difference(source, theirs, jnp.asarray(TARGETS, jnp.int32))
    errors = {place: float(error) for place, error in (part.rsplit(": ", 1) for part in found.split(", "))}
    assert len(errors) == 4 and list(errors.values())[2] < 1e-5 < 1e-2 < errors["decoder layer 1"], found
    assert max(list(errors.values())[:3]) < 1e-5, found
