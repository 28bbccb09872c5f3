"""The sections of BENCHMARKS.md: what makes each again, where its figures are kept, and what code they depend on."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import barycenters.report
import evidence.equal_bytes.report
import evidence.studies.report
from evidence import layouts
from evidence.results import RESULTS, Figures, ResultsFile
from evidence.studies.claims_file import ClaimsFile
from evidence.tables import Table, tables_of

# What a training step runs through.
_MODEL = ("moe_jax/functional", "moe_jax/experts", "moe_jax/nn", "moe_jax/models")
_TRAINING = (*_MODEL, "moe_jax/upcycle", "train")

# What decides the results of studies; plans, tables and pictures do not.
_STUDIES = (
    *("corpus", "long_job", "models", "parameter_groups", "rates", "scales", "shapes", "texts", "trainer"),
    *("training_job", "trainings"),
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of BENCHMARKS.md.

    Attributes:
      name: of the file of results, and of the section's blocks.
      command: makes all its figures again, in the root of a checkout; DATA is the folder that the program describes.
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
        """The text of every block of the section, by its full name; the first says how the figures were made."""
        results = self.opened(folder)
        return {f"{self.name}: made": made_line(self, results)} | {
            f"{self.name}: {name}": table for name, table in self.tables(results).items()
        }


def made_line(section: Section, results: ResultsFile) -> str:
    """With what command and at what commit the figures of a section were made."""
    made = results.made()
    first, said = made[0][0], [made[0][0].line]
    for stamp, paths in made[1:]:
        names = sorted({results.name(path) for path in paths})
        some = ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} others"
        alike = (stamp.machine, stamp.versions) == (first.machine, first.versions)
        said.append(f"{some}: {stamp.short_line if alike else stamp.line}")
    return f"Command: `{section.command}`. Measured at {'; '.join(said)}."


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
    _program("convert", "python benchmarks/convert.py", ("convert", "moe_jax/commands"), layouts.CONVERT),
    _program(
        "shares",
        "python benchmarks/shares.py",
        (
            "convert",
            "moe_jax/compress",
            "moe_jax/leaf_files.py",
            "moe_jax/loading.py",
            "moe_jax/model_dir.py",
            "moe_jax/zarr_arrays.py",
        ),
        layouts.SHARES,
    ),
    _program(
        "real_llm",
        "python benchmarks/real_llm.py MODEL",
        (*_TRAINING, "moe_jax/generation.py", "moe_jax/decoding.py", "moe_jax/cli.py", "moe_jax/commands"),
        layouts.LLM_SPEED,
        layouts.LLM_DECODING,
        layouts.LLM_START,
    ),
    _program(
        "serve",
        "python benchmarks/serve.py MODEL",
        ("moe_jax/serve", "moe_jax/functional", "moe_jax/nn"),
        layouts.SERVING,
    ),
    _program(
        "lm_eval_parity",
        "python benchmarks/lm_eval_parity.py MODEL DATA",
        ("moe_jax/harness", *_MODEL),
        layouts.LM_EVAL_LIKELIHOODS,
        layouts.LM_EVAL_EXACT,
        layouts.LM_EVAL_TEXTS,
    ),
    _program(
        "vllm_parity",
        "python benchmarks/vllm_parity.py DATA EXPORT ... --vllm PYTHON",
        ("convert/to_hugging_face.py", "convert/packed_experts.py", "convert/hf_config.py"),
        layouts.VLLM,
    ),
    _program(
        "plan_train",
        "python benchmarks/plan_train.py MODEL",
        (*_TRAINING, "moe_jax/peft", "moe_jax/planned_training.py", "moe_jax/memory.py"),
        layouts.PLAN_TRAIN,
    ),
    _program(
        "data_pipeline",
        "python benchmarks/data_pipeline.py MODEL TEXT QUESTIONS",
        ("train", "moe_jax/chat_template.py", "moe_jax/open_source.py"),
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
            *("moe_jax/functional", "moe_jax/kernels", "moe_jax/experts", "moe_jax/data_sheets.py"),
            *("benchmarks/hbm/layers.py", "benchmarks/hbm/traffic.py"),
        ),
        layouts.HOT_PATH,
        layouts.HOT_PATH_AGAINST,
    ),
    Section(
        "claims",
        "python benchmarks/claims.py DATA --smollm MODEL",
        (
            *("benchmarks/claims.py", *_TRAINING, "moe_jax/peft", "moe_jax/compress"),
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
            *("benchmarks/equal_bytes.py", *_MODEL, "moe_jax/compress"),
            *(f"benchmarks/evidence/equal_bytes/{name}.py" for name in ("comparison_job", "entries", "models")),
        ),
        evidence.equal_bytes.report.opened,
        evidence.equal_bytes.report.blocks,
        evidence.equal_bytes.report.report,
    ),
    _program(
        "true_layers",
        "python benchmarks/true_layers.py",
        ("moe_jax/compress",),
        layouts.TRUE_LAYERS,
        layouts.TRUE_EXACT,
    ),
    _reported(
        "barycenter",
        "python benchmarks/barycenter.py DATA --models MODEL ...",
        ("moe_jax/compress", "benchmarks/barycenters/clouds.py", "benchmarks/barycenters/others.py"),
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
            *("tests/attack", "convert", "train", "moe_jax/models", "moe_jax/json_toml.py", "moe_jax/strict.py"),
            "moe_jax/regular_files.py",
        ),
        layouts.ATTACKS,
    ),
    _program(
        "attack_kills",
        "python benchmarks/attack_kills.py",
        (
            *("tests/attack/interrupted.py", "tests/attack/forked.py", "convert", "train", "moe_jax/upcycle"),
            *("moe_jax/peft", "moe_jax/compress/job", "moe_jax/resume.py", "moe_jax/staging.py"),
            *("moe_jax/model_dir.py", "moe_jax/leaf_files.py", "moe_jax/checkpoint.py"),
        ),
        layouts.KILLS,
        layouts.FULL_DISKS,
        layouts.TWO_AT_A_TIME,
    ),
    _program(
        "real_model",
        "python benchmarks/real_model.py DATA",
        ("convert", *_MODEL, "moe_jax/generation.py", "train/evaluation.py"),
        layouts.REAL_MODEL_FILES,
        layouts.REAL_MODEL_TEXT,
    ),
    _program(
        "families",
        "python benchmarks/families.py DATA",
        ("convert", *_TRAINING, "moe_jax/compress", "moe_jax/peft"),
        layouts.FAMILIES_CONVERTED,
        layouts.FAMILIES_UPCYCLED,
        layouts.FAMILIES_COMPRESSED,
    ),
    _program(
        "encoder_decoders",
        "python benchmarks/encoder_decoders.py DATA",
        ("convert", *_TRAINING, "moe_jax/compress", "train/pair_evaluation.py", "train/classification.py"),
        layouts.ENCODER_DECODERS,
    ),
)
