"""Token ids are the same every time, whatever a tokenizer.json says of its training."""

from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from moe_jax.data.tokenizer import Tokenizer
from tests.support.dense_models import dense_config

WORDS = "the cat sat on the mat and the other cat ate that"


def test_dropout_of_bpe_is_off(tmp_path):
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel()
    library.train_from_iterator([WORDS] * 20, trainers.BpeTrainer(vocab_size=300))
    expected = tuple(library.encode(WORDS).ids)
    library.model.dropout = 0.5
    assert len({tuple(library.encode(WORDS).ids) for _ in range(20)}) > 1
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", dense_config(vocab_size=512))
    assert {tuple(tokenizer.encode(WORDS).tolist()) for _ in range(20)} == {expected}
