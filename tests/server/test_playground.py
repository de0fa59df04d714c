"""The playground at `/`: its files, and what they may load."""

import json
import re
from fnmatch import fnmatch

import httpx
import pytest

from server.app import create_app
from server.routes.playground import FOLDER, PAGE
from tests.server.fake import FakeLLM
from tests.server.live import serving

HTML = {"Accept": "text/html,application/xhtml+xml"}
page = PAGE.read_text(encoding="utf-8")
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js")}


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


def test_every_file_that_the_page_names_is_served(http):
    """And is in the wheel: `package-data` lists the folders by pattern."""
    named = set(re.findall(r'(?:src|href)="(playground/[^"]+)"', page))
    for text in SCRIPTS.values():
        named |= {f"playground/{name}" for name in re.findall(r'(?:from|import) "\./([^"]+)"', text)}
    kinds = {"js": "text/javascript", "css": "text/css"}
    for name in named:
        reply = http.get(f"/{name}")
        assert reply.status_code == 200 and reply.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        assert reply.headers["x-content-type-options"] == "nosniff" and reply.headers["cache-control"] == "no-cache"
        assert http.get(f"/{name}", headers={"If-None-Match": reply.headers["etag"]}).status_code == 304
    files = {f"playground/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*") if path.suffix in (".js", ".css")}
    assert files == named, "no file is left over"
    shipped = re.search(r'^"server" = (.*)$', (FOLDER.parents[1] / "pyproject.toml").read_text(), re.M)[1]
    assert all(any(fnmatch(name, p) and name.count("/") == p.count("/") for p in json.loads(shipped)) for name in files)


def test_libraries_come_with_their_licences():
    for library in (FOLDER / "vendor").glob("*.js"):
        licence = library.with_suffix(".LICENSE.txt").read_text()
        assert "MIT" in licence or "Apache License" in licence
        assert re.search(r" v?\d+\.\d+\.\d+ ", library.read_text()[:200]), "says its version"


@pytest.mark.parametrize("path", ["index.html", "../routes/playground.py", "%2e%2e/app.py", "vendor", "nothing.js"])
def test_nothing_else_is_served(http, path):
    reply = http.get(f"/playground/{path}")
    assert reply.status_code == 404 and "error" in reply.json()
    assert http.post("/playground/app.js").headers["allow"] == "GET, HEAD"


def test_the_page_is_open_and_its_calls_need_the_key():
    with serving(create_app(FakeLLM(), api_key="sesame")) as url:
        assert httpx.get(url, headers=HTML).text == page
        assert httpx.get(f"{url}/playground/app.js").status_code == 200
        assert httpx.get(f"{url}/server_info").status_code == 401
        assert httpx.get(f"{url}/playground").status_code == 401


def test_the_page_names_no_other_host():
    own = [page, (FOLDER / "style.css").read_text(), *SCRIPTS.values()]
    assert set(re.findall(r"https?://[^\s'\"]+", "".join(own))) == {"http://www.w3.org/2000/svg"}, "is never fetched"
    assert not re.search(r"@import|url\(|//cdn|importScripts|<iframe", "".join(own))


def test_nothing_runs_but_the_pages_own_scripts_and_styles(http):
    policy = http.get("/", headers=HTML).headers["content-security-policy"]
    allowed = dict(directive.strip().split(" ", 1) for directive in policy.split(";"))
    assert allowed["default-src"] == "'none'" and "unsafe" not in policy
    assert {allowed[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert allowed["img-src"] == "data:" and allowed["trusted-types"] == "dompurify"
    assert allowed["require-trusted-types-for"] == "'script'"
    assert not re.search(r"<style|<script(?! type=\"module\" src=)|\sstyle=|\son\w+=", page), "would be refused"


def test_text_becomes_markup_through_dompurify_alone():
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\("
    assert not re.search(markup, "".join(SCRIPTS.values()))
    assert "".join(SCRIPTS.values()).count("marked.parse(") == 1
    assert "DOMPurify.sanitize(marked.parse(text), ALLOWED)" in SCRIPTS["markdown.js"]
