"""The shortest way from tokens to text is taken only where it leads to the same text."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from octavo.engine.detokenizer import decoder
from tests.checkpoints import byte_tokenizer


class Loud(PreTrainedTokenizerFast):
    """Decodes in its own way, as some models' tokenizers do."""

    def _decode(self, *args: Any, **options: Any) -> str:
        return str(super()._decode(*args, **options)).upper()


def test_a_tokenizer_that_decodes_in_its_own_way() -> None:
    plain = byte_tokenizer()
    ids = plain.encode("the dog", add_special_tokens=False)
    build: Any = Loud
    assert decoder(plain)(ids, True) == "the dog"
    assert decoder(build(tokenizer_object=plain.backend_tokenizer))(ids, True) == "THE DOG"


def test_special_tokens_are_left_out_or_kept() -> None:
    plain = byte_tokenizer()
    ids = [*plain.encode("a", add_special_tokens=False), plain.eos_token_id]
    assert decoder(plain)(ids, True) == plain.decode(ids, skip_special_tokens=True) == "a"
    assert decoder(plain)(ids, False) == plain.decode(ids) != "a"
