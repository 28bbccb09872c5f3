"""The sections of the results: what makes each again, where its figures are kept, and what code they depend on."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import barycenters.report
import evidence.equal_bytes.report
import evidence.small_world
import evidence.studies.report
import evidence.whole_models.report
from evidence import layouts
from evidence.results import RESULTS, Figures, ResultsFile
from evidence.stamp import ROOT, commits_since
from evidence.studies.claims_file import ClaimsFile
from evidence.tables import Table, tables_of
from evidence.whole_models.study import WholeModelsFile

# What a training step runs through.
_MODEL = ("moe_jax/functional", "moe_jax/experts", "moe_jax/nn", "moe_jax/models")
_LOOP = ("moe_jax/training", "moe_jax/data", "moe_jax/evaluation")
_TRAINING = (*_MODEL, "moe_jax/upcycling", *_LOOP)
_BOUNDS = ("moe_jax/core/template_sandbox.py", "moe_jax/core/template_process.py", "moe_jax/files/tokenizer_size.py",
           "moe_jax/data", "moe_jax/serve")  # fmt: skip

# What decides the results of studies; plans, tables and pictures do not.
_STUDIES = (
    *("compression_job", "compressions", "corpus", "full_experts", "long_job", "models", "noise_job"),
    *("parameter_groups", "probes", "rates", "scales", "shapes", "texts", "trainer", "training_job", "trainings"),
    "variants",
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the results.

    Attributes:
      name: of the file of results, of the section's tables and of its page.
      command: makes all its figures again, in the root of a checkout, or several do so, joined by `&&`; words in
        capitals are places that `run_all.py` describes.
      sources: files and folders that the figures depend on; what only writes tables is not among them.
      opened: the file of results in a folder.
      tables: makes the tables from the results, by the names of their blocks.
      report: the whole report of the results, kept beside them as NAME.md; None: there is none.
    """

    name: str
    command: str
    sources: tuple[str, ...]
    opened: Callable[[Path], ResultsFile]
    tables: Callable[[ResultsFile], dict[str, str]]
    report: Callable[[ResultsFile], str] | None = None

    @property
    def program(self) -> str:
        """The file that the command runs."""
        return self.command.split()[1]

    def blocks(self, folder: Path = RESULTS) -> dict[str, str]:
        """The tables of the section, by `NAME: BLOCK`."""
        tables = self.tables(self.opened(folder))
        return {f"{self.name}: {block}": table for block, table in tables.items()}


@functools.cache
def all_blocks(folder: Path = RESULTS) -> Mapping[str, str]:
    """The tables of all sections, by `NAME: BLOCK`; they are made once in a process."""
    return {name: text for section in SECTIONS for name, text in section.blocks(folder).items()}


def made_line(section: Section, results: ResultsFile, root: Path = ROOT) -> str:
    """With what command the figures of a section were made, at what commit, and how many its code has had since."""
    stamps = [stamp for stamp, _ in results.made()]
    oldest = min(stamps, key=lambda stamp: stamp.date)
    file = f"benchmarks/results/{section.name}.json"
    some = f", the oldest of {len(stamps)} stamps in `{file}`" if len(stamps) > 1 else ""
    since = commits_since(oldest.commit, section.sources, root) if oldest.commit else None
    age = f"; {since} commits since in the code that it measures" if since else ""
    return f"Command: `{section.command}`. Measured at {oldest.short_line}{some}{age}."


def _program(name: str, command: str, sources: tuple[str, ...], *tables: Table) -> Section:
    """A section whose program measures its tables whole."""
    return Section(
        name,
        command,
        (command.split()[1], *sources),
        lambda folder: Figures(name, folder),
        lambda figures: {table.name: table.text(figures) for table in tables},
    )


def _reported(
    name: str,
    command: str,
    sources: tuple[str, ...],
    results: type[ResultsFile],
    report: Callable[[ResultsFile], str],
    tables: dict[str, str],
) -> Section:
    """A section with a report: `tables` are the headings in it that the tables stand under."""

    def blocks(found: ResultsFile) -> dict[str, str]:
        by_heading = tables_of(report(found))
        return {block: by_heading[heading] for block, heading in tables.items()}

    def opened(folder: Path) -> ResultsFile:
        return results(folder / f"{name}.json", None)

    return Section(name, command, (command.split()[1], *sources), opened, blocks, report)


SECTIONS = (
    _program(
        "demo",
        "python benchmarks/demo.py MODEL",
        ("moe_jax/demo", "moe_jax/compression", "moe_jax/generation", *_TRAINING),
        layouts.DEMO_MODELS,
        layouts.DEMO_STEPS,
        layouts.DEMO_WAITS,
    ),
    _program(
        "demo_vision",
        "python benchmarks/demo.py MODEL --tower TOWER",
        ("moe_jax/demo", "moe_jax/images", "moe_jax/generation", "moe_jax/compression", *_TRAINING),
        layouts.DEMO_VISION_MODELS,
        layouts.DEMO_STEPS,
    ),
    _program("convert", "python benchmarks/convert.py", ("moe_jax/conversion", "moe_jax/commands"), layouts.CONVERT),
    _program(
        "shares",
        "python benchmarks/shares.py",
        (
            "moe_jax/conversion",
            "moe_jax/compression",
            "moe_jax/checkpoints/leaf_files.py",
            "moe_jax/model_io/loading.py",
            "moe_jax/model_io/model_dir.py",
            "moe_jax/checkpoints/zarr_arrays.py",
        ),
        layouts.SHARES,
    ),
    _program(
        "real_llm",
        "python benchmarks/real_llm.py MODEL",
        (
            *_TRAINING,
            "moe_jax/generation",
            "moe_jax/commands/cli.py",
            "moe_jax/commands",
        ),
        layouts.LLM_SPEED,
        layouts.LLM_DECODING,
        layouts.LLM_START,
    ),
    _program(
        "serve",
        "python benchmarks/serve.py MODEL --against CHECKOUT",
        ("moe_jax/serve", "moe_jax/generation", *_MODEL),
        layouts.SERVING,
        layouts.SERVING_BEFORE,
    ),
    _program(
        "gguf_parity",
        "python benchmarks/gguf_parity.py MODEL TEXT",
        ("moe_jax/conversion/gguf", "moe_jax/functional", "moe_jax/nn", "moe_jax/generation"),
        layouts.GGUF_TYPES,
        layouts.GGUF_KINDS,
        layouts.GGUF_QUANTISED,
    ),
    _program(
        "scored_answers",
        "python benchmarks/scored_answers.py MODEL",
        ("moe_jax/functional", "moe_jax/nn"),
        layouts.SCORED_ANSWERS,
    ),
    _program(
        "lm_eval_parity",
        "python benchmarks/lm_eval_parity.py MODEL DATA"
        " && python benchmarks/lm_eval_parity.py MODEL DATA --exact --only piqa_local",
        ("moe_jax/harness", *_MODEL),
        layouts.LM_EVAL_LIKELIHOODS,
        layouts.LM_EVAL_EXACT,
        layouts.LM_EVAL_TEXTS,
    ),
    _program(
        "vllm_parity",
        "python benchmarks/vllm_parity.py DATA EXPORTS --vllm VLLM",
        (
            "moe_jax/conversion/to_hugging_face.py",
            "moe_jax/conversion/formats/coded_parts.py",
            "moe_jax/conversion/formats/encoders.py",
            "moe_jax/conversion/hf_config.py",
            "moe_jax/compression",
        ),
        layouts.VLLM,
    ),
    _program(
        "delta_rule",
        "python benchmarks/delta_rule.py --times --compile v5e:2x2 h100:1",
        ("moe_jax/functional/recurrent", "moe_jax/nn/recurrent"),
        layouts.DELTA_TIMES,
        layouts.DELTA_COMPILED,
    ),
    _program(
        "compiled_layers",
        "python benchmarks/compiled_layers.py",
        (*_MODEL, "moe_jax/kernels"),
        layouts.COMPILED_LAYERS,
    ),
    _program(
        "four_bits",
        "python benchmarks/four_bits.py DATA MODEL --llmc LLMC --work WORK",
        ("moe_jax/conversion", "moe_jax/compression/calibration", "moe_jax/compression/coding", *_MODEL),
        layouts.FOUR_BITS,
    ),
    Section(
        "whole_models",
        "python benchmarks/whole_models.py DATA --work WORK "
        "--models stories260K-MoE Llama-d256-MoE SmolLM2-MoE=MOE --llmc LLMC --questions 1000",
        (
            *("benchmarks/whole_models.py", "benchmarks/evidence/llm_compressor_worker.py"),
            *(f"benchmarks/evidence/whole_models/{name}.py" for name in ("entries", "peers", "scores", "task")),
            *("moe_jax/conversion", "moe_jax/compression", "moe_jax/data/calibration_texts", *_MODEL),
        ),
        WholeModelsFile,
        evidence.whole_models.report.tables,
        evidence.whole_models.report.report,
    ),
    _program(
        "decoding",
        "python benchmarks/decoding.py --model MODEL --passes 1",
        ("moe_jax/generation", "moe_jax/functional", "moe_jax/experts", "moe_jax/nn"),
        layouts.DECODING_SPEED,
        layouts.DECODING_MEMORY,
    ),
    _program(
        "true_decoding",
        "python benchmarks/true_decoding.py --rounds 6",
        ("moe_jax/functional", "moe_jax/experts", "moe_jax/generation/arrange.py", "benchmarks/hbm/layers.py"),
        layouts.TRUE_DECODING,
    ),
    _program(
        "plan_train",
        "python benchmarks/plan_train.py MODEL --tower TOWER",
        (*_TRAINING, "moe_jax/peft", "moe_jax/planning/planned_training.py", "moe_jax/core/data_sheets.py"),
        layouts.PLAN_TRAIN,
    ),
    _program(
        "data_pipeline",
        "python benchmarks/data_pipeline.py MODEL TEXT QUESTIONS",
        ("moe_jax/training", "moe_jax/data", "moe_jax/data/chat_template.py", "moe_jax/api/open_source.py"),
        layouts.DATA_PIPELINE,
    ),
    _program("upcycle_stories260k", "python benchmarks/upcycle_stories260k.py DATA", _TRAINING, layouts.UPCYCLED),
    _program(
        "ders_layer",
        "python benchmarks/ders_layer.py",
        ("moe_jax/functional", "moe_jax/experts"),
        layouts.LAYER_TIME,
        layouts.LAYER_MEMORY,
        layouts.layer_decoding(1),
        layouts.layer_decoding(8),
        layouts.LAYER_RESTORED,
    ),
    _program(
        "pods",
        "python benchmarks/pods.py",
        _TRAINING,
        layouts.POD_STEPS,
        layouts.POD_SCALING,
        layouts.POD_EXCHANGES,
    ),
    _program(
        "hot_path",
        "python benchmarks/hot_path.py",
        (
            *("moe_jax/functional", "moe_jax/kernels", "moe_jax/experts", "moe_jax/core/data_sheets.py"),
            *("benchmarks/hbm/layers.py", "benchmarks/hbm/traffic.py"),
        ),
        layouts.HOT_PATH,
        layouts.HOT_PATH_AGAINST,
    ),
    _program(
        "gpu_layers",
        "python benchmarks/gpu_layers.py",
        ("moe_jax/functional", "moe_jax/kernels", "moe_jax/experts", "benchmarks/gpu_layers.py"),
        layouts.GPU_LAYERS,
    ),
    Section(
        "claims",
        "python benchmarks/claims.py DATA --smollm MODEL",
        (
            *("benchmarks/claims.py", *_TRAINING, "moe_jax/peft", "moe_jax/compression"),
            *(f"benchmarks/evidence/studies/{name}.py" for name in _STUDIES),
            "benchmarks/evidence/recipes",
        ),
        ClaimsFile,
        evidence.studies.report.blocks,
        evidence.studies.report.report,
    ),
    Section(
        "equal_bytes",
        "python benchmarks/equal_bytes.py DATA --work WORK --smollm MODEL",
        (
            *("benchmarks/equal_bytes.py", *_MODEL, "moe_jax/compression", "moe_jax/training"),
            *(
                f"benchmarks/evidence/equal_bytes/{name}.py"
                for name in ("comparison_job", "entries", "models", "own_models", "recovery", "study")
            ),
            *(f"benchmarks/evidence/studies/{name}.py" for name in ("compression_job", "corpus", "probes", "texts")),
        ),
        evidence.equal_bytes.report.opened,
        evidence.equal_bytes.report.blocks,
        evidence.equal_bytes.report.report,
    ),
    _program(
        "true_layers",
        "python benchmarks/true_layers.py && python benchmarks/true_layers.py --exact"
        " && python benchmarks/true_layers.py --calibrated && python benchmarks/true_layers.py --compile h100:1",
        ("moe_jax/compression",),
        layouts.TRUE_LAYERS,
        layouts.TRUE_EXACT,
        layouts.TRUE_CALIBRATED,
        layouts.TRUE_PROGRAMS,
    ),
    _reported(
        "barycenter",
        "python benchmarks/barycenter.py DATA --models MOES",
        ("moe_jax/compression", "benchmarks/barycenters/clouds.py", "benchmarks/barycenters/others.py"),
        barycenters.report.Results,
        barycenters.report.report,
        {"sets": "1024 points and more"},
    ),
    _program(
        "peft_step",
        "python benchmarks/peft_step.py",
        (*_MODEL, "moe_jax/peft"),
        layouts.PEFT_STEP,
        layouts.PEFT_LINEAR,
    ),
    _program(
        "attack",
        "python benchmarks/attack.py",
        (
            *(
                "tests/attack",
                "moe_jax/conversion",
                *_LOOP,
                "moe_jax/models",
                "moe_jax/files/json_toml.py",
            ),
            "moe_jax/files/regular_files.py",
            *_BOUNDS,
        ),
        layouts.ATTACKS,
        layouts.ATTACK_BOUNDS,
    ),
    _program("attack_faults", "python benchmarks/attack_faults.py", ("tests/attack", *_BOUNDS), layouts.ATTACK_FAULTS),
    _program(
        "attack_kills",
        "python benchmarks/attack_kills.py",
        (
            *(
                "tests/attack/interrupted.py",
                "tests/attack/forked.py",
                "moe_jax/conversion",
                *_LOOP,
                "moe_jax/upcycling",
            ),
            *(
                "moe_jax/peft",
                "moe_jax/compression/stream.py",
                "moe_jax/files/staging.py",
            ),
            *(
                "moe_jax/model_io/model_dir.py",
                "moe_jax/checkpoints/leaf_files.py",
                "moe_jax/checkpoints/orbax_store.py",
            ),
        ),
        layouts.KILLS,
        layouts.FULL_DISKS,
        layouts.TWO_AT_A_TIME,
    ),
    _program(
        "real_model",
        "python benchmarks/real_model.py DATA",
        ("moe_jax/conversion", *_MODEL, "moe_jax/generation/texts.py", "moe_jax/evaluation/held_out.py"),
        layouts.REAL_MODEL_FILES,
        layouts.REAL_MODEL_TEXT,
    ),
    _program(
        "families",
        "python benchmarks/families.py DATA",
        ("moe_jax/conversion", *_TRAINING, "moe_jax/compression", "moe_jax/peft"),
        layouts.FAMILIES_CONVERTED,
        layouts.FAMILIES_UPCYCLED,
        layouts.FAMILIES_COMPRESSED,
    ),
    _program(
        "vision_counts",
        "python benchmarks/vision_counts.py DATA",
        ("moe_jax/models", "moe_jax/upcycling", "moe_jax/planning/model_costs.py", "moe_jax/conversion/families"),
        layouts.VISION_ADDED,
        layouts.VISION_PARTS,
    ),
    _program(
        "vision_step",
        "python benchmarks/vision_step.py DATA",
        ("moe_jax/nn", "moe_jax/training/program.py", "moe_jax/training/step.py", "moe_jax/planning/compile_only.py"),
        layouts.VISION_STEP,
    ),
    _program(
        "vision_tower",
        "python benchmarks/vision_tower.py",
        ("moe_jax/nn/vision.py", "moe_jax/nn/stack.py", "moe_jax/images/patches.py"),
        layouts.VISION_TOWER,
    ),
    _program(
        "picture_data",
        "python benchmarks/picture_data.py MODEL TOWER",
        ("moe_jax/images", "moe_jax/data/pictures", "moe_jax/data/packing.py", "moe_jax/model_io/frozen_tower.py"),
        layouts.PICTURES_READ,
        layouts.PICTURE_SHARE,
    ),
    Section(
        "small_world",
        "python benchmarks/small_world.py DATA",
        (
            "benchmarks/small_world.py",
            "moe_jax/demo/small_world.py",
            *_TRAINING,
            "moe_jax/images",
            "moe_jax/compression",
        ),
        lambda folder: evidence.small_world.SmallWorldFile(folder / "small_world.json"),
        evidence.small_world.tables,
    ),
    _program(
        "encoder_decoders",
        "python benchmarks/encoder_decoders.py DATA",
        (
            "moe_jax/conversion",
            *_TRAINING,
            "moe_jax/compression",
            "moe_jax/evaluation/held_out.py",
            "moe_jax/evaluation/classification.py",
        ),
        layouts.ENCODER_DECODERS,
    ),
)
