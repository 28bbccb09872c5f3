"""The tokens that end a text are found wherever a model names them, and are in what is exported."""

import json

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from moe_jax.conversion.to_hugging_face import export
from moe_jax.data.end_tokens import end_tokens, generation_settings
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.chat_templates import plain
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.training_models import FFN, encoder_decoder

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>"]
END, _, TURN, _ = range(4)
TRAINED = [{"command": "train"}]


@pytest.fixture
def folder(tmp_path):
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator([], trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=letters))
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def found(folder, lineage=(), **how):
    config = dense_config(vocab_size=300, eos_ids=(END,))
    tokenizer = Tokenizer(folder / "tokenizer.json", config)
    return end_tokens(config, sorted(folder.iterdir()), list(lineage), tokenizer, **how)


def write(folder, name, **content):
    (folder / name).write_text(json.dumps(content))


def test_of_the_config_alone(folder):
    assert found(folder) == found(folder, TRAINED, chat=True) == (END,)


@pytest.mark.parametrize("token", ["<|im_end|>", {"content": "<|im_end|>"}])
def test_of_the_tokenizers_config(folder, token):
    write(folder, "tokenizer_config.json", eos_token=token)
    assert found(folder) == (END, TURN)
    write(folder, "tokenizer_config.json", eos_token="<|unknown|>")
    assert found(folder) == (END,)


def test_of_the_settings_for_generation(folder):
    write(folder, "generation_config.json", eos_token_id=[TURN, END, 7])
    assert found(folder) == (END, TURN, 7)


def test_of_the_template_where_turns_were_learnt_or_are_asked_for(folder):
    write(folder, "tokenizer_config.json", chat_template=plain("chatml"))
    assert found(folder) == (END,)
    assert found(folder, chat=True) == found(folder, TRAINED) == (END, TURN)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [("<|im_end|>\\n<|endoftext|>", TURN), ("\\n", None), (" and more", None), ("", None), ("\\n<|im_end|>", TURN)],
)
def test_what_ends_a_turn_is_a_token_of_its_own(folder, ending, expected):
    turns = "{% for m in messages %}{{ '<|user|>' + m.content + '" + ending + "' }}{% endfor %}"
    write(folder, "tokenizer_config.json", chat_template=turns)
    assert found(folder, chat=True) == ((END,) if expected is None else (END, expected))
    for broken in ("{{ raise_exception('no') }}", "{% if %}", [{"name": "other", "template": ""}]):
        write(folder, "tokenizer_config.json", chat_template=broken)
        assert found(folder, chat=True) == found(folder, TRAINED) == (END,)


def test_settings_are_written_where_transformers_would_not_know_them(folder):
    config = dense_config(vocab_size=300, bos_id=1, eos_ids=(END,))
    files = [folder / "generation_config.json"]
    assert generation_settings(config, [], []) is None
    assert generation_settings(config, [], [END]) == {"bos_token_id": 1, "eos_token_id": [END]}
    assert generation_settings(config, [], [END, TURN]) == {"bos_token_id": 1, "eos_token_id": [END, TURN]}
    both = encoder_decoder(FFN, FFN)
    assert generation_settings(both, [], [TURN]) == {"decoder_start_token_id": 0, "eos_token_id": [TURN]}
    write(folder, "generation_config.json", eos_token_id=TURN, top_k=3)
    assert generation_settings(config, files, [TURN]) is None
    assert generation_settings(config, files, [END, TURN]) == {"eos_token_id": [END, TURN], "top_k": 3}


def test_an_exported_chat_model_ends_its_turns(folder, tmp_path_factory):
    write(folder, "tokenizer_config.json", chat_template=plain("chatml"))
    config = dense_config(vocab_size=300, eos_ids=(END,), num_layers=1)
    files = (folder / "tokenizer.json", folder / "tokenizer_config.json")
    target = tmp_path_factory.mktemp("models")
    source = ModelDirectory(write_model(target / "ours", config, random_leaves(config), files))
    export(source, target / "plain")
    assert json.loads((target / "plain" / "generation_config.json").read_text()) == {"eos_token_id": [END]}
    lineage = target / "ours" / "lineage.json"
    entry = {"command": "train", "options": {}, "sources": [], "versions": {}, "date": "2026-01-01", "measured": {}}
    lineage.write_text(json.dumps([entry]))
    export(ModelDirectory(target / "ours"), target / "trained")
    assert json.loads((target / "trained" / "generation_config.json").read_text()) == {"eos_token_id": [END, TURN]}
