"""The model that a user holds: loaded, saved, made anew; and the verbs, functions that make one model of another."""

import dataclasses
import functools
import inspect
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, Unpack, overload

import jax
from flax import nnx
from jax.sharding import Mesh

from moe_jax.api.open_source import check_language_model, open_recipe_model, open_source
from moe_jax.core.errors import InputError, shown
from moe_jax.core.terminal import Bars, progress_bars, shows_work
from moe_jax.core.verb_spec import Option, Spec
from moe_jax.data.tokenizer import Tokenizer, find_tokenizer
from moe_jax.distributed.processes import first_decides, is_first_process
from moe_jax.distributed.sharding import make_mesh, mesh_of
from moe_jax.files.staging import check_target
from moe_jax.files.storage_path import as_path
from moe_jax.generation.alike_layers import join_alike_layers
from moe_jax.generation.arrange import arrange, arranged
from moe_jax.generation.layer_loop import join_for_loop, loops
from moe_jax.model_io.in_memory import DecoderLeaves, InMemory, ModelInMemory, differing_leaves, open_writer
from moe_jax.model_io.loading import abstract_model, dtype_for_generation, load_model
from moe_jax.model_io.model_source import ModelLike, ModelSource
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn import Decoder, DecoderOutput
from moe_jax.nn.decoder import CallInputs
from moe_jax.nn.inputs import Ids
from moe_jax.peft.trained import parameter_sizes
from moe_jax.training.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Loading:
    """The options of `load`: how weights become a decoder.

    Attributes:
      dtype, compute_dtype, remat, mesh, stacked: as in `load`.
      arranged: whether arrays are arranged for a CPU to generate with (`generation.arrange`), and layers that are alike
        joined (`generation.alike_layers`).
      joined: whether such layers are joined on one CPU, and nothing else is done, for a model that only scores.
    """

    dtype: str | None = None
    compute_dtype: str = "float32"
    remat: str = "none"
    mesh: Mesh | None = None
    stacked: bool = True
    arranged: bool = False
    joined: bool = False

    @classmethod
    def for_generation(
        cls,
        source: ModelSource,
        *,
        compute_dtype: str = "float32",
        mesh: Mesh | None = None,
        rows: int | None = None,
    ) -> "Loading":
        """Returns the options for a model that does nothing but generate.

        Args:
          source, compute_dtype, mesh: as in `load_model`.
          rows: that are generated together at most; None: not known.
        """
        dtype = dtype_for_generation(source, compute_dtype, mesh, rows=rows)
        config = source.config if dtype is None else dataclasses.replace(source.config, dtype=dtype)
        stacked = mesh is None and loops(arranged(abstract_model(config, compute_dtype=compute_dtype)))
        return cls(dtype=dtype, compute_dtype=compute_dtype, mesh=mesh, stacked=stacked, arranged=mesh is None)


class Model:
    """A model: a decoder, its tokenizer, and its lineage.

    `load` and every verb return one, and every verb takes one. The result of a verb that was given `out` lies in that
    directory until its decoder is asked for; any other lies in memory.

        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> model = moe_jax.Model(moe_jax.Decoder(moe_jax.tiny_model().config, rngs=nnx.Rngs(0)))
        >>> model
        Model(llama, 2 layers of width 16, dense, 6,736 parameters, vocabulary 64)
        >>> model(jnp.zeros((1, 5), jnp.int32)).logits.shape
        (1, 5, 64)

    It may be given to `jax.jit` and the like: its arrays are the leaves, of which a new shape compiles anew.

        >>> jax.jit(lambda model, tokens: model(tokens).logits)(model, jnp.zeros((1, 5), jnp.int32)).shape
        (1, 5, 64)

    Attributes:
      base: the model on the disk that the adapters of this one belong to; None if all of its weights are its own.
      lineage: how it was made, one entry per command, the latest at the end; figures are under `measured`.
      tokenizer_files: files that go wherever the model goes; copied when it is saved.
      loading: how the decoder was, or will be, loaded.
      report: the result of the verb that made the model, such as `Upcycled` or `Merged`; None: it was loaded.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        tokenizer_files: Sequence[str | os.PathLike[str]] = (),
        lineage: Sequence[Mapping[str, Any]] = (),
    ):
        """Keeps a reference to a decoder, so that later changes of it change the model."""
        self.base: ModelSource | None = None
        self.lineage = [dict(entry) for entry in lineage]
        self.tokenizer_files = tokenizer_files
        self._decoder: Decoder | None = decoder
        self._source: ModelSource | None = None
        self.loading = Loading()
        self.report: Any = None

    @classmethod
    def of_source(cls, source: ModelSource, loading: Loading = Loading(), report: Any = None) -> "Model":
        """Returns a model whose weights are read when they are asked for."""
        model = cls.__new__(cls)
        model.base = None if isinstance(source.base, ModelInMemory) else source.base
        model.lineage = [dict(entry) for entry in source.lineage]
        model.tokenizer_files = source.tokenizer_files
        model._decoder, model._source, model.loading = None, source, loading
        model.report = report
        return model

    @property
    def decoder(self) -> Decoder:
        """The NNX module; call it with token ids for logits, train it, change it."""
        return self.read()

    def read(self) -> Decoder:
        """Reads the weights, unless that was done before; returns the decoder."""
        if self._decoder is None:
            assert self._source is not None
            loading = self.loading
            self._decoder = load_model(
                self._source,
                param_dtype=loading.dtype,
                compute_dtype=loading.compute_dtype,
                remat=loading.remat,
                mesh=loading.mesh,
                stacked=loading.stacked,
            )
            if loading.arranged:
                arrange(self._decoder)
                join_for_loop(self._decoder)
            elif loading.joined:
                join_alike_layers(self._decoder)
            if loading.dtype is not None:
                self._decoder.config = dataclasses.replace(self._decoder.config, dtype=loading.dtype)
            # From here on the decoder is the model: it may be changed.
            self._source = None
        return self._decoder

    def __call__(self, tokens: Ids | None = None, **given: Unpack[CallInputs]) -> DecoderOutput:
        """Calls the decoder; arguments as in `Decoder`."""
        return self.decoder(tokens, **given)

    def split(self) -> tuple[nnx.GraphDef, nnx.State]:
        """Returns the decoder as `nnx.split` does: what to compute, and the arrays, for pure functions under `jax.jit`.

        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> graphdef, state = moe_jax.tiny_model().split()
        >>> logits = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens).logits)
        >>> logits(state, jnp.zeros((1, 5), jnp.int32)).shape
        (1, 5, 64)
        """
        return nnx.split(self.decoder)

    @property
    def config(self) -> ModelConfig:
        """The complete description of the decoder."""
        return self.source.config if self._decoder is None else self._decoder.config

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """The files that go wherever the model goes; what is set takes the place of all."""
        return self._tokenizer_files

    @tokenizer_files.setter
    def tokenizer_files(self, files: Sequence[str | os.PathLike[str]]) -> None:
        """Takes other files, of which the tokenizer is made anew."""
        self._tokenizer_files = tuple(as_path(file) for file in files)
        self.__dict__.pop("tokenizer", None)

    @property
    def source(self) -> ModelSource:
        """The weights, one leaf per parameter and layer, as verbs read them."""
        files, lineage, made = self.tokenizer_files, self.lineage, self._source
        if self._decoder is not None:
            config, leaves = self._decoder.config, DecoderLeaves(self._decoder)
            return ModelInMemory(config, leaves, tokenizer_files=files, lineage=lineage, base=self.base)
        assert made is not None
        if isinstance(made, ModelInMemory):
            # A verb made it; files may have been set since.
            where = {"base": made.base, "path": made.path}
            return ModelInMemory(made.config, made.leaves, tokenizer_files=files, lineage=lineage, **where)
        return made

    @property
    def path(self) -> Path | None:
        """The directory that the weights are in; None if they are in memory."""
        return None if isinstance(self.source, ModelInMemory) else self.source.path

    @property
    def mesh(self) -> Mesh | None:
        """The devices that the decoder is split over; None: it is on one."""
        return mesh_of(nnx.state(self.decoder))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """`encode`, `decode`; None if the model came without a tokenizer.json."""
        file = next((file for file in self.tokenizer_files if file.name == "tokenizer.json"), None)
        return None if file is None else Tokenizer(file, self.config)

    def __repr__(self) -> str:
        config = self.config
        layers = f"{config.num_layers} layers of width {config.d_model}"
        kind = f"MoEs in {len(config.moe_layers)}" if config.moe_layers else "dense"
        sizes = f"{sum(parameter_sizes(config).values()):,} parameters, vocabulary {config.vocab_size:,}"
        return f"Model({config.family}, {layers}, {kind}, {sizes})"


def _arrays_of(model: Model) -> tuple[tuple[nnx.State], nnx.GraphDef]:
    graphdef, state = model.split()
    return (state,), graphdef


def _with_arrays(graphdef: nnx.GraphDef, states: Sequence[nnx.State]) -> Model:
    return Model(nnx.merge(graphdef, *states))


# What a program returns is the decoder alone: neither files of the tokenizer nor a lineage are arrays.
jax.tree_util.register_pytree_node(Model, _arrays_of, _with_arrays)

ModelOrPath = Model | str | os.PathLike[str]
OutPath = str | os.PathLike[str] | None


def load(
    model: ModelOrPath | Recipe,
    *,
    dtype: str | None = None,
    compute_dtype: str = "float32",
    remat: str = "none",
    mesh: Mesh | Mapping[str, int] | None = None,
    base: str | os.PathLike[str] | None = None,
    stacked: bool = True,
) -> Model:
    """Reads a model: a model directory, an adapter directory with its base, or a Hugging Face directory.

        >>> saved = moe_jax.save(moe_jax.tiny_model(), folder / "model")
        >>> moe_jax.load(saved, compute_dtype="bfloat16").decoder.compute_dtype
        dtype(bfloat16)

    Args:
      model: the directory; or a model, to be loaded in another way; or a recipe: the model that it trains, as training
        begins with it, drawn or read, on the recipe's mesh and in its dtypes. The recipe then has all options.
      dtype: `float32`, `bfloat16` or `float16` for all floating-point parameters; None: as they are stored (the widest,
        where layers that are stacked differ).
      compute_dtype: dtype of the activations.
      remat: the values that the backward pass computes again instead of keeping them: `none`, every layer (`full`), or
        every layer but its matrix products (`dots`).
      mesh: devices to split the parameters over, or the sizes of the axes `data`, `fsdp`, `expert` and `tensor`, one
        of which may be -1 for the devices that are left; None: the first device.
      base: where the base of an adapter directory is now; by default where the directory says.
      stacked: equal layers are stacked, and scanned, which compiles fast; False: every layer has arrays of its own.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if it is no model, or its weights are not those that its config describes; for a recipe as `train`.
    """
    if isinstance(model, Recipe):
        if (dtype, compute_dtype, remat, mesh, base, stacked) != (None, "float32", "none", None, None, True):
            raise InputError(
                "a recipe says how its model is loaded: set what you want in its section [model] or [mesh]"
            )
        return _load_to_train(model)
    if isinstance(mesh, Mapping):
        mesh = make_mesh(dict(mesh))
    loaded = Model.of_source(open_model(model, base), Loading(dtype, compute_dtype, remat, mesh, stacked))
    loaded.read()
    return loaded


def _load_to_train(recipe: Recipe) -> Model:
    from moe_jax.training.program import initial_model  # with Optax and Grain, which other models are loaded without

    source, config = open_recipe_model(recipe, begins=True)
    model = Model(initial_model(recipe, config, source))
    if source is not None:
        model.tokenizer_files = source.tokenizer_files
        if recipe.model.init == "checkpoint":
            model.lineage, model.base = [dict(entry) for entry in source.lineage], source.base
    return model


def save(model: Model, path: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> Path:
    """Writes a model directory. It appears whole or not at all.

    For a model with adapters over a base on the disk it writes an adapter directory: the adapters, the leaves of the
    base that were changed, and a reference to the base. Set `model.base = None` before to write all weights.

        >>> moe_jax.save(moe_jax.tiny_model(), folder / "model").name
        'model'

    Its `params/state` holds one array per parameter and layer, and Orbax alone reads it:

        >>> import orbax.checkpoint as ocp
        >>> tree = ocp.StandardCheckpointer().restore(folder / "model" / "params" / "state")
        >>> tree["layers"]["1"]["mlp"]["up"]["kernel"].shape
        (16, 32)

    Args:
      model: the model to write.
      path: where the directory appears; must not exist.
      allow_nonfinite: go on where weights are NaN or infinite.

    Returns:
      `path`.

    Raises:
      InputError: if there is something at `path`, a tokenizer file is gone, or weights are not finite.
      OSError: if the disk is full. Nothing is left at `path` then.
    """
    if not isinstance(model, Model):
        raise InputError(f"save() writes a moe_jax.Model, not a {type(model).__name__}; of a decoder, Model(decoder)")
    path = as_path(path)
    check_target(path, buckets=True)
    source, base = model.source, model.base
    changed = [] if base is None else differing_leaves(source, base)
    writer = open_writer(
        path,
        source.config,
        base=base,
        trained=changed,
        tokenizer_files=model.tokenizer_files,
        lineage=model.lineage,
        allow_nonfinite=allow_nonfinite,
    )
    with writer:
        for leaf in writer.expected:
            writer.write({leaf: source.read(leaf)})
    return path


def tiny_model(*, experts: int = 0, top_k: int = 2, seed: int = 0) -> Model:
    """Makes a Llama-like model of some thousand random weights, to try things on: 2 layers of width 16, 64 tokens.

        >>> moe_jax.tiny_model(experts=4)
        Model(llama, 2 layers of width 16, MoEs in 2, 16,080 parameters, vocabulary 64)

    Args:
      experts: number of experts in the MoE of each layer; 0: the model is dense.
      top_k: number of experts that a token goes to.
      seed: seed of the weights.
    """
    ffn = FFNConfig(dim=32)
    mlp = MoEConfig(expert=ffn, num_experts=experts, top_k=top_k) if experts else ffn
    layer = LayerConfig(attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8), mlp=mlp)
    config = ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=(layer, layer))
    return Model(Decoder(config, rngs=nnx.Rngs(seed)))


def open_model(model: ModelLike, base: str | os.PathLike[str] | None = None, *, towers: bool = False) -> ModelSource:
    """Returns the weights of a model or of a path.

    Args:
      model: the model or the path.
      base: the path now of an adapter directory's base.
      towers: whether it may be an image encoder.

    Raises:
      FileNotFoundError, InputError: as in `load`.
    """
    if isinstance(model, str | os.PathLike):
        return open_source(os.fspath(model), base=None if base is None else os.fspath(base), towers=towers)
    if base is not None:
        raise InputError("base: where the base of an adapter directory is; the model is not the path of one")
    if not hasattr(model, "source"):
        raise TypeError(f"expected a model or the path of one, got {shown(model)}")
    if not towers:
        check_language_model(model.source.config, model.source.path)
    return model.source


def tokenizer_of_source(source: ModelSource) -> Tokenizer:
    """Returns the tokenizer that lies with a model; raises `InputError` or `FileNotFoundError` if there is none."""
    return Tokenizer(find_tokenizer(source.tokenizer_files, source.path), source.config)


def destination(out: str | os.PathLike[str] | None) -> Path | InMemory:
    """Returns where a verb leaves its result: at `out`, or in memory if that is None.

    Raises:
      InputError: if there is something at `out`. This is checked before a large model is opened, which takes a while.
    """
    if out is None:
        return InMemory()
    path = as_path(out)
    first_decides(lambda: check_target(path, buckets=True))
    return path


def result(destination: Path | InMemory, given: ModelOrPath, report: Any = None) -> Model:
    """Returns the model that a verb left at a destination, loaded with the options of the model that it was given."""
    loading = given.loading if isinstance(given, Model) else Loading()
    if isinstance(destination, Path):
        source = open_source(destination, towers=True)
    else:
        assert destination.source is not None
        source = destination.source
    return Model.of_source(source, dataclasses.replace(loading, dtype=None), report)


P = ParamSpec("P")
S = TypeVar("S", bound=Spec)
S_contra = TypeVar("S_contra", bound=Spec, contravariant=True)


class ModelVerb(Protocol[P, S_contra]):  # pyright: ignore[reportInvalidTypeVarUse]
    """A verb that turns one model into another; `P` are the options of its spec."""

    @overload
    def __call__(self, model: ModelOrPath, out: OutPath, spec: S_contra, /) -> Model: ...
    @overload
    def __call__(self, model: ModelOrPath, out: OutPath = None, *args: P.args, **kwargs: P.kwargs) -> Model: ...


class FileVerb(Protocol[P, S_contra]):  # pyright: ignore[reportInvalidTypeVarUse]
    """A verb that writes a model for other programs; `P` are the options of its spec."""

    @overload
    def __call__(self, model: ModelOrPath, out: str | os.PathLike[str], spec: S_contra, /) -> Path: ...
    @overload
    def __call__(self, model: ModelOrPath, out: str | os.PathLike[str], *args: P.args, **kwargs: P.kwargs) -> Path: ...


def model_verb(spec: Callable[P, S]) -> Callable[[Callable[[ModelOrPath, OutPath, S], Model]], ModelVerb[P, S]]:
    """Decorates `do(model, out, spec)`, so that it is also called with the options of the spec as keywords."""
    return lambda do: with_options(spec, do, out=None)


def file_verb(
    spec: Callable[P, S],
) -> Callable[[Callable[[ModelOrPath, str | os.PathLike[str], S], Path]], FileVerb[P, S]]:
    """Decorates `do(model, out, spec)` as `model_verb` does, for a verb that requires `out`."""
    return lambda do: with_options(spec, do)


def work_bars() -> AbstractContextManager[Bars]:
    """Returns the progress bars of a verb: shown in a command, by the first process only."""
    return progress_bars(shown=shows_work() and is_first_process())


def with_options(spec: Any, do: Callable[..., Any], *, out: Any = inspect.Parameter.empty) -> Any:
    """Makes a verb of `do(model, second, spec)` that also takes the options of the spec as keywords."""
    first, second, _ = inspect.signature(do).parameters.values()
    parameters = [first, second.replace(default=out), *spec.parameters()]
    name, names, required = spec.verb(), (first.name, second.name, "spec"), 2 if out is inspect.Parameter.empty else 1

    @functools.wraps(do)
    def verb(*given: Any, **options: Any) -> Any:
        if len(given) > len(names):
            raise TypeError(
                f"{name}() takes {', '.join(names)}, and options by their names; got {len(given)} arguments"
            )
        places = dict(zip(names, given, strict=False))
        if twice := places.keys() & options.keys():
            raise TypeError(f"{name}() got two values for {' and '.join(sorted(twice))}")
        places |= {place: options.pop(place) for place in names if place in options}
        missing = [place for place in names[:required] if place not in places]
        if missing:
            but = f"; it has no option {', '.join(options)}" if options else ""
            raise TypeError(f"{name}() is missing {' and '.join(missing)}{but}")
        for place in names[:2]:
            if isinstance(places.get(place), Spec | Mapping):
                raise TypeError(f"{name}(): {place} is a {type(places[place]).__name__}; a spec is the third argument")
        made = places.get("spec")
        if made is None:
            made = spec.of(options)
        elif options or not isinstance(made, spec):
            wrong = f"also {', '.join(options)}" if options else f"a {type(made).__name__}"
            raise InputError(f"{name}() takes the spec {spec.__name__} or its fields as keywords; got {wrong}")
        return do(places[first.name], places.get(second.name), made)

    returned = inspect.signature(do).return_annotation
    verb.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # pyright: ignore[reportAttributeAccessIssue]
    verb.__doc__ = _documented(inspect.getdoc(do) or "", spec.list_options())
    return verb


def _documented(text: str, options: list[Option]) -> str:
    """Returns the docstring of a verb, with its options instead of its spec among the arguments."""
    lines = [
        textwrap.fill(
            f"{option.name}: {option.text}", 118, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
        for option in options
    ]
    head, found, tail = text.partition("\n  spec: ")
    return f"{head}\n{chr(10).join(lines)}\n{tail.partition(chr(10))[2]}" if found else text
