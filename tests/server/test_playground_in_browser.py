"""The playground in headless Chromium: what it does, against the fake engine."""

import base64
import json
from dataclasses import replace
from typing import get_args

import pytest

from jaxspec.config.request import TOKEN_SOURCES
from server.app import create_app
from server.protocol.chat import Effort
from tests.server import browser as browsers
from tests.server import fake as rules
from tests.server.fake import TEXT, FakeLLM
from tests.server.live import serving, wait_for
from tests.support.pictures import encoded, noise
from tests.support.vision import reader, seeing_tokenizer

ENTER, ESCAPE, RIGHT = "\ue007", "\ue00c", "\ue014"


@pytest.fixture(scope="module")
def _window(tmp_path_factory):
    if reason := browsers.missing():
        pytest.skip(reason)
    with browsers.browser(str(tmp_path_factory.mktemp("profile"))) as window:
        yield window


@pytest.fixture
def window(_window, url, fake):
    """The page, newly opened. Nothing that a test does may put an error in the console."""
    _window.cdp("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    _window.cdp("Storage.clearDataForOrigin", origin=url, storageTypes="all")
    _window.console()
    _window.open(url)
    _window.until("document.getElementById('served').textContent.startsWith('fake/model')")
    yield _window
    assert _window.console() == []


def say(window, text):
    window.run("document.getElementById('prompt').focus()")
    window.type(text + ENTER)


def idle(window):
    window.until("!document.body.classList.contains('busy')")


def settings(window, **values):
    """Fill in fields of the settings, by their ids."""
    window.run(
        """for (const [id, value] of Object.entries(arguments[0])) {
            const field = document.getElementById(id.replaceAll("_", "-"));
            field[field.type === "checkbox" ? "checked" : "value"] = value;
            field.dispatchEvent(new Event("input", { bubbles: true }));
            field.dispatchEvent(new Event("change", { bubbles: true }));
        }""",
        values,
    )


def shown(window, selector):
    return window.run(
        "return Array.from(document.querySelectorAll(arguments[0]), (each) => each.textContent)", selector
    )


def tokens(window, part):
    spans = "Array.from(document.querySelectorAll(arguments[0]), (t) => [t.textContent, t.classList[1]])"
    return window.run(f"return {spans}", f"{part} .text .t")


COLOURED = [  # TEXT's tokens are bytes, whose sources go round; a character has that of its last byte
    [char, TOKEN_SOURCES[(len(TEXT[: i + 1].encode()) - 1) % len(TOKEN_SOURCES)]] for i, char in enumerate(TEXT)
]


def prompt_of(started):
    return rules.byte_tokenizer().decode(started[0], skip_special_tokens=False)


def test_a_chat_shows_each_token_by_its_source(window, fake):
    say(window, "hello")
    idle(window)
    assert shown(window, ".asked p") == ["hello"] and tokens(window, "#log") == COLOURED
    assert "19 tokens" in shown(window, "#log .figures")[0]
    assert "3 of 8 drafts rejected" in shown(window, "#log .figures")[0]
    assert fake.started[-1][1].fixed_drafts, "the page asks an idle server for drafts"
    say(window, "and?")
    idle(window)
    assert prompt_of(fake.started[-1]).count(TEXT) == 1
    assert prompt_of(fake.started[-1]).endswith("and?<|im_end|>\n<|im_start|>assistant\n")
    used = len(fake.started[-1][0]) + len(TEXT.encode())
    assert shown(window, "#context-shown") == [f"{used} of 256 tokens"]


MARKDOWN = """\
## Sums

- `a` is **one**
- b

```py
a = "x < 1"
```

| k | v |
|---|--:|
| p | 22 |

[site](https://example.com/x)
"""


def test_markdown_is_rendered_and_coloured(window, fake):
    fake.text = MARKDOWN
    say(window, "hello")
    idle(window)
    parts = "h2, li, li code, strong, .code .bar span, pre, th, td, a"
    texts = ["Sums", "a is one", "a", "one", "b", "py", 'a = "x < 1"\n', "k", "v", "p", "22", "site"]
    assert shown(window, f"#log .rendered :is({parts})") == texts
    link = "const a = document.querySelector('#log a'); return [a.getAttribute('href'), a.target, a.rel]"
    assert window.run(link) == ["https://example.com/x", "_blank", "noopener noreferrer nofollow"]
    sources = {  # a byte is a token: the first character of each place
        "h2": MARKDOWN.index("Sums"), "strong": MARKDOWN.index("one"), "pre": MARKDOWN.index("a ="),
        "td": MARKDOWN.index("p |"), "a": MARKDOWN.index("site"),
    }  # fmt: skip
    for part, at in sources.items():
        first = window.run("return document.querySelector(arguments[0]).className", f"#log .rendered {part} .t")
        assert first == f"t {TOKEN_SOURCES[at % 4]}"
    settings(window, as_tokens=True)
    assert "".join(text for text, _ in tokens(window, "#log")) == MARKDOWN, "and token by token it is all there"


def test_an_answer_in_json_is_shown_as_code(window, fake):
    fake.text = '{"city": "Paris"\n,\n"country": "*France*"}'
    say(window, "hello")
    idle(window)
    assert shown(window, "#log .rendered pre") == [f"{fake.text}\n"]
    assert "".join(text for text, _ in tokens(window, "#log")) == fake.text


HOSTILE = """\
<script>window.hit = 1</script><img src=x onerror="window.hit = 2">

[a](javascript:window.hit=3) [b](data:text/html,x) ![c](https://evil.example/p.png) <b onclick=hit()>d</b>

<iframe srcdoc="x"></iframe><style>*{display:none}</style><svg onload=x>
"""


def test_a_hostile_text_stays_harmless(window, fake, monkeypatch):
    monkeypatch.setattr(rules, "CONTEXT", 4096)
    settings(window, max_tokens="")
    fake.text = HOSTILE
    say(window, HOSTILE.replace("\n", " "))
    idle(window)
    assert shown(window, "#log .asked p")[0].startswith("<script>")
    assert "<script>window.hit = 1</script>" in shown(window, "#log .text")[0], "raw HTML is shown as text"
    assert shown(window, "#log .text :is(script, img, iframe, style, svg, b)") == []
    links = "return Array.from(document.querySelectorAll('#log .text a'), (a) => a.getAttribute('href'))"
    assert set(window.run(links)) == {None, "https://evil.example/p.png"}, "a picture is a link, scripts lead nowhere"
    handlers = "[...document.querySelectorAll('#log *')].flatMap((e) => e.getAttributeNames())"
    assert not [name for name in window.run(f"return {handlers}") if name.startswith("on") or name == "srcdoc"]
    loaded = "performance.getEntriesByType('resource').map((each) => new URL(each.name).host)"
    assert window.run(f"return [...new Set({loaded})]") == [window.run("return location.host")]
    assert window.run("return window.hit") is None


def test_pointing_at_a_token_tells_its_round_and_probabilities(window, fake):
    say(window, "hello")
    idle(window)
    over = "new PointerEvent('pointerover', {bubbles: true})"
    window.run(f"document.querySelectorAll('#log .t')[4].dispatchEvent({over})")
    (card,) = shown(window, "#card:popover-open")
    assert fake.started[-1][1].logprobs == 5
    assert "o" in card and "22.3%" in card and "90.5%" in card, "the model's own, and what it thought likelier"
    window.run("document.querySelector('#log .text').focus()")
    window.type(RIGHT)
    again = shown(window, "#card:popover-open")
    assert again and again != [card]
    window.run("document.activeElement.blur()")
    assert shown(window, "#card:popover-open") == []


@pytest.mark.parametrize("token,drafts,told", [
    (("accepted", 2, 1), 3, "Draft 1 of round 2: the model accepted it."),
    (("corrected", 2, 1), 3, "Draft 1 of round 2 was rejected. The model wrote this in its place. "
                             "The 2 drafts behind it fell with it."),
    (("corrected", 2, 1), None, "Draft 1 of round 2 was rejected. The model wrote this in its place."),
    (("bonus", 2, 4), 3, "The model's own, after it had accepted all 3 drafts of round 2."),
    (("plain", 0, 1), 3, "The first token; it comes with the prompt."),
    (("plain", 2, 1), 3, "The model's own; nothing was drafted."),
])  # fmt: skip
def test_a_token_tells_its_story(window, token, drafts, told):
    module = "return import('./playground/tokens.js').then((m) => m.story(...arguments))"
    source, of, place = token
    assert window.run(module, {"source": source, "round": of, "place": place}, drafts) == told


def test_settings_reach_the_request_and_stay(window, url, fake):
    values = {"temperature": "0.7", "top_p": "0.9", "top_k": "7", "max_tokens": "5", "seed": "3", "stop": "\n\n\nEND"}
    values |= {"system": "Be brief.", "drafts": "none", "schema": '{"type": "object"}', "probabilities": False}
    settings(window, **values)
    say(window, "hello")
    idle(window)
    params = fake.started[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.7, 0.9, 7, 5, 3)
    assert params.stop == ("END",) and not params.speculative and not params.fixed_drafts
    assert params.structured.kind == "json" and params.logprobs is None
    assert "system\nBe brief.<" in prompt_of(fake.started[-1])
    assert "cut at the limit" in shown(window, "#log .figures")[0]
    window.open(url)
    assert window.run("return [document.getElementById('top-k').value, document.getElementById('drafts').value]") == [
        "7",
        "none",
    ]


def test_a_call_is_shown_and_its_result_sent(window, fake, monkeypatch):
    monkeypatch.setattr(rules, "CONTEXT", 4096)
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    settings(window, tools=json.dumps([tool]), thinking="off")
    fake.text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    say(window, "hi")
    idle(window)
    assert shown(window, ".call") == ['get_weather{\n  "city": "Paris"\n}']
    fake.text = None
    window.run("document.querySelector('.results textarea').value = '18 degrees'")
    window.click(".results button")
    idle(window)
    assert "18 degrees" in prompt_of(fake.started[-1]) and tokens(window, "#log .turn:last-child") == COLOURED


def test_a_setting_that_is_no_json_is_said_and_shown(window, fake):
    settings(window, tools="[oops")
    say(window, "hello")
    idle(window)
    assert shown(window, "#log [role=alert]")[0].startswith("Tools in the settings must be JSON. The browser says: ")
    assert not fake.started and window.run("return document.activeElement.id") == "tools"
    assert window.run("return document.getElementById('prompt').value") == "hello"


def test_where_drafts_rest_the_page_says_so_and_asks(window, fake, monkeypatch):
    monkeypatch.setattr(rules, "TOKEN_SOURCES", ("plain", "plain", "bonus"))  # none but before they rested
    monkeypatch.setattr(fake, "config", replace(fake.config, draft="eagle3"))
    window.run("return import('./playground/status.js').then((m) => m.poll())")
    settings(window, drafts="server")
    say(window, "hello")
    idle(window)
    assert shown(window, ".notice")[0].startswith("Drafts rest: at this load the server finds plain decoding faster.")
    assert not fake.started[-1][1].fixed_drafts
    monkeypatch.undo()
    window.click(".notice button")
    idle(window)
    assert fake.started[-1][1].fixed_drafts and shown(window, ".notice") == []
    assert tokens(window, "#log") == COLOURED and len(shown(window, "#log .reply")) == 1


def test_a_busy_server_is_not_asked_for_all_drafts(window, fake, monkeypatch):
    """They would hold for everybody's requests beside this one."""
    monkeypatch.setattr(fake, "running", 3)
    window.run("return import('./playground/status.js').then((m) => m.poll())")
    say(window, "hello")
    idle(window)
    assert not fake.started[-1][1].fixed_drafts


def test_the_page_offers_every_effort(window):
    offered = window.run("return Array.from(document.getElementById('effort').options, (option) => option.value)")
    assert offered == ["", *get_args(Effort)]


def test_a_message_is_edited_and_a_reply_made_anew(window, fake):
    say(window, "one")
    idle(window)
    say(window, "two")
    idle(window)
    fake.text = "anew"
    window.run("document.querySelector('[aria-label^=\"Make this reply\"]').click()")
    idle(window)
    assert shown(window, "#log .text") == [f"{TEXT}\n", "anew\n"]
    window.run("document.querySelector('[aria-label^=\"Edit\"]').click()")
    window.run("document.activeElement.value = 'three'")
    window.type(ENTER)
    idle(window)
    assert shown(window, "#log .asked p") == ["three"] and shown(window, "#log .text") == ["anew\n"]
    assert "one" not in prompt_of(fake.started[-1]) and "three" in prompt_of(fake.started[-1])
    fake.error = RuntimeError("a secret")
    window.run("document.querySelector('[aria-label^=\"Make this reply\"]').click()")
    idle(window)
    assert shown(window, "#log .text")[0] == "anew\n" and len(shown(window, "#log [role=alert]")) == 1, "it stays"
    window.console()  # the browser notes the 503


def test_conversations_are_kept_until_they_are_deleted(window, url, fake):
    for text in ("first", "second"):
        window.click("#new-chat")
        say(window, text)
        idle(window)
    listed = "#conversations button:first-child"
    assert shown(window, listed) == ["second", "first"]
    window.open(url)
    window.until("document.querySelectorAll('#conversations li').length === 2")
    window.run("document.querySelectorAll('#conversations button:first-child')[1].click()")
    assert shown(window, ".asked p") == ["first"] and tokens(window, "#log") == COLOURED
    assert "of 8 drafts rejected" in shown(window, "#log .figures")[0]
    window.run("document.querySelectorAll('#conversations button:last-child')[1].click()")
    assert shown(window, listed) == ["second"] and shown(window, "#log > *") == []
    window.click("#told button")  # undo
    assert shown(window, listed) == ["first", "second"] and shown(window, ".asked p") == ["first"]
    assert "sesame" not in window.run("return JSON.stringify(localStorage)")


def test_where_the_browser_is_full_a_conversation_keeps_its_text_alone(window, url):
    window.run("""const set = Storage.prototype.setItem;
        Storage.prototype.setItem = function (name, value) {
            if (value.includes('"logprob"')) throw new DOMException("full", "QuotaExceededError");
            set.call(this, name, value);
        };""")
    say(window, "hello")
    idle(window)
    assert tokens(window, "#log") == COLOURED and shown(window, "#told") == [""]
    window.open(url)
    window.until("document.querySelector('#conversations button')")
    window.click("#conversations button")
    assert shown(window, "#log .text") == [f"{TEXT}\n"] and tokens(window, "#log") == []


def test_comparing_runs_plain_and_drafted_one_after_the_other(window, fake):
    window.click("#to-compare")
    say(window, "hello")
    idle(window)
    assert [(params.speculative, params.fixed_drafts, params.max_tokens) for _, params in fake.started] == [
        (False, False, 1),  # so that both find the prompt computed
        (False, False, 256),
        (True, True, 256),
    ]
    assert {params.logprobs for _, params in fake.started} == {None}, "they take time"
    assert tokens(window, "#plain") == tokens(window, "#drafted") == COLOURED
    assert shown(window, "#verdict")[0].startswith("Identical text, 19 tokens; ")


def test_times_taken_while_programs_compile_are_said_to_mean_little(window, fake, monkeypatch):
    figures, pending = FakeLLM._figures, {"programs_pending": ["forward 1", "admit 1"]}
    monkeypatch.setattr(FakeLLM, "_figures", lambda self: figures(self) | pending)
    window.run("return import('./playground/status.js').then((m) => m.poll())")
    window.click("#to-compare")
    say(window, "hello")
    idle(window)
    assert "still compiling 2 of its programs" in shown(window, "#verdict")[0]


def test_comparing_together(window, fake):
    window.click("#to-compare")
    settings(window, order="together")
    fake.open = False
    say(window, "hello")
    wait_for(lambda: fake.running == 2)
    fake.open = True
    idle(window)
    assert shown(window, "#verdict")[0].startswith("Identical text")


def test_texts_that_differ_are_said_to(window, fake, monkeypatch):
    plain = FakeLLM._deltas

    def deltas(self, prompt, params):
        self.text = "hello" if params.speculative else "help"
        return plain(self, prompt, params)

    monkeypatch.setattr(FakeLLM, "_deltas", deltas)
    window.click("#to-compare")
    say(window, "hello")
    idle(window)
    assert shown(window, "#verdict")[0].startswith("The texts part at character 4; ")


@pytest.mark.parametrize("how", ["button", "key"])
def test_a_stop_ends_the_request_and_keeps_the_text(window, fake, how):
    fake.open = False
    say(window, "hello")
    window.until("document.querySelector('#log .text')?.textContent.trim()")
    if how == "button":
        window.click("#send")
    else:
        window.type(ESCAPE)
    wait_for(lambda: fake.aborted == 1)
    idle(window)
    assert shown(window, "#log .text") == ["h\n"] and "stopped" in shown(window, "#log .figures")[0]


def test_an_error_is_a_sentence_and_the_message_given_back(window, fake):
    fake.error = RuntimeError("a secret")
    say(window, "hello")
    idle(window)
    (told,) = shown(window, "#log [role=alert]")
    assert told.startswith("The engine stopped on RuntimeError") and told.endswith(".") and "secret" not in told
    assert window.run("return document.getElementById('prompt').value") == "hello"
    assert shown(window, "#conversations li") == []
    fake.error = None
    say(window, "")
    idle(window)
    assert tokens(window, "#log") == COLOURED and shown(window, "#log [role=alert]") == []
    assert all("503" in line for line in window.console()), "which the browser itself notes"


def test_an_error_in_mid_stream_keeps_what_came(window, monkeypatch):
    plain = FakeLLM._deltas

    async def deltas(self, prompt, params):
        async for delta in plain(self, prompt, params):
            yield delta
            raise KeyError("a secret")

    monkeypatch.setattr(FakeLLM, "_deltas", deltas)
    say(window, "hello")
    idle(window)
    assert shown(window, "#log .text") == ["h\n"] and len(shown(window, "#log [role=alert]")) == 1


@pytest.mark.parametrize("width,height", [(360, 740), (1280, 800)])
def test_no_window_scrolls_sideways(window, fake, width, height):
    window.cdp(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
    )
    fake.text = f"```\n{'x' * 90}\n```\n\n|{'a|' * 20}\n|{'-|' * 20}\n"
    say(window, "x" * 100)
    idle(window)
    for tab in ("#to-chat", "#to-compare"):
        window.click(tab)
        assert window.run("return document.documentElement.scrollWidth") == width
    outside = "Array.from(document.querySelectorAll('header *, footer *'), (e) => e.getBoundingClientRect().right)"
    assert window.run(f"return Math.max(...{outside})") <= width
    assert window.run("const main = document.querySelector('main'); return main.scrollWidth <= main.clientWidth")


def test_whatever_is_pressed_or_filled_in_has_a_name(window, fake):
    say(window, "hello")
    idle(window)
    nameless = """return Array.from(document.querySelectorAll("button, input, textarea, select"))
        .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim() && each.matches("button")
            || each.labels?.[0]?.textContent.trim())).map((each) => each.outerHTML)"""
    assert window.run(nameless) == []


def test_figures_are_asked_for_only_while_somebody_looks(window):
    polls = "performance.getEntriesByType('resource').filter((each) => each.name.endsWith('server_info')).length"
    window.run("Object.defineProperty(document, 'hidden', {configurable: true, get: () => true})")
    before = window.run(f"return {polls}")
    window.run("for (let i = 0; i < 3; i++) document.dispatchEvent(new Event('visibilitychange'))")
    assert window.run(f"return {polls}") == before
    window.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    window.until(f"{polls} > {before}")


def test_a_server_with_a_key_is_told_it(_window):
    with serving(create_app(FakeLLM(), api_key="sesame")) as url:
        _window.open(url)
        _window.until("document.getElementById('served').textContent.includes('API key')")
        say(_window, "hello")
        _window.until("document.activeElement.id === 'key'")
        _window.type("sesame" + ESCAPE)
        idle(_window)
        say(_window, "")  # the message was given back
        idle(_window)
        assert tokens(_window, "#log .reply:last-child") == COLOURED
        assert "sesame" not in _window.run("return JSON.stringify(localStorage)"), "it isn't kept"
    _window.console()  # the browser notes each 401


def test_reasoning_stands_apart_and_markers_colour_nothing(window):
    """The tokens have the markers that the answer lacks."""
    parts = window.run("""
        document.body.classList.add("as-tokens");
        return import("./playground/reply.js").then(({ Reply }) => {
            const host = document.createElement("div"), reply = new Reply(host);
            const chunk = (delta, token_sources) => reply.take({choices: [{delta, token_sources}]});
            chunk({}, [["<think>", "plain"]]);
            chunk({reasoning_content: "hm, so"}, [["hm", "accepted"], [", so", "corrected"]]);
            chunk({content: "Paris"}, [["</think>\\n\\n", "accepted"], ["Par", "bonus"], ["is.", "plain"]]);
            chunk({content: "."}, []);
            return [".thinking .text", ":scope > .text"].map((part) =>
                Array.from(host.querySelectorAll(`${part} .t`), (t) => [t.textContent, t.classList[1]]));
        });
    """)
    assert parts == [
        [["hm", "accepted"], [", so", "corrected"]],
        [["Par", "bonus"], ["is", "plain"], [".", "plain"]],
    ]


def test_a_picture_is_chosen_pasted_or_dropped_and_sent(window, fake):
    fake.image_reader, fake.tokenizer = reader(), seeing_tokenizer()
    # Each way gives the page a file, as a browser does.
    add = """
        const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
        const given = new DataTransfer();
        given.items.add(new File([bytes], "a.png", { type: "image/png" }));
        const prompt = document.getElementById("prompt");
        const chosen = document.getElementById("picture");
        if (arguments[1] === "choose") {
          chosen.files = given.files;
          chosen.dispatchEvent(new Event("change"));
        } else if (arguments[1] === "paste") {
          prompt.dispatchEvent(new ClipboardEvent("paste", { clipboardData: given, bubbles: true, cancelable: true }));
        } else prompt.dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));
    """
    content = base64.b64encode(encoded(noise(56, 84))).decode()
    for count, way in enumerate(("choose", "paste", "drop"), 1):
        window.run(add, content, way)
        window.until(f"document.querySelectorAll('#pictures img').length === {count}")
    window.click("#pictures button")
    window.until("document.querySelectorAll('#pictures img').length === 2")
    say(window, "What?")
    idle(window)
    assert [each.picture.tokens for each in fake.images[-1]] == [6, 6]
    assert window.run("return document.querySelectorAll('.asked img').length") == 2
    assert window.run("return document.querySelector('.asked p').textContent") == "What?"
    assert window.run("return document.getElementById('pictures').hidden")
    window.click(".asked .tools button:last-child")  # edited, it keeps its pictures
    window.type(" Why?" + ENTER)
    idle(window)
    assert len(fake.images[-1]) == 2 and "Why?" in fake.tokenizer.decode(fake.started[-1][0])


def test_a_picture_that_the_model_cant_see_is_given_back(window, fake):
    window.run("""
        const given = new DataTransfer();
        given.items.add(new File([new Uint8Array(9)], "a.png", { type: "image/png" }));
        document.dispatchEvent(new DragEvent("drop", { dataTransfer: given, cancelable: true }));
    """)
    window.until("document.querySelectorAll('#pictures img').length === 1")
    say(window, "What?")
    idle(window)
    window.until("document.getElementById('log').textContent.includes('has no vision')")
    assert window.run("return document.getElementById('prompt').value") == "What?"
    assert window.run("return document.querySelectorAll('#pictures img').length") == 1
    window.console()  # the refusal's status is told there
