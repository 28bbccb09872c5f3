"""Distillation in chunks is that of all logits at once, in float64: values and gradients, whatever head and mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import make_mesh
from moe_jax.functional.cross_entropy import (
    Distillation,
    TeacherArrays,
    distilled_cross_entropy,
    weighted_cross_entropy,
)
from moe_jax.functional.head_chunks import HeadOptions, LossAxes
from tests.functional.test_cross_entropy import assert_alike, operands
from tests.support.jaxprs import equations
from tests.support.numerics import normal
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

WIDTH, VOCABULARY = 6, 11


def of_teacher(options, shape, *, width=8, seed=50):
    batch, length, _, vocabulary = shape
    kernel = normal(seed, *((vocabulary, width) if options.transposed else (width, vocabulary)))
    return TeacherArrays(normal(seed + 1, batch, length, width), kernel, normal(seed + 2, vocabulary))


def reference(options, mixing, x, kernel, bias, targets, weights, teacher):
    """Losses and the gradients of x, kernel and bias, by formulas, in float64."""

    def logits_of(head, x, kernel, bias):
        kernel = np.float64(kernel).T if head.transposed else np.float64(kernel)
        raw = (np.float64(x).reshape(-1, x.shape[-1]) @ kernel + (0 if bias is None else np.float64(bias))) * head.scale
        if head.soft_cap is None:
            return raw, np.ones_like(raw), kernel
        bent = np.tanh(raw / head.soft_cap)
        return bent * head.soft_cap, 1 - bent**2, kernel

    def log_shares(logits):
        shifted = logits - logits.max(1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))

    logits, inner, matrix = logits_of(options, x, kernel, bias)
    right, _, _ = logits_of(mixing.head, *teacher)
    t, share, each = mixing.temperature, mixing.weight, np.float64(weights).reshape(-1)
    log_p, log_q = log_shares(logits / t), log_shares(right / t)
    divergence = t**2 * (np.exp(log_q) * (log_q - log_p)).sum(1)
    aims = np.asarray(targets).reshape(-1)
    cross_entropy = -log_shares(logits)[np.arange(len(aims)), aims]
    of_targets = np.exp(log_shares(logits)) - np.eye(logits.shape[1])[aims]
    slope = share * t * (np.exp(log_p) - np.exp(log_q)) + (1 - share) * of_targets
    slope = slope * each[:, None] * inner * options.scale
    of_kernel = np.float64(x).reshape(-1, x.shape[-1]).T @ slope
    total = (each * (share * divergence + (1 - share) * cross_entropy)).sum()
    gradients = (slope @ matrix.T).reshape(x.shape), of_kernel.T if options.transposed else of_kernel, slope.sum(0)
    return (total, (each * cross_entropy).sum(), (each * divergence).sum()), gradients


@partial(jax.jit, static_argnames=("options", "mixing"))
def value_and_gradients(x, kernel, bias, targets, weights, teacher, *, options, mixing):
    def value(x, kernel, bias):
        # The cotangent is not 1.
        losses = distilled_cross_entropy(options, mixing, x, kernel, bias, targets, weights * jnp.float32(0.5), teacher)
        return losses.total * jnp.float32(2), losses

    (_, losses), gradients = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)(x, kernel, bias)
    return tuple(one * jnp.float32(2) for one in losses), gradients


CASES = [
    (14, HeadOptions(), HeadOptions(), 1.0, 1.0),
    (4, HeadOptions(scale=0.3, soft_cap=2.0), HeadOptions(transposed=True), 0.3, 2.0),
    (2, HeadOptions(transposed=True), HeadOptions(scale=0.5, soft_cap=1.5), 1.0, 3.0),
    (1, HeadOptions(transposed=True, soft_cap=1.5), HeadOptions(), 0.9, 0.5),
]


@pytest.mark.parametrize(("chunk", "options", "head", "weight", "temperature"), CASES)
def test_values_and_gradients_are_those_of_the_formulas(chunk, options, head, weight, temperature):
    shape = (2, 7, WIDTH, VOCABULARY)
    # Two arrays of logits share what a chunk may take.
    options, mixing = options._replace(logit_bytes=2 * chunk * 4 * VOCABULARY), Distillation(weight, temperature, head)
    given = *operands(shape, options), of_teacher(head, shape)
    assert_alike(value_and_gradients(*given, options=options, mixing=mixing), reference(options, mixing, *given))


def test_the_result_does_not_depend_on_the_chunk():
    shape, mixing = (2, 24, 8, 31), Distillation(0.7, 2.0, HeadOptions())
    given = *operands(shape, HeadOptions()), of_teacher(HeadOptions(), shape)
    found = [
        value_and_gradients(*given, options=HeadOptions(logit_bytes=2 * chunk * 4 * 31), mixing=mixing)
        for chunk in (48, 5, 1)
    ]
    for one in found[1:]:
        assert_alike(one, found[0], rtol=2e-6)


def test_no_array_has_the_logits_of_all_tokens():
    shape, mixing = (2, 8, WIDTH, VOCABULARY), Distillation(0.5, 1.0, HeadOptions())
    given = *operands(shape, HeadOptions()), of_teacher(HeadOptions(), shape)

    def largest(chunk):
        options = HeadOptions(logit_bytes=2 * chunk * 4 * VOCABULARY)
        program = jax.make_jaxpr(partial(value_and_gradients, options=options, mixing=mixing))(*given)
        shapes = [v.aval.shape for equation in equations(program) for v in equation.outvars]
        return max(shape[0] for shape in shapes if len(shape) == 2 and shape[1] == VOCABULARY)

    assert largest(16) == 16 and largest(8) <= 8


def test_a_teacher_that_says_the_same_teaches_nothing_and_a_part_of_it_the_rest():
    shape, head = (2, 7, WIDTH, VOCABULARY), HeadOptions()
    x, kernel, bias, targets, weights = operands(shape, head)
    same = TeacherArrays(x, kernel, bias)
    given = x, kernel, bias, targets, weights, same
    losses, gradients = value_and_gradients(*given, options=head, mixing=Distillation(1.0, 2.0, head))
    assert abs(float(losses[0])) < 1e-6 and abs(float(losses[2])) < 1e-6 < float(losses[1])
    assert max(float(jnp.abs(one).max()) for one in gradients) < 1e-6
    half, slopes = value_and_gradients(*given, options=head, mixing=Distillation(0.5, 2.0, head))
    alone = jax.jit(jax.grad(partial(weighted_cross_entropy, head), argnums=(0, 1, 2)))(
        x, kernel, bias, targets, weights
    )
    assert_alike(slopes, [one * jnp.float32(0.5) for one in alone])
    np.testing.assert_allclose(half[0], 0.5 * half[1], rtol=1e-5)


MESHES = [
    ({"data": 2, "fsdp": 2, "tensor": 2}, LossAxes(("data", "fsdp", "expert"), None, ("fsdp",), "tensor")),
    ({"expert": 2, "fsdp": 2, "sequence": 2}, LossAxes(("data", "fsdp", "expert"), "sequence", ("fsdp", "sequence"))),
]


@one_in(2)
@pytest.mark.parametrize(("sizes", "axes"), MESHES)
def test_values_and_gradients_over_a_mesh(sizes, axes):
    shape = (8, 6, 8, 24)
    options = HeadOptions(scale=0.5, soft_cap=4.0, logit_bytes=2 * 3 * 4 * 24)
    # The width of the teacher is one that fsdp does not divide.
    head = HeadOptions(transposed=True, axes=axes._replace(width=()))
    mixing = Distillation(0.6, 2.0, head)
    given = *operands(shape, options), of_teacher(head, shape, width=7)
    expected = reference(options, mixing, *given)
    mesh = make_mesh(sizes)
    rows = P(("data", "fsdp", "expert"))
    specs = (rows, P("fsdp", "tensor"), P("tensor"), rows, P(), TeacherArrays(rows, P("tensor", None), P("tensor")))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, shardings)
        found = value_and_gradients(*placed, options=options._replace(axes=axes), mixing=mixing)
    assert_alike(found, expected)
