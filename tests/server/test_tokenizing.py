"""Long prompts are written and encoded beside the streams, a few at once, and not for those who left. Templates see
what a client sends as data."""

import json
import threading
import time

import httpx
import pytest

from jaxspec.text.errors import TokenizerError
from jaxspec.text.tokenizer import Tokenizer
from tests.server.fake import byte_tokenizer
from tests.server.live import meanwhile, wait_for
from tests.support.tiny import CHAT_TEMPLATE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "long text " * 2050


class Slow:
    """A tokenizer that encodes long text for as long as it may."""

    def __init__(self):
        self.measure = byte_tokenizer().measure
        self.running, self.most, self.ended, self.stop = 0, 0, 0, False
        self._lock = threading.Lock()

    def write_chat(self, messages, **_):
        return messages[0]["content"]

    def encode_all(self, texts, special):
        return [list(text.encode()) for text in texts]

    def encode_within(self, text, limit, special, check):
        if len(text) < 100:
            return list(text.encode())
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            while not self.stop:
                check()
                time.sleep(0.005)
            return [65]
        finally:
            with self._lock:
                self.running -= 1
                self.ended += 1

    def decode(self, *_, **__):
        return ""


@pytest.mark.parametrize("path", [CHAT, pytest.param(TEXT, marks=pytest.mark.exhaustive)])
def test_nothing_is_encoded_for_clients_that_left(url, fake, path):
    fake.tokenizer = slow = Slow()
    body = {"prompt": LONG} if path == TEXT else {"messages": [{"role": "user", "content": LONG}]}

    def leave(after):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + path, json=body, timeout=httpx.Timeout(30, read=after))

    short = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    with meanwhile(leave, 5, 5):
        wait_for(lambda: slow.running == 2)
        with meanwhile(leave, *[0.5] * 4):
            assert httpx.post(url + path, json=short).status_code == 200
            assert slow.running == 2, "short prompts don't wait for long ones"
    wait_for(lambda: slow.running == 0)
    assert (slow.most, slow.ended) == (2, 2), "those who left before their turn had none"
    assert len(fake.started) == 1
    slow.stop = True
    assert httpx.post(url + path, json=body).status_code == 200, "and others have theirs"


def test_a_prompt_beyond_the_context_is_refused_before_others_are_encoded(url, fake):
    """By its length alone, which needs no turn of those who encode."""
    fake.tokenizer = byte_tokenizer()
    start = time.monotonic()
    reply = httpx.post(url + TEXT, json={"prompt": "x" * 2_000_000})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - start < 2  # about 0.1 s; to encode it takes 8 s


ATTACKS = [
    "{{ x.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{% set y = x.append(1) %}",
    "{{ messages.__class__.__base__ }}",
    "{% include '/etc/passwd' %}",
    "{{ ''.__class__.__mro__ }}",
]


def with_template(template):
    return Tokenizer.from_backend(byte_tokenizer()._fast.backend_tokenizer, template, eos_token="<|im_end|>")


@pytest.mark.parametrize("attack", ATTACKS)
def test_templates_run_in_a_sandbox(attack):
    """Even a checkpoint's own: what leads out of it renders to nothing, or is an error."""
    try:
        text = with_template(attack).write_chat([{"role": "user", "content": "a"}], x=[1])
    except TokenizerError:
        return
    assert text.strip() == "" or "Undefined" in text, text


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("field", ["content", "role", "name", "variable"])
def test_what_a_client_sends_is_never_a_template(http, fake, attack, field):
    fake.tokenizer = with_template(CHAT_TEMPLATE.replace("content }}", "content }}{{ message.name }}{{ variable }}"))
    message = {"role": "user", "content": "a"}
    variables = {"variable": attack} if field == "variable" else {}
    message |= {} if variables else {field: attack}
    assert http.post(CHAT, json={"messages": [message], "chat_template_kwargs": variables}).status_code == 200
    written = fake.tokenizer.decode(fake.started[-1][0], skip_special_tokens=False)
    assert attack in written


@pytest.mark.parametrize("value", [
    None, True, 10**30, 1e308, "x" * 1000, [], {}, [[[]]], {"__class__": "x"}, {"items": 1}, {"": {"": []}},
    float("inf"), ["a"] * 1000,
])  # fmt: skip
@pytest.mark.parametrize(
    "name", ["x", "__class__", "loop", "range", "namespace", "raise_exception", "strftime_now", "a b"]
)
def test_a_template_variable_of_any_kind_is_data_or_refused(http, fake, name, value):
    fake.tokenizer = with_template(
        "{% set ns = namespace(n=0) %}{% for i in range(2) %}{{ loop.index }}{% endfor %}{{ x }}{{ messages }}"
    )
    reply = http.post(
        CHAT,
        content=json.dumps({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: value}}),
        headers={"Content-Type": "application/json"},
    )
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["param"] in ("messages", "chat_template_kwargs")
