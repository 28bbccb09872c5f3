"""Conversations as training data: tokens and losses as Transformers has them, keys of any name, mistakes by line."""

import json

import numpy as np
import pytest

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.pipeline import open_data
from moe_jax.data.sections import DataSection, FieldsSection, SourceSection
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.chat_templates import REASONING, SPECIAL, STYLES, SYSTEM, TURNS, marked, plain
from tests.support.tiers import long

CONFIG = ModelConfig(
    family="llama",
    vocab_size=258,
    d_model=8,
    max_positions=64,
    layers=(LayerConfig(attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8), mlp=FFNConfig(dim=8)),),
    bos_id=BOS,
    eos_ids=(EOS,),
)
SETTINGS = {"add_bos_token": True, **SPECIAL}


def first_row(tmp_path, rows, seq_len, *, template=None, **source):
    """What a model with such a tokenizer is trained on first."""
    byte_tokenizer(tmp_path / "tokenizer.json", adds_bos=True)
    settings = SETTINGS if template is None else {**SETTINGS, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(
        sources=(SourceSection(path=str(tmp_path / "a.jsonl"), **source),), seq_len=seq_len, prefetch=0, shuffle=False
    )
    data = open_data(section, CONFIG, tmp_path / "tokenizer.json", seed=0, batch_size=1, rows=range(1))
    return {name: array[0] for name, array in next(data).items()}


def learnt(row):
    """The runs of scored targets, as texts."""
    scored = np.flatnonzero(row["weights"] > 0)
    runs = np.split(scored, np.flatnonzero(np.diff(scored) > 1) + 1)
    tokens = {BOS: b"<s>", EOS: b"</s>"}
    return [b"".join(tokens.get(int(t), bytes([t % 256])) for t in row["targets"][run]).decode() for run in runs]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cut", [0, 15])
def test_tokens_and_losses_are_those_of_transformers(tmp_path, style, cut):
    import transformers

    for messages in [TURNS, TURNS[:2]] + ([] if style == "gemma" else [[SYSTEM, *TURNS]]):
        byte_tokenizer(tmp_path / "tokenizer.json")
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **SPECIAL)
        given = dict(chat_template=marked(style), return_dict=True, return_assistant_tokens_mask=True)
        whole = theirs.apply_chat_template(messages, **given)
        length = len(whole["input_ids"]) - cut
        want = theirs.apply_chat_template(messages, **given, truncation=True, max_length=length)
        row = first_row(tmp_path, [{"messages": messages}], length - 1, template=plain(style))
        assert [*row["tokens"], row["targets"][-1]] == want["input_ids"]
        assert row["weights"].tolist() == want["assistant_masks"][1:]
        assert row["segment_ids"].tolist() == [1] * (length - 1)


TWO = {"messages": TURNS[:2]}
FORMS = [
    (TWO, {}),
    ({"conversations": [{"from": "human", "value": TURNS[0]["content"]}, {"from": "gpt", "value": "It is 4."}]}, {}),
    ({"conversations": TURNS[:2], "id": 3}, {}),
    ({"text": "ignored", "chat": TURNS[:2]}, {"fields": FieldsSection(messages="chat")}),
    (
        {"messages": [{"who": "user", "says": TURNS[0]["content"]}, {"who": "bot", "says": "It is 4."}]},
        {"fields": FieldsSection(messages="messages", role="who", content="says")},
    ),
    ({"prompt": TURNS[0]["content"], "response": "It is 4."}, {"chat": True}),
    (
        {"question": TURNS[0]["content"], "answer": "It is 4.", "text": "ignored"},
        {"chat": True, "fields": FieldsSection(prompt="question", response="answer")},
    ),
]


@pytest.mark.parametrize(("row", "source"), FORMS)
def test_a_conversation_has_many_forms(tmp_path, row, source):
    got = first_row(tmp_path, [row] * 3, 150, template=plain("chatml"), **source)
    want = first_row(tmp_path, [TWO] * 3, 150, template=plain("chatml"))
    assert all(np.array_equal(got[name], want[name]) for name in want)
    assert learnt(got)[0] == "It is 4.<|im_end|>"


def test_keys_of_other_names_and_nothing_but_them(tmp_path):
    pair = first_row(
        tmp_path, [{"q": "2+2=", "a": "four", "text": 3}] * 3, 16, fields=FieldsSection(prompt="q", response="a")
    )
    assert learnt(pair)[0] == "four</s>"
    text = first_row(tmp_path, [{"body": "abcdefgh", "prompt": "x"}] * 3, 8, fields=FieldsSection(text="body"))
    assert text["tokens"].tolist() == [BOS, *b"abcdefg"] and text["weights"].all()


def test_every_turn_is_a_document_where_the_past_is_rewritten(tmp_path):
    row = first_row(tmp_path, [{"messages": TURNS[:4]}] * 2, 320, template=REASONING)
    assert learnt(row)[:2] == [
        "<think>\n\n</think>\n\nIt is 4.<|im_end|>",
        "<think>\n\n</think>\n\n8, and here is a\nsecond line.<|im_end|>",
    ]
    assert row["segment_ids"].max() >= 3


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": "hello"}, "'messages' holding 'hello' that should"),
        ({"messages": []}, "'messages' holding [] that should"),
        ({"messages": ["a"]}, "message 1 is 'a', expected an object"),
        ({"messages": [{"speaker": "x"}]}, "message 1 has no 'role' or 'from', but 'speaker'"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "message 1 has the role 'usr' (did you mean 'user'?)"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 has the content 3, expected a text"),
        ({"messages": TURNS[:1]}, 'conversation without "assistant" has nothing'),
        ({"messages": TURNS, "text": "a"}, "with the keys 'messages', 'text'"),
    ],
)
def test_a_bad_conversation_is_named_by_its_line(tmp_path, row, complaint):
    with pytest.raises(InputError) as error:
        first_row(tmp_path, [TWO, row], 20, template=plain("chatml"))
    assert str(error.value).startswith(f"{tmp_path}/a.jsonl, line 2: ") and complaint in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_without_a_template_the_line_says_so(tmp_path):
    with pytest.raises(InputError, match="line 1: .* has no chat template: neither chat_template.jinja nor"):
        first_row(tmp_path, [TWO], 20)


@pytest.mark.parametrize("fields", [{}, {"prompt": "a"}, {"text": "a", "messages": "b"}, {"response": "a"}])
def test_fields_name_one_kind(fields):
    with pytest.raises(InputError, match="prompt and response"):
        FieldsSection(**fields)


def test_fields_and_chat_are_for_objects():
    with pytest.raises(InputError, match="fields and chat"):
        SourceSection(path="a.txt", chat=True)


@long
def test_a_template_of_the_recipe_goes_with_the_trained_model_and_decides_whether_a_run_goes_on(folder, failing):
    (folder / "my.jinja").write_text(plain("chatml"))
    (folder / "chat.jsonl").write_text(json.dumps(TWO) + "\n")
    (folder / "text" / "c.jsonl").write_text((json.dumps(TWO) + "\n") * 40)
    sources = 'data.sources=[{path="text/*.jsonl"}]'
    given = [
        "run_dir=chat",
        sources,
        "data.seq_len=128",
        "data.chat_template=my.jinja",
        "eval.text=chat.jsonl",
        "eval.every=4",
    ]
    assert cli.main(["train", "recipe.toml", "--set", *given]) == 0
    assert (folder / "chat" / "model" / "chat_template.jinja").read_text() == plain("chatml")
    last = json.loads((folder / "chat" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < last["eval_loss"] < 10
    (folder / "my.jinja").write_text(plain("llama3"))
    message = failing("--resume", "--set", *given, "train.steps=8")
    assert "tokenizer of the" in message or "that it had" in message
