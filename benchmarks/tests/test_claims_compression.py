"""Compression of kept models, as `benchmarks/claims.py` studies it, on a model of some thousand weights."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
from flax import nnx

import moe_jax
from evidence.studies import bfloat16, compression_job, noise_job, probes
from evidence.studies.claims_file import ClaimsFile
from evidence.studies.compression_job import Compression, compress_model, describe_model
from evidence.studies.compression_plan import of_middle, of_smollm, of_stories
from evidence.studies.compression_tables import checks, compression_tables, noise_tables
from evidence.studies.compressions import Compressions, DeltaSizes
from evidence.studies.full_experts import all_full_experts, designs, with_permuted_neurons
from evidence.studies.jobs import Place, same
from evidence.studies.likeness import cosines, least_error_per_neuron
from evidence.studies.models import Leaves, grown, keep, model_of, read_leaves
from evidence.studies.noise_figure import draw_noise
from evidence.studies.noise_job import DeltaNoise, measure_noise
from evidence.studies.scales import STORIES
from evidence.studies.summary import Measured, difference, mean_losses
from evidence.studies.training_job import kept_folder, kept_path
from evidence.studies.variants import NO_DELTAS, REFIT_PAIRS, UNCOMPRESSED, VARIANTS, chosen, label
from moe_jax.compression import METHODS, make_method
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.harness.likelihood import Continuation, Likelihoods
from moe_jax.model_io.in_memory import CastSource
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.nn import Decoder
from moe_jax.upcycling import UpcycleSpec, upcycled_config
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.tiers import long

SCALE, MODEL = STORIES.name, "tiny-s0"
"""Of the scale only the length of rows counts here."""


@pytest.fixture(scope="module")
def dense() -> Leaves:
    """A dense model whose weights matter: as drawn, it would take all tokens to be about as likely."""
    drawn = read_leaves(moe_jax.tiny_model().source)
    return Leaves(drawn.config, {path: 8 * leaf if leaf.ndim > 1 else leaf for path, leaf in drawn.leaves.items()})


@pytest.fixture(scope="module")
def place(dense: Leaves, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """With a kept MoE whose experts are a dense model's FFN and noise."""
    place = Place(pathlib.Path("no data"), tmp_path_factory.mktemp("work"))
    config = upcycled_config(dense.config, UpcycleSpec(experts=4, top_k=2, every=1))
    keep(model_of(grown(config, dense, spec=UpcycleSpec(noise=0.5))), kept_path(place, SCALE, MODEL), [])
    return place


@pytest.fixture(autouse=True)
def given(dense: Leaves, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of two domains, and the dense model."""
    texts = {
        name: np.random.default_rng(seed).integers(0, 64, 256, np.int32) for seed, name in enumerate(("code", "math"))
    }
    for module in (compression_job, noise_job):
        monkeypatch.setattr(module, "dense_source", lambda place, scale: dense)
    monkeypatch.setattr(compression_job, "scored_texts", lambda place, scale, split: texts)


def compressed(
    place: Place,
    method: str,
    *,
    dense: bool = False,
    permuted: int | None = None,
    served: bool = False,
    **options: Any,
) -> dict[str, Any]:
    how: Any = {"dense": dense, "permuted": permuted, "served": served, "matched": True}
    return compress_model(place, Compression(SCALE, MODEL, method, tuple(options.items()), **how))


def largest_difference(these: dict[str, float], those: dict[str, float]) -> float:
    assert these.keys() == those.keys()
    return max(abs(loss - those[name]) for name, loss in these.items())


@long
def test_what_changes_nothing_costs_nothing(place: Place):
    whole = describe_model(place, SCALE, MODEL)
    for method, options in {
        "resmoe": {"residual": "up", "keep": 1.0},
        "ders-sparsify": {"drop": 0.0},
        "up": {"keep": 1.0},
        "sp": {"keep": 1.0},
    }.items():
        found = compressed(place, method, **options)
        assert largest_difference(found["losses"], whole["losses"]) < 1e-3, method
        assert max(found["relative_error"]) < 0.01, method
    assert whole["expert_params"] == 2 * 4 * 3 * 16 * 32


@long
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ders-quantize", {"bits": 2, "dense": True}),
        ("resmoe", {"residual": "up", "keep": 0.25}),
        ("sp", {"keep": 0.5}),
        ("msmoe", {"keep": 0.5}),
        ("quantize", {"bits": 4}),
    ],
)
def test_full_experts_are_what_is_served(place: Place, method: str, options: dict[str, Any]):
    whole, found = describe_model(place, SCALE, MODEL), compressed(place, method, served=True, **options)
    assert largest_difference(found["served_losses"], found["losses"]) < 1e-5
    assert largest_difference(found["losses"], whole["losses"]) > 1e-4
    assert found["expert_bytes_after"] < found["expert_bytes_before"]
    assert 0 < found["bits_per_weight"] < 16.5
    for least, said in zip(found["least_error_per_neuron"], found["error_per_neuron"], strict=True):
        assert least <= said * (1 + 1e-4)


def test_no_more_can_be_lost_than_all_deltas(place: Place, dense: Leaves):
    whole = describe_model(place, SCALE, MODEL)
    nothing = compressed(place, NO_DELTAS, dense=True)
    losses = compression_job.losses(place, SCALE, model_of(dense))
    # Copies of the FFN are the dense model, but for the rounding of all weights to bfloat16.
    assert largest_difference(nothing["losses"], losses) < 5e-3 < largest_difference(whole["losses"], losses)
    over_mean = compressed(place, NO_DELTAS)
    assert largest_difference(over_mean["losses"], nothing["losses"]) > 1e-4


@long
def test_permuted_experts_compute_the_same_and_a_barycenter_finds_their_order(place: Place):
    source, whole = compression_job.kept_model(place, SCALE, MODEL)
    permuted = read_leaves(CastSource(with_permuted_neurons(source, 0), "float32"))
    changed = [path for path, leaf in permuted.leaves.items() if not np.array_equal(leaf, whole.leaves[path])]
    assert len(changed) == 3 * len(source.config.moe_layers)
    losses = [compression_job.losses(place, SCALE, model_of(leaves)) for leaves in (whole, permuted)]
    assert largest_difference(*losses) < 1e-4
    errors = {
        (solver, seed): np.mean(
            compressed(place, "resmoe", residual="up", keep=0.25, solver=solver, permuted=seed)["error_per_neuron"]
        )
        for solver in ("auto", "identity")
        for seed in (None, 0)
    }
    np.testing.assert_allclose(errors["auto", 0], errors["auto", None], rtol=0.02)
    assert errors["identity", 0] > 1.1 * errors["identity", None]


def test_windows_are_what_losses_are_means_of(place: Place):
    plain, windows = describe_model(place, SCALE, MODEL), describe_model(place, SCALE, MODEL, windows=True)
    assert largest_difference(plain["losses"], windows["losses"]) < 1e-9 and "window_losses" not in plain
    assert {name: len(of) for name, of in windows["window_losses"].items()} == {"code": 2, "math": 2}
    means = {name: float(np.mean(of)) for name, of in windows["window_losses"].items()}
    assert largest_difference(means, windows["losses"]) < 1e-6


def test_drops_take_the_seed(place: Place):
    one, again, other = (compressed(place, "ders-sparsify", drop=0.5, seed=seed) for seed in (0, 0, 1))
    assert same(one, again) and not same(one, other)


def test_a_kept_model_is_rounded_once(place: Place):
    source, leaves = compression_job.kept_model(place, SCALE, MODEL)
    assert source.config.dtype == "bfloat16" and leaves.config.dtype == "float32"
    before = read_leaves(ModelDirectory(kept_path(place, SCALE, MODEL))).leaves
    path = "layers/0/mlp/experts/gate/kernel"
    np.testing.assert_array_equal(leaves.leaves[path], before[path].astype(source.read(path).dtype).astype(np.float32))
    assert {folder.name for folder in kept_folder(place, SCALE, MODEL).iterdir()} == {"model", "bfloat16"}


def test_two_workers_may_round_a_model(place: Place, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    own = place._replace(work=tmp_path)
    kept = kept_path(own, SCALE, MODEL)
    shutil.copytree(kept_path(place, SCALE, MODEL), kept)
    write = bfloat16._write

    def slowly(model: ModelDirectory, folder: pathlib.Path) -> None:
        write(model, folder)
        write(model, kept.with_name("bfloat16"))  # the other one was first

    monkeypatch.setattr(bfloat16, "_write", slowly)
    assert bfloat16.rounded(own, SCALE, MODEL).config.dtype == "bfloat16"
    assert {folder.name for folder in kept.parent.iterdir()} == {"model", "bfloat16"}


@long
def test_noise_grows_with_deltas_and_rates(place: Place):
    small, large = (
        measure_noise(place, DeltaNoise(SCALE, MODEL, factor, (0.0, 0.5, 0.9), seed=0)) for factor in (0.5, 1.0)
    )
    for found in (small, large):
        assert found["noise"]["0"] < 1e-12 and abs(found["added"]["0"]) < 1e-5
        # p / (1 - p) of the energy of the deltas, on average over some ten thousand entries.
        assert found["noise"]["0.5"] == pytest.approx(found["delta"], rel=0.1)
        assert found["noise"]["0.9"] == pytest.approx(9 * found["delta"], rel=0.1)
    assert small["delta"] < large["delta"]


def test_agreement_of_texts(place: Place):
    _, leaves = compression_job.kept_model(place, SCALE, MODEL)
    prompts = ((1, 2, 3), (4,))
    texts = probes.continued(leaves, prompts)
    assert [len(text) for text in texts] == [probes.NEW_TOKENS] * 2
    assert probes.agreement(texts, probes.continued(leaves, prompts)) == {
        "agreement": {"until_first": 1.0, "by_position": 1.0},
        "same_until": [probes.NEW_TOKENS] * 2,
        "same_positions": [probes.NEW_TOKENS] * 2,
    }
    assert probes.agreement([[1, 2, 3, 4]], [[1, 0, 3, 4]]) == {
        "agreement": {"until_first": 0.25, "by_position": 0.75},
        "same_until": [1],
        "same_positions": [3],
    }


@long
def test_questions_are_answered_by_likelihood(tmp_path: pathlib.Path):
    asked = {
        "piqa": ("piqa", "Solution", ["how?", "why?", "when?"], ["up", "go down", "go nowhere at all"]),
        "arc_easy": ("ARC-Easy", "Answer", ["who?", "where?", "what?"], ["me", "there", "a word"]),
    }
    for folder, name, questions, choices in asked.values():
        shown = "\n\n".join(f"{name}{number}: {choice}" for number, choice in enumerate(choices, 1))
        said = [
            {
                "instruction": f"Please choose the correct answer to the question: {question}\n\n{shown}\n\n"
                f"Answer format: {name.lower()}1/...",
                "answer": f"{name.lower()}{number}",
            }
            for number, question in enumerate(questions, 1)
        ]
        file = tmp_path / "eval" / "llm_adapters" / folder / "test.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(said))
    tiny = moe_jax.tiny_model(experts=4).decoder.config
    config = dataclasses.replace(tiny, vocab_size=258, max_positions=128, bos_id=BOS, eos_ids=(EOS,))
    drawn = read_leaves(moe_jax.Model(Decoder(config, rngs=nnx.Rngs(0))).source)
    model = model_of(Leaves(config, {path: 8 * leaf if leaf.ndim > 1 else leaf for path, leaf in drawn.leaves.items()}))
    tokenizer = Tokenizer(byte_tokenizer(tmp_path / "tokenizer.json"), config)
    found = probes.answers(Place(tmp_path, tmp_path), model, tokenizer, 2)
    score = Likelihoods(model, max_length=128, batch_size=4)
    for task, (_, _, questions, choices) in asked.items():
        right = ""
        for number, question in enumerate(questions[:2]):
            text = f"Question: {question}\nAnswer:".encode()
            scores = score([Continuation(list(text), list(f" {choice}".encode())) for choice in choices])
            right += str(int(np.argmax([one.log_likelihood for one in scores]) == number))
        assert found[task] == right, task
    assert set("".join(found.values())) == {"0", "1"}


def test_neurons_are_matched():
    rng = np.random.default_rng(0)
    expert = rng.standard_normal((6, 10)).astype(np.float32)
    shuffled = np.stack([expert, expert[::-1]])
    as_is, matched = cosines(shuffled)
    assert as_is < 0.9 and matched == pytest.approx(1.0, abs=1e-6)
    assert least_error_per_neuron(shuffled, np.stack([expert[::-1], expert])) == pytest.approx(0.0, abs=1e-6)
    # Lost neurons cost what they hold.
    lost = least_error_per_neuron(shuffled[:1], np.pad(expert[None, 2:], ((0, 0), (0, 2), (0, 0))))
    assert lost == pytest.approx(np.sum(expert[:2] ** 2) / 6, rel=1e-5)


def test_designs_hold_neurons_in_rows(place: Place):
    source, _ = compression_job.kept_model(place, SCALE, MODEL)
    kernels = all_full_experts(source)[1]
    found = designs(kernels)
    assert found.shape == (4, 32, 3 * 16)
    np.testing.assert_array_equal(found[2, 5, :16], kernels["gate"][2, :, 5])
    np.testing.assert_array_equal(found[2, 5, 32:], kernels["down"][2, 5])


def test_every_variant_is_a_method():
    for name, variant in VARIANTS.items():
        for value in variant.values:
            if variant.method != NO_DELTAS:
                make_method(variant.method, dict(variant.options_of(value, 0)))
        assert len(set(variant.values)) == len(variant.values), name
    # Those that need inputs are not in the study, which records how experts are used and nothing else.
    studied = {name for name, method in METHODS.items() if not method.needs_calibration}
    # No paper of the four says anything of these: they are compared at equal bytes.
    assert studied - {"hqq", "nf4", "mobe"} == {variant.method for variant in VARIANTS.values()} - {NO_DELTAS}
    assert len(REFIT_PAIRS) == 3
    assert not any("dense" in name for name in chosen("DeRS", dense=False))
    assert chosen("DeRS", most=1)["quantised deltas over the mean"] == (2,)


def test_studies_wait_for_their_models(place: Place, tmp_path: pathlib.Path):
    results = ClaimsFile(tmp_path)
    made = ("models", "{seed}")
    study = Compressions("compression", STORIES, "tiny-s{seed}", (0, 1), made, {"SP": (0.25, 0.5), "MEO": (0.25,)},
                         serve=frozenset(("SP", "MEO")))  # fmt: skip
    sizes = DeltaSizes("noise", STORIES, "tiny-s{seed}", (0, 1), made, factors=(1.0,))
    assert not list(study.jobs(results, place)) and not list(sizes.jobs(results, place))
    # Of seed 1 there is a result, but no model.
    for seed in ("0", "1"):
        results.put("models", seed, value={"losses": {}})
    jobs = list(study.jobs(results, place))
    whole, *points = [job.path[3:] for job in jobs]
    assert whole == ("uncompressed", "0")
    assert points == [("SP, keep 0.25", "0"), ("MEO, keep 0.25", "0"), ("SP, keep 0.5", "0")]
    assert [job.arguments["asked"].served for job in jobs[1:]] == [True, True, False]
    assert [job.path for job in jobs][1:3] == [study.path("SP", 0.25, 0), study.path("MEO", 0.25, 0)]
    assert [job.path for job in sizes.jobs(results, place)] == [sizes.path(1.0, 0)]


def compressed_run(loss: float, answers: str, *, error: float = 0.0, least: float = 0.0) -> dict[str, Any]:
    return {
        "losses": {"code": loss, "math": loss + 1},
        "served_losses": {"code": loss, "math": loss + 1 + 1e-6},
        "bits_per_weight": 4.5,
        "error_per_neuron": [error, error],
        "least_error_per_neuron": [least, least],
        "answers": {"piqa": answers},
        "agreement": {"until_first": 0.25, "by_position": 0.5},
    }


def test_tables_are_made_of_results(tmp_path: pathlib.Path):
    results = ClaimsFile(tmp_path)
    assert not compression_tables(results) and not noise_tables(results) and not checks(results)
    study = Compressions("compression", STORIES, "tiny-s{seed}", (0, 1), ("models",), {"SP": (0.25,)})
    for seed in (0, 1):
        results.put(*study.whole_path(seed), value=compressed_run(2.0 + seed, "1100"))
        worse = compressed_run(2.25 + seed, "1010" if seed else "0100", error=0.5, least=0.25)
        results.put(*study.path("SP", 0.25, seed), value=worse)
    (table,) = compression_tables(results).values()
    assert "| uncompressed | 16 |  | 2.5000 | 3.5000 | 0 | 50.0 | 50.0 | 25.0 |" in table
    assert "| SP, keep 0.25 | 4.50 | +0.2500 [+0.2500, +0.2500] | 2.7500 | 3.7500 | 0.5 | 37.5 (-12.5 [" in table
    said = checks(results)
    assert "4 were also scored as they are served: the losses differ by at most 1e-06 nats." in said
    assert "times" not in said
    results.put(*study.path("SP", 0.25, 0), value=compressed_run(2.25, "0100", error=0.5, least=0.75))
    assert "but for SP, keep 0.25 (1.50 times)" in checks(results)
    # What claims are about is what studies write.
    for what, losses in ((label("SP", 0.25), (2.75, 3.75)), (UNCOMPRESSED, (2.5, 3.5))):
        (runs,) = Measured("compression", what).runs(results).values()
        assert mean_losses(runs) == dict(zip("01", losses, strict=True))


def test_the_effects_of_a_single_model_are_told_by_windows(tmp_path: pathlib.Path):
    results, found = ClaimsFile(tmp_path), {}
    for what, more in ((UNCOMPRESSED, (0.0, 0.0, 0.0)), ("SP, keep 0.25", (0.1, 0.2, 0.3)), ("UP, keep 0.25", None)):
        windows = {text: [1.0 + extra for extra in more or ()] for text in ("code", "math")}
        found[what] = {"losses": {"code": 1.2, "math": 1.2}} | ({"window_losses": windows} if more else {})
        results.put("compression", "tiny", "one", what, "0", value=found[what])
    added = difference({"0": found["SP, keep 0.25"]}, {"0": found[UNCOMPRESSED]})
    assert (added.count, added.over) == (6, "windows") and added.low < added.mean < added.high
    assert added.mean == pytest.approx(0.2)
    # Several seeds are not windows, and one without windows decides nothing.
    several = difference(dict.fromkeys("01", found["SP, keep 0.25"]), dict.fromkeys("01", found[UNCOMPRESSED]))
    assert (several.count, several.over) == (2, "seeds")
    alone = difference({"0": found["UP, keep 0.25"]}, {"0": found[UNCOMPRESSED]})
    assert (alone.count, alone.over) == (1, "seeds") and not np.isfinite(alone.low)
    (table,) = compression_tables(results).values()
    assert f"| SP, keep 0.25 |  | {added} |" in table


def test_noise_is_drawn_from_results(tmp_path: pathlib.Path):
    results, file = ClaimsFile(tmp_path), tmp_path / "noise.png"
    study = DeltaSizes("noise of deltas", STORIES, "tiny-s{seed}", (0, 1), ("models",))
    for seed in (0, 1):
        found = {"delta": 0.01, "noise": {"0.5": 0.01, "0.9": 0.09}, "added": {"0.5": 0.0, "0.9": 0.2 + 0.2 * seed}}
        results.put(*study.path(1.0, seed), value=found)
    (table,) = noise_tables(results).values()
    assert "| deltas × 1 | 0.01 | 0.9 | 0.09 | +0.3000 [" in table
    draw_noise(results, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_plan_is_of_variants():
    after = ("made", "{seed}")
    planned = [
        *of_stories("vanilla-s{seed}", (0, 1), after),
        *of_middle("vanilla-s{seed}", (0,), after, upcycled=True),
        *of_middle("drawn-s{seed}", (0,), after, upcycled=False),
        *of_smollm("vanilla, 4 experts, trained again", after),
    ]
    for study in planned:
        if isinstance(study, Compressions):
            assert study.variants.keys() | study.serve <= VARIANTS.keys()
            for name, values in study.variants.items():
                assert set(values) <= set(VARIANTS[name].values), name
    of_random = next(study for study in planned if isinstance(study, Compressions) and study.model == "drawn-s{seed}")
    assert not any(VARIANTS[name].dense for name in of_random.variants)
    assert [type(study) for study in planned].count(DeltaSizes) == 3
