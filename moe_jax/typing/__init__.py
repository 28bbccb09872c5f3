"""Types for annotations: what verbs take, and the parts of what they return.

    >>> def halved(model: moe_jax.typing.ModelOrPath) -> moe_jax.Model:
    ...     return moe_jax.compress(model, method="quantize", bits=8)

Names are imported when they are first asked for: importing this module imports no JAX.

Arguments of verbs:
    ModelOrPath, ModelLike           a model or its path, also of one that is read leaf by leaf
    OutPath, Destination, InMemory   where the result goes; None or `InMemory`: into memory
    RecipeOrPath                     of `train`
    Prompt, Message                  of `generate`: a text, tokens or a conversation of messages
    Text, Texts, Examples            of `evaluate` and `classify`
    CalibrationSources               of `compress` and `export`: what is calibrated on
    Kernels                          of `compress_experts`
    Progress                         called with what is done, how much, and of how much

Parts of a model:
    Loading                          the options of `load`
    ModelSource, HoldsSource         weights that are read leaf by leaf, and what has them
    ModelInMemory, StoredLeaves      of a model in memory; leaves that can be read
    Tokenizer                        `Model.tokenizer`
    Example, Document, Pair, Pairs   texts for it, and what it makes of them
    PictureSource                    a picture of a text, by name or as bytes

Parts of a plan:
    TrainingMemory, TunedParameters  bytes in training, and parameters that are tuned
    PlannedVision, PlannedStrategies, LayerStrategies, StrategyTime
                                     ways to apply experts, by layer, and their times
    Proposals, Proposal              ways to train by a recipe on a platform
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.api.compress_experts import Kernels as Kernels
    from moe_jax.api.generate import Prompt as Prompt
    from moe_jax.api.measure import Examples as Examples
    from moe_jax.api.measure import Text as Text
    from moe_jax.api.measure import Texts as Texts
    from moe_jax.api.model import Loading as Loading
    from moe_jax.api.model import ModelOrPath as ModelOrPath
    from moe_jax.api.model import OutPath as OutPath
    from moe_jax.api.train import RecipeOrPath as RecipeOrPath
    from moe_jax.core.terminal import Progress as Progress
    from moe_jax.data.calibration_texts.weighted_sources import CalibrationSources as CalibrationSources
    from moe_jax.data.chat_template import Message as Message
    from moe_jax.data.pictures.picture_sources import PictureSource as PictureSource
    from moe_jax.data.rows import Example as Example
    from moe_jax.data.tokenizer import Document as Document
    from moe_jax.data.tokenizer import Pair as Pair
    from moe_jax.data.tokenizer import Pairs as Pairs
    from moe_jax.data.tokenizer import Tokenizer as Tokenizer
    from moe_jax.model_io.in_memory import Destination as Destination
    from moe_jax.model_io.in_memory import InMemory as InMemory
    from moe_jax.model_io.in_memory import ModelInMemory as ModelInMemory
    from moe_jax.model_io.model_source import HoldsSource as HoldsSource
    from moe_jax.model_io.model_source import ModelLike as ModelLike
    from moe_jax.model_io.model_source import ModelSource as ModelSource
    from moe_jax.model_io.model_source import StoredLeaves as StoredLeaves
    from moe_jax.planning.model_costs import LayerStrategies as LayerStrategies
    from moe_jax.planning.model_costs import PlannedStrategies as PlannedStrategies
    from moe_jax.planning.model_costs import PlannedVision as PlannedVision
    from moe_jax.planning.model_costs import StrategyTime as StrategyTime
    from moe_jax.planning.model_costs import TrainingMemory as TrainingMemory
    from moe_jax.planning.model_costs import TunedParameters as TunedParameters
    from moe_jax.planning.proposals import Proposal as Proposal
    from moe_jax.planning.proposals import Proposals as Proposals
