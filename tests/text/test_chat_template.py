"""Chats as the checkpoint's own template writes them, and templates that refuse."""

import pytest
from tokenizers import Tokenizer as Backend

from jaxspec.text.errors import TokenizerError
from jaxspec.text.tokenizer import Tokenizer
from tests.support.tokenizers import BYTES, MERGED


def test_chat_template():
    user = {"role": "user", "content": "hi"}
    text = "<|im_start|>user\nhi<|im_end|>\n"
    assert BYTES.decode(BYTES.apply_chat_template([user]), False) == text + "<|im_start|>assistant\n"
    assert BYTES.decode(BYTES.apply_chat_template([user], add_generation_prompt=False), False) == text
    open_end = [user, {"role": "assistant", "content": "The"}]
    ids = BYTES.apply_chat_template(open_end, add_generation_prompt=False, continue_final_message=True)
    assert BYTES.decode(ids, False).endswith("assistant\nThe")
    with pytest.raises(TokenizerError, match="tokenize can't be set"):
        BYTES.apply_chat_template([user], tokenize=False)
    with pytest.raises(TokenizerError, match="no chat template"):
        MERGED.apply_chat_template([user])


def test_a_template_that_refuses_says_why():
    template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    picky = Tokenizer.from_backend(Backend.from_str(MERGED._fast.backend_tokenizer.to_str()), template + "{% endfor %}")
    with pytest.raises(TokenizerError, match="no tools here"):
        picky.apply_chat_template([{"role": "tool", "content": "x"}])
