"""The playground at `/`: what the page is, and in headless Chromium what it does, against the fake engine."""

import base64
import hashlib
import re

import httpx
import pytest

from jaxspec.config.request import TOKEN_SOURCES
from server.app import create_app
from server.routes.playground import PAGE
from tests.server import browser as browsers
from tests.server import fake as rules
from tests.server.fake import TEXT, FakeLLM
from tests.server.live import serving, wait_for

HTML = {"Accept": "text/html,application/xhtml+xml"}
ENTER, ESCAPE = "\ue007", "\ue00c"
page = PAGE.read_text(encoding="utf-8")


def test_a_browser_gets_the_page(http):
    reply = http.get("/", headers=HTML)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert reply.text == page and reply.headers["vary"] == "Accept"
    assert http.head("/", headers=HTML).headers["content-security-policy"]


def test_anything_else_is_told_where_the_api_is(http):
    for accept in ("*/*", "application/json"):
        reply = http.get("/", headers={"Accept": accept})
        assert reply.json()["api"] == "/v1" and reply.json()["model"] == "fake/model"
        assert reply.headers["vary"] == "Accept"


def test_the_page_is_open_and_its_calls_need_the_key():
    with serving(create_app(FakeLLM(), api_key="sesame")) as url:
        assert httpx.get(url, headers=HTML).text == page
        assert httpx.get(f"{url}/server_info").status_code == 401


def test_the_page_is_self_contained():
    assert set(re.findall(r"https?://[^\s'\"]+", page)) == {"http://www.w3.org/2000/svg"}, "a namespace, never fetched"
    assert set(re.findall(r"(?:src|href)=\"(.{5})", page)) == {"data:"}
    assert not re.search(r"@import|url\(|//cdn|importScripts|<iframe", page)


def test_nothing_runs_but_the_pages_own_script_and_style(http):
    policy = http.get("/", headers=HTML).headers["content-security-policy"]
    allowed = dict(directive.strip().split(" ", 1) for directive in policy.split(";"))
    assert allowed["default-src"] == "'none'" and allowed["connect-src"] == "'self'" and "unsafe" not in policy
    for tag in ("script", "style"):
        (block,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"\sstyle=|\son\w+=", page.split("<script>")[0]), "these the policy would refuse"


def test_text_is_never_made_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\(", page)


def test_nothing_is_stored():
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", page)


# ---- In a browser ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _window(tmp_path_factory):
    if reason := browsers.missing():
        pytest.skip(reason)
    with browsers.browser(str(tmp_path_factory.mktemp("profile"))) as window:
        yield window


@pytest.fixture
def window(_window, url, fake):
    """The page, newly opened. Nothing that a test does may put an error in the console."""
    _window.cdp("Emulation.clearDeviceMetricsOverride")
    _window.console()
    _window.open(url)
    _window.until("document.getElementById('served').textContent.startsWith('fake/model')")
    yield _window
    assert _window.console() == []


def say(window, text):
    window.run("document.getElementById('prompt').focus()")
    window.type(text + ENTER)


def idle(window):
    window.until("running === null")


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


def test_a_chat_shows_each_token_by_its_source(window, fake):
    say(window, "hello")
    idle(window)
    assert shown(window, ".asked p") == ["hello"] and shown(window, ".reply .text") == [TEXT]
    assert tokens(window, "#log") == COLOURED
    assert "19 tokens" in shown(window, "#log .figures")[0]
    say(window, "and?")
    idle(window)
    history = rules.byte_tokenizer().decode(fake.started[-1][0], skip_special_tokens=False)
    assert history.count(TEXT) == 1 and history.endswith("and?<|im_end|>\n<|im_start|>assistant\n")
    window.click("#new-chat")
    assert shown(window, "#log > *") == []


def test_settings_reach_the_request(window, fake):
    window.run(
        "for (const [id, value] of Object.entries(arguments[0])) document.getElementById(id).value = value;"
        "document.getElementById('speculative').checked = false",
        {"temperature": "0.7", "max-tokens": "5", "seed": "3", "system": "Be brief."},
    )
    say(window, "hello")
    idle(window)
    prompt, params = fake.started[-1]
    assert (params.temperature, params.max_tokens, params.seed, params.speculative) == (0.7, 5, 3, False)
    assert "system\nBe brief.<" in rules.byte_tokenizer().decode(prompt, skip_special_tokens=False)
    assert "cut at the limit" in shown(window, "#log .figures")[0]


def test_comparing_runs_plain_and_drafted_one_after_the_other(window, fake):
    window.click("#to-compare")
    say(window, "hello")
    idle(window)
    assert [(params.speculative, params.max_tokens) for _, params in fake.started] == [
        (False, 1),  # so that both find the prompt computed
        (False, 256),
        (True, 256),
    ]
    assert tokens(window, "#plain") == tokens(window, "#drafted") == COLOURED
    assert shown(window, "#verdict")[0].startswith("Identical text, 19 tokens; ")


def test_times_taken_while_programs_compile_are_said_to_mean_little(window, fake, monkeypatch):
    figures, pending = FakeLLM._figures, {"programs_pending": ["forward 1", "admit 1"]}
    monkeypatch.setattr(FakeLLM, "_figures", lambda self: figures(self) | pending)
    window.run("poll()")
    window.until("pending === 2")
    window.click("#to-compare")
    say(window, "hello")
    idle(window)
    assert "still compiling 2 of its programs" in shown(window, "#verdict")[0]


def test_comparing_together(window, fake):
    window.click("#to-compare")
    window.run("document.getElementById('order').value = 'together'")
    fake.open = False
    say(window, "hello")
    wait_for(lambda: fake.running == 2)
    fake.open = True
    idle(window)
    assert shown(window, "#verdict")[0].startswith("Identical text")


def test_texts_that_differ_are_said_to(window, fake, monkeypatch):
    plain = FakeLLM._deltas

    def deltas(self, prompt, params):
        monkeypatch.setattr(rules, "TEXT", "hello" if params.speculative else "help")
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
    window.until("document.querySelector('#log .text').textContent")
    if how == "button":
        window.click("#send")
    else:
        window.type(ESCAPE)
    wait_for(lambda: fake.aborted == 1)
    idle(window)
    assert shown(window, "#log .text") == ["h"] and "stopped" in shown(window, "#log .figures")[0]


def test_an_error_is_shown_and_the_message_given_back(window, fake):
    fake.error = RuntimeError("a secret")
    say(window, "hello")
    idle(window)
    (told,) = shown(window, "#log [role=alert]")
    assert "the engine stopped on RuntimeError" in told and "secret" not in told
    assert window.run("return document.getElementById('prompt').value") == "hello"
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
    assert shown(window, "#log .text") == ["h"] and len(shown(window, "#log [role=alert]")) == 1


def test_markup_is_shown_as_text(window, fake, monkeypatch):
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    monkeypatch.setattr(rules, "TEXT", attack)
    say(window, attack)
    idle(window)
    assert shown(window, "#log .asked p") == shown(window, "#log .text") == [attack]
    assert shown(window, "#log img, #log script") == []


def test_a_phone_scrolls_one_way_only(window):
    window.cdp("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    say(window, "x" * 200)
    idle(window)
    for tab in ("#to-chat", "#to-compare"):
        window.click(tab)
        assert window.run("return document.documentElement.scrollWidth") == 360
    outside = "Array.from(document.querySelectorAll('header *, footer *'), (e) => e.getBoundingClientRect().right)"
    assert window.run(f"return Math.max(...{outside})") <= 360


def test_figures_are_asked_for_only_while_somebody_looks(window):
    polls = "performance.getEntriesByType('resource').filter((each) => each.name.endsWith('server_info')).length"
    window.run("Object.defineProperty(document, 'hidden', {configurable: true, get: () => true}); poll()")
    before = window.run(f"return {polls}")
    window.run("for (let i = 0; i < 3; i++) document.dispatchEvent(new Event('visibilitychange'))")
    assert window.run("return timer && poll()") is None and window.run(f"return {polls}") == before
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
        assert shown(_window, "#log .text")[-1] == TEXT
    _window.console()  # the browser notes each 401


def test_reasoning_stands_apart_and_markers_colour_nothing(window):
    """The tokens have the markers that the answer lacks."""
    parts = window.run("""
        const host = document.createElement("div"), reply = new Reply(host);
        const chunk = (delta, sources) => reply.take({choices: [{delta, token_sources: sources, finish_reason: null}]});
        chunk({}, [["<think>", "plain"]]);
        chunk({reasoning_content: "hm, so"}, [["hm", "accepted"], [", so", "corrected"]]);
        chunk({content: "Paris"}, [["</think>\\n\\n", "accepted"], ["Par", "bonus"], ["is.", "plain"]]);
        chunk({content: "."}, []);
        return [".thinking .text", ":scope > .text"].map((part) =>
            Array.from(host.querySelectorAll(`${part} .t`), (t) => [t.textContent, t.classList[1]]));
    """)
    assert parts == [
        [["hm", "accepted"], [", so", "corrected"]],
        [["Par", "bonus"], ["is", "plain"], [".", "plain"]],
    ]
