"""A model whose residual stream is rotated, which computes the same (methods.md 4).

With an orthogonal Q, activations x between layers become x Q: embeddings and the kernels that write to the stream are
multiplied by Q from the right, those that read from it by Q^T from the left, and the scales of RMSNorms, which do not
commute with Q, are first folded into the kernels behind them (SliceGPT, Ashkboos et al., 2024, arXiv 2401.15024,
section 3.1). RMSNorm itself sees lengths alone. Few large entries, which cost all others of their group precision when
they are rounded, are spread over all (QuaRot, arXiv 2404.00456, section 4). Values of attention heads are rotated in
the same way, each head in itself, and back in the map behind them. Rotations within a computation, which QuaRot has
besides for activations in few bits, are left out: models stay what they are. SpinQuant (arXiv 2405.16406) learns Q;
here it is drawn.

Q is a Hadamard matrix of the largest power of two in d, its Kronecker product with a random orthogonal matrix for the
rest, and random signs.
"""

import dataclasses
import hashlib
import re

import jax
import numpy as np
from jaxtyping import Float

from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.model_io.model_source import ChangedSource, ModelSource
from moe_jax.model_io.tuned_base import is_tuned
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.models.linear_codes import EMBEDDING, HEAD_KERNEL
from moe_jax.models.own_parts import BLOCK, LINEAR

FINAL_NORM = "final_norm/scale"
_ROLES = {EMBEDDING: "writes", HEAD_KERNEL: "head", FINAL_NORM: "norm", "lm_head/bias": "other"}
_FFN, _MIXER = r"(?:experts/|universal/)?(?:gate|up)", r"q|k|v|gate|q_down|kv_down|beta|decay|in_gate|out_gate"
# What a leaf below a layer does: kernels read from the stream, or write to it; others see it only through these.
_ROLES_IN_LAYER = {
    "norm": re.compile(r"(?:attention|mlp)_norm/scale"),
    "reads": re.compile(
        rf"attention/(?:(?:{_MIXER})/kernel|indexer/(?:k|weights))|mlp/(?:{_FFN}|router|router/universal)/kernel"
    ),
    "writes": re.compile(r"(?:attention/o|mlp/(?:experts/|universal/)?down)/(?:kernel|bias)"),
    "values": re.compile("attention/v/bias"),
    "other": re.compile(
        rf"attention/(?:(?:q_up|kv_up)/kernel|(?:{_MIXER})/bias|(?:(?:q|k|kv)_)?norm/scale|sinks|log_rate|rate_bias|skip"
        rf"|indexer/(?:q|k_bias|k_scale)|(?:[qkv]_)?conv(?:_bias)?)|mlp/(?:{_FFN})/bias"
        r"|mlp/router/(?:bias|selection_bias|expert_scale)|output_scale"
    ),
}
_OF_VALUES = re.compile(r"layers/(\d+)/attention/(?:v/kernel|v/bias|o/kernel)")


@dataclasses.dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix `diag(signs) (small ⊗ H)` of width m * 2^k, H a Hadamard matrix divided by sqrt(2^k)."""

    signs: Float[np.ndarray, " d"]
    small: Float[np.ndarray, "m m"]

    @classmethod
    def drawn(cls, width: int, seed: int) -> "Rotation":
        """Draws the rotation of a width; float32."""
        random = np.random.default_rng((seed, width))
        rest = width // (width & -width)
        q, r = np.linalg.qr(random.standard_normal((rest, rest)))
        signs = random.choice(np.array([-1, 1], np.float32), width)
        return cls(signs, (q * np.sign(np.diagonal(r))).astype(np.float32))

    def __call__(self, rows: Float[np.ndarray, "*n d"]) -> Float[np.ndarray, "*n d"]:
        """Returns rows times the matrix, float32; a fast Walsh-Hadamard transform."""
        parts = (rows.astype(np.float32) * self.signs).reshape(*rows.shape[:-1], len(self.small), -1)
        parts = np.einsum("...mh,mn->...nh", parts, self.small, optimize=True)
        count, half = parts.shape[-1], 1
        while half < count:
            pairs = parts.reshape(*parts.shape[:-1], -1, 2, half)
            both = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
            parts, half = both.reshape(parts.shape), 2 * half
        return parts.reshape(rows.shape) / np.float32(np.sqrt(count))

    def from_left(self, matrix: Float[np.ndarray, "d o"]) -> Float[np.ndarray, "d o"]:
        """Returns the transposed matrix of the rotation times a matrix."""
        return np.ascontiguousarray(self(np.ascontiguousarray(matrix.T)).T)


def check_rotatable(config: ModelConfig) -> None:
    """Raises `InputError` for a model whose residual stream cannot be rotated: what it has that does not commute."""

    def refuse(what: str) -> None:
        raise InputError(f"--rotate: {what}, which a rotation of the residual stream would change; leave it out")

    config.check_no_encoder("--rotate")
    config.check_no_further("--rotate")
    if config.norm not in ("rms", "rms_plus_one"):
        refuse(f"the model has norm={config.norm!r}")
    if config.learned_positions or config.vision is not None or config.patches is not None:
        refuse("the model has learned positions or pictures")
    if config.num_classes is not None:
        refuse("the model scores classes")
    if is_tuned(config):
        refuse("the model has adapters, LoRA or NF4 kernels")
    for i, layer in enumerate(config.layers):
        if (found := _not_rotated(layer)) is not None:
            refuse(f"layer {i} has {found}")


def _not_rotated(layer: LayerConfig) -> str | None:
    if layer.norm_position != "pre":
        return f"norm_position={layer.norm_position!r}"
    if layer.branch_scales or layer.parallel or layer.norms_inside:
        return "branch scales, or attention and FFN in parallel, or norms inside its MoE"
    if layer.module != BLOCK:
        return f"the module {layer.module!r}"
    if isinstance(layer.mlp, MoEConfig):
        if layer.mlp.router != LINEAR or layer.mlp.universal == "coder":
            return "a router that is not linear"
        if layer.mlp.bank.has_base or layer.mlp.bank.form.over_base:
            return f"experts that are {layer.mlp.bank.form.describe()}"
    return None


class RotatedSource(ChangedSource):
    """Another source's model, rotated when leaves are read: its logits are the same, but for rounding.

    Leaves keep their dtypes. Norms get scales of 1 (or 0, where their factors are `1 + scale`). A head that is tied to
    the embedding gets a kernel of its own. Memory holds a leaf.
    """

    def __init__(self, source: ModelSource, seed: int = 0):
        """Reads no weights yet; raises `InputError` for a model that cannot be rotated."""
        check_rotatable(source.config)
        super().__init__(source, dataclasses.replace(source.config, tie_embeddings=False))
        self._seed = seed
        self._stream = Rotation.drawn(source.config.d_model, seed)
        for path in source.specs():
            self._role(path)  # says which is not known

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        found = dict(self._source.specs())
        if self._source.config.tie_embeddings:
            tied = found[EMBEDDING]
            found[HEAD_KERNEL] = jax.ShapeDtypeStruct(tied.shape[::-1], tied.dtype)
        return found

    def stored_bytes(self, path: str) -> int:
        if path == HEAD_KERNEL and self._source.config.tie_embeddings:
            return 0
        return self._source.stored_bytes(path)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._source.fingerprint()} rotated {self._seed}".encode()).hexdigest()

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf and rotates it; raises `InputError` if it cannot be read, or is too large for its dtype."""
        if path == HEAD_KERNEL and self._source.config.tie_embeddings:
            return self._each(HEAD_KERNEL, self._source.read(EMBEDDING).T)
        return self._each(path, self._source.read(path))

    def _each(self, path: str, leaf: np.ndarray) -> np.ndarray:
        """A leaf rotated, in its dtype; of stacked kernels one after another."""
        role = self._role(path)
        if role == "other":
            return leaf
        if role == "norm":
            return np.full_like(leaf, 1 - self._unit)
        kernels = leaf[None] if leaf.ndim < 3 else leaf
        made = np.empty(kernels.shape, leaf.dtype)
        scales = self._scales_before(path) if role in ("reads", "head") else None
        for own, kernel in zip(made, kernels, strict=True):
            own[...] = cast(path, self._rotated(path, role, kernel.astype(np.float32), scales), leaf.dtype)
        return made.reshape(leaf.shape)

    def _rotated(self, path: str, role: str, kernel: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        heads = self._of_heads(path)
        if heads is not None and role == "writes" and kernel.ndim == 2:
            kernel = _by_head(heads, kernel.T).T
        elif heads is not None and role != "writes":
            kernel = _by_head(heads, kernel)
        if role == "values":  # a bias of the map `v`
            return kernel
        if scales is None:
            return self._stream(kernel)
        return self._stream.from_left(kernel * scales[:, None])

    def _scales_before(self, path: str) -> np.ndarray | None:
        """The factors of the norm before a kernel that reads from the stream; None: there is no norm."""
        if path == HEAD_KERNEL:
            norm = FINAL_NORM if self.config.final_norm else None
        else:
            _, layer, branch, _ = path.split("/", 3)
            norm = f"layers/{layer}/{branch}_norm/scale"
        if norm is None:
            return np.ones(self.config.d_model, np.float32)
        return self._source.read(norm).astype(np.float32) + np.float32(self._unit)

    @property
    def _unit(self) -> int:
        """The number that a norm adds to its scales."""
        return 1 if self.config.norm == "rms_plus_one" else 0

    def _of_heads(self, path: str) -> Rotation | None:
        """The rotation of every head's values, of a leaf that makes or takes them; None: they are not rotated."""
        found = _OF_VALUES.fullmatch(path)
        attention = None if found is None else self.config.layers[int(found[1])].attention
        if not isinstance(attention, AttentionConfig) or attention.latent is not None:
            return None
        # Entries of values would be cut off, normed, or multiplied by others.
        if attention.values_are_keys or attention.value_norm or attention.output_gate or attention.clip_qkv:
            return None
        return Rotation.drawn(attention.head_dim, self._seed)

    def _role(self, path: str) -> str:
        """How a leaf is rotated; `InputError` for one of which that is not known."""
        if path in _ROLES:
            return _ROLES[path]
        _, _, below = path.partition("/")[2].partition("/")
        if path.startswith("layers/"):
            for role, pattern in _ROLES_IN_LAYER.items():
                if pattern.fullmatch(below):
                    return "other" if role == "values" and self._of_heads(path) is None else role
        raise InputError(f"--rotate: it is not known how a rotation changes {path} of {self.path}; leave it out")


def _by_head(rotation: Rotation, values: Float[np.ndarray, "*n w"]) -> Float[np.ndarray, "*n w"]:
    """Rows of the values of all heads, those of every head rotated."""
    return rotation(values.reshape(*values.shape[:-1], -1, len(rotation.signs))).reshape(values.shape)
