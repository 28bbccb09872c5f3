"""Our model beside lm-eval's own backend for Transformers: the same figures for the same requests."""

import json
import shutil

import numpy as np
import pytest

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.harness.likelihood import Continuation, Likelihoods, _compiled
from moe_jax.harness.task_files import sandboxed_templates
from tests.support.byte_tokenizer import EOS
from tests.support.generated import generate
from tests.support.numerics import logits_of
from tests.support.task_files import TASKS
from tests.support.tiers import long, one_in

FEWSHOT = 2


@pytest.fixture(scope="module")
def models(tiny_llama):
    """Ours and lm-eval's."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    from moe_jax.harness.language_model import HarnessModel

    ours = moe_jax.load(tiny_llama, dtype="float32")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tiny_llama / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    return (
        HarnessModel(ours.decoder, ours.tokenizer, batch_size=4),
        HFLM(pretrained=theirs, tokenizer=tokenizer, batch_size=4, device="cpu"),
    )


def answers(model, folder, num_fewshot):
    from moe_jax.harness.task_run import evaluate_tasks, known_tasks, load_tasks

    with sandboxed_templates():
        tasks = load_tasks([one["task"] for one in TASKS], known_tasks(folder))
        found = evaluate_tasks(model, tasks, num_fewshot=num_fewshot)
    responses = {
        name: [response for sample in samples for (response,) in sample["resps"]]
        for name, samples in found["samples"].items()
    }
    return responses, found["results"]


@long
@one_in(2, first=1)
@pytest.mark.parametrize("num_fewshot", [0, FEWSHOT])
def test_answers_and_figures_are_those_of_transformers(models, folder, num_fewshot):
    """With examples before them, prompts are longer than the 64 positions, and lose their beginnings."""
    (ours, our_figures), (theirs, their_figures) = (answers(model, folder, num_fewshot) for model in models)
    assert ours["written"] == theirs["written"] and any(ours["written"])
    assert len(ours["choice"]) == 12 and len(set(ours["choice"])) > 4
    for name in ("choice", "said"):
        np.testing.assert_allclose(*[[one[0] for one in both[name]] for both in (ours, theirs)], rtol=0, atol=1e-4)
        assert [one[1] for one in ours[name]] == [one[1] for one in theirs[name]]
    np.testing.assert_allclose(ours["rolling"], theirs["rolling"], rtol=0, atol=1e-4)
    assert our_figures.keys() == their_figures.keys() == {one["task"] for one in TASKS}
    for name, figures in our_figures.items():
        for key, value in figures.items():
            if isinstance(value, float):
                assert value == pytest.approx(their_figures[name][key], abs=1e-4), (name, key)


def test_greedy_is_said_of_what_the_model_would_write(models):
    ours, _ = models
    context = ours.tok_encode("abc")
    (text,) = generate(ours._model, [context], max_new_tokens=3)
    likelihoods = Likelihoods(ours._model, max_length=64, batch_size=2)
    greedy, other = likelihoods(
        [Continuation(context, text), Continuation(context, [*text[:-1], (text[-1] + 1) % 256])]
    )
    assert greedy.is_greedy and not other.is_greedy and greedy.log_likelihood > other.log_likelihood


@long
def test_batches_and_chunks_of_logits_change_nothing(models, monkeypatch):
    ours, _ = models
    rng = np.random.default_rng(0)
    asked = [Continuation(rng.integers(0, 258, n).tolist(), rng.integers(0, 258, m).tolist())
             for n, m in ((1, 1), (40, 3), (2, 20), (5, 9), (60, 9), (5, 9))]  # fmt: skip
    asked.append(asked[1])
    whole = Likelihoods(ours._model, max_length=64, batch_size=8)(asked)
    monkeypatch.setattr("moe_jax.harness.likelihood.chunk_size", lambda tokens, vocabulary: 6)
    _compiled.cache_clear()
    seen = {}
    chunked = Likelihoods(ours._model, max_length=64, batch_size=2)(asked, answered=seen.__setitem__)
    _compiled.cache_clear()
    assert seen == dict(enumerate(chunked)) and chunked[1] == chunked[-1]
    tokens = np.asarray([[*asked[1].context, *asked[1].tokens[:-1]]], np.int32)
    logits = np.asarray(logits_of(ours._model, tokens))[0, -3:]
    normalisers = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
    plain = (logits[np.arange(3), asked[1].tokens] - normalisers).sum()
    np.testing.assert_allclose([a[0] for a in whole], [b[0] for b in chunked], rtol=0, atol=1e-4)
    assert whole[1].log_likelihood == pytest.approx(plain, abs=1e-4)


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_conversations_are_written_as_transformers_writes_them(tiny_llama, tmp_path):
    import transformers

    from moe_jax.harness.language_model import HarnessModel

    folder = shutil.copytree(tiny_llama, tmp_path / "chat")
    settings = {"chat_template": CHAT, "bos_token": None, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = moe_jax.load(folder)
    ours = HarnessModel(model.decoder, model.tokenizer)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=CHAT)
    said = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "The answer is"}]
    for messages, prompts in ((said[:1], True), (said, False)):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompts, continue_final_message=not prompts
        )
        assert ours.apply_chat_template(messages, add_generation_prompt=prompts) == expected
    # The tokenizer names no BOS, though the model does: EOS stands before a text then, as with `hf`.
    assert ours.prefix_token_id == ours.eot_token_id == EOS


def test_a_token_that_spans_context_and_continuation_is_scored(models, monkeypatch):
    from lm_eval.api.instance import Instance

    model = models[0]
    plain = model.tok_encode
    monkeypatch.setattr(model, "tok_encode", lambda text, **how: plain(text.replace("ab", "A"), **how))
    pairs = [("xa", "b"), ("a", "b"), ("xa", "bc"), ("x", "ab"), ("", "ab")]
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0, metadata=("t", 3, 1)) for pair in pairs
    ]
    prefix = model.prefix_token_id
    wanted = [
        Continuation(plain(context, add_special_tokens=False) or [prefix], plain(tokens, add_special_tokens=False))
        for context, tokens in (("x", "A"), ("", "A"), ("xa", "c"), ("x", "A"), ("", "A"))
    ]
    wanted[2] = Continuation(plain("xa"), plain("c"))  # as lm-eval has it: after as many tokens as the context has
    expected = [(one.log_likelihood, one.is_greedy) for one in model._likelihoods(wanted)]
    assert model.loglikelihood(asked) == expected
    empty = Instance(request_type="loglikelihood", doc={}, arguments=("x", ""), idx=0, metadata=("t", 3, 1))
    with pytest.raises(InputError, match="t, document 3 .*the answer '' has no tokens"):
        model.loglikelihood([empty])
