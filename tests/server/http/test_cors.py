"""Pages of other origins: `--allowed-origins` and its fellows."""

import httpx
import pytest

from server.app import create_app
from server.cli.options import UsageError, parse
from server.http.cors import cors_options
from tests.server.fake import FakeLLM
from tests.server.live import serving

PAGE = {"Origin": "https://page.example"}
PREFLIGHT = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.fixture(scope="module")
def allowed():
    cors = cors_options(parse(["--allowed-origins", '["https://page.example"]']))
    with serving(create_app(FakeLLM(), api_key="secret", cors=cors)) as url:
        yield url


def test_a_preflight_needs_no_key(allowed):
    reply = httpx.options(f"{allowed}/v1/chat/completions", headers=PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://page.example"
    assert reply.headers["access-control-allow-headers"] == "authorization"


def test_a_request_still_does_and_its_refusal_can_be_read(allowed):
    reply = httpx.get(f"{allowed}/v1/models", headers=PAGE)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (401, "https://page.example")
    reply = httpx.get(f"{allowed}/v1/models", headers=PAGE | {"Authorization": "Bearer secret"})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://page.example")
    assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


def test_streams_carry_the_header_too(allowed):
    headers = PAGE | {"Authorization": "Bearer secret"}
    reply = httpx.post(f"{allowed}/v1/completions", json={"prompt": "a", "stream": True}, headers=headers)
    assert reply.headers["access-control-allow-origin"] == "https://page.example" and "[DONE]" in reply.text


def test_another_origin_is_not_allowed(allowed):
    other = {**PREFLIGHT, "Origin": "https://other.example"}
    assert "access-control-allow-origin" not in httpx.options(f"{allowed}/v1/models", headers=other).headers


def test_by_default_no_page_is(http):
    for reply in (http.options("/v1/models", headers=PREFLIGHT), http.get("/v1/models", headers=PAGE)):
        assert "access-control-allow-origin" not in reply.headers


def test_flags_take_a_json_list_or_a_name():
    assert cors_options(parse([])) is None
    given = ["--allowed-origins", "*", "--allowed-methods", '["GET","POST"]', "--allow-credentials"]
    assert cors_options(parse(given)) == {
        "allow_origins": ["*"],
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["*"],
        "allow_credentials": True,
    }
    for bad in ("[1]", "[oops"):
        with pytest.raises(UsageError, match="--allowed-origins: must be a JSON list"):
            parse(["--allowed-origins", bad])
