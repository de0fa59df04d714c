"""Pages in browsers: those of other origins, and names that were made to point here."""

import httpx
import pytest

from server.__main__ import _bind
from server.app import create_app
from server.cli.options import parse
from server.http.cors import host_names
from tests.server.fake import FakeLLM
from tests.server.live import serving

FRIEND, STRANGER = "https://friend.example", "https://stranger.example"


@pytest.fixture(scope="module")
def url():
    cors = {"allow_origins": [FRIEND], "allow_methods": ["*"]}
    with serving(create_app(FakeLLM(), hosts=["llm.example"], cors=cors, rollout_routes=True)) as url:
        yield url


HERE = ("127.0.0.1", "127.8.9.10:80", "localhost", "LocalHost:30000", "localhost.", "a.localhost", "[::1]", "[::1]:9")


@pytest.mark.parametrize("host, allowed", [
    *((host, True) for host in (*HERE, "llm.example", "LLM.example:443")),
    *((host, False) for host in (
        "stranger.example", "stranger.example:30000", "localhost.stranger.example", "127.0.0.1.stranger.example",
        "llm.example.stranger.example", "0.0.0.0", "192.168.1.4", "[::2]", "127.0.0.1@stranger.example", "", ":80",
        "127.0.0.1, stranger.example", "notlocalhost",
    )),
])  # fmt: skip
def test_a_host_name_that_is_not_this_machines_is_refused(url, host, allowed):
    for method, path in (("GET", "/health"), ("GET", "/"), ("POST", "/v1/completions")):
        body = {"prompt": "a"} if method == "POST" else None
        reply = httpx.request(method, f"{url}{path}", headers={"Host": host}, json=body)
        assert reply.status_code == (200 if allowed else 403)
        assert allowed or "--allowed-hosts" in reply.json()["error"]["message"]


@pytest.mark.parametrize("flags, address, key, names", [
    ([], "127.0.0.1", False, []),
    ([], "::1", False, []),
    ([], "127.0.0.1", True, None),
    ([], "0.0.0.0", False, None),
    (["--allowed-hosts", "A.example."], "127.0.0.1", True, ["a.example"]),
    (["--allowed-hosts", '["a", "b"]'], "0.0.0.0", False, ["a", "b"]),
    (["--allowed-hosts", "*"], "127.0.0.1", False, None),
])  # fmt: skip
def test_names_are_checked_where_a_page_could_reach_what_has_no_key(flags, address, key, names):
    assert host_names(parse(flags), address, key) == names


def test_the_address_is_the_one_that_is_listened_on():
    with _bind("localhost", 0) as listener:
        assert host_names(parse([]), listener.getsockname()[0], False) == []


CHANGES = (("POST", "/start_profile"), ("POST", "/stop_profile"), ("POST", "/flush_cache"), ("GET", "/flush_cache"))


@pytest.mark.parametrize("headers, allowed", [
    ({}, True),
    ({"Origin": FRIEND}, True),
    ({"Sec-Fetch-Site": "same-origin", "Origin": STRANGER}, True),  # behind a proxy with a name of its own
    ({"Sec-Fetch-Site": "none"}, True),  # typed by a person
    ({"Origin": "chrome-extension://abcdef", "Sec-Fetch-Site": "cross-site"}, True),
    ({"Origin": "http://llm.example", "Host": "llm.example"}, True),
    ({"Origin": "https://llm.example:8443", "Host": "llm.example"}, True),
    ({"Origin": STRANGER}, False),
    ({"Origin": "null"}, False),
    ({"Origin": "http://127.0.0.1:1"}, False),  # another server's page on this machine
    ({"Origin": FRIEND.upper() + ".stranger.example"}, False),
    ({"Sec-Fetch-Site": "cross-site"}, False),
    ({"Sec-Fetch-Site": "same-site"}, False),
    ({"Sec-Fetch-Site": "cross-site", "Origin": STRANGER}, False),
])  # fmt: skip
def test_a_page_of_another_origin_changes_nothing(url, headers, allowed):
    for method, path in CHANGES:
        reply = httpx.request(method, f"{url}{path}", headers=headers)
        assert (reply.status_code != 403) == allowed
        assert allowed or "--allowed-origins" in reply.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_an_image_of_a_page_empties_no_cache(url):
    """Over plain HTTP to another machine, a browser says nothing of the page, but says that it is one."""
    browser = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"}
    assert httpx.get(f"{url}/flush_cache", headers=browser).status_code == 403
    assert httpx.post(f"{url}/flush_cache", headers=browser).status_code == 200


def test_with_a_key_the_key_decides():
    with serving(create_app(FakeLLM(), api_key="k")) as url:
        stranger = {"Origin": STRANGER, "Host": "stranger.example"}
        assert httpx.post(f"{url}/flush_cache", headers=stranger).status_code == 401
        stranger["Authorization"] = "Bearer k"
        assert httpx.post(f"{url}/flush_cache", headers=stranger).status_code == 200
