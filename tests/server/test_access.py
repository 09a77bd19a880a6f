"""Access control: keys and their limits, hosts, origins, media types, TLS."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.client import EngineClient
from razor_dist.server.access import is_loopback, load_keys, tls_context
from razor_dist.server.main import Frontend, bind
from tests import fake_engine
from tests.server.process import ROOT, ServerProcess, fake_server, wait_until

ADA, BOB = "sk-ada-0123456789", "sk-bob-0123456789"
TEXT = {"model": "smollm2", "prompt": "Hello"}
# Every route, and what a holder of a key gets from it.
ROUTES = {
    ("POST", "/v1/chat/completions"): 400,
    ("POST", "/v1/completions"): 400,
    ("POST", "/v1/messages"): 400,
    ("POST", "/v1/messages/count_tokens"): 400,
    ("POST", "/v1/responses"): 400,
    ("POST", "/tokenize"): 400,
    ("POST", "/detokenize"): 400,
    ("POST", "/documents/text"): 415,
    ("GET", "/openapi.json"): 200,
    ("GET", "/docs"): 200,
    ("GET", "/version"): 200,
    ("GET", "/ping"): 200,
    ("GET", "/metrics"): 200,
    ("GET", "/v1/models"): 200,
    ("GET", "/v1/models/smollm2"): 200,
    ("GET", "/v1/contexts"): 200,
    ("GET", "/v1/contexts/smollm2"): 404,
    ("GET", "/v1/contexts/smollm2/messages"): 404,
    ("DELETE", "/v1/contexts/smollm2"): 404,
    ("GET", "/stats"): 200,
    ("GET", "/nothing/here"): 404,
    ("DELETE", "/v1/models"): 405,
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# who may ask\n{ADA}  # Ada's\n\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def guarded(keys: Path) -> Iterator[ServerProcess]:
    """A server with four keys, of which each may have two requests and 100 tokens in flight."""
    limits = ("--max-requests-per-key", "2", "--max-tokens-per-key", "100")
    origin = ("--allowed-origins", "https://books.example")
    given = ("--api-key-file", str(keys), "--api-key", BOB, "--api-key", "sk-1,sk-2")
    with fake_server(*given, *limits, *origin) as server:
        server.url()
        yield server


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.long
def test_every_route_but_health_wants_a_key(guarded: ServerProcess) -> None:
    url = guarded.url()
    documented = httpx.get(f"{url}/openapi.json", headers=with_key(ADA)).json()["paths"]
    asked = {path.replace("smollm2", "{model}") for _, path in ROUTES}
    assert {re.sub(r"{.*}", "{model}", path) for path in documented} - {"/health"} <= asked
    wrong = (
        {},
        with_key("sk-ada-0123456780"),
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {ADA}"},
    )
    for (method, path), status in ROUTES.items():
        body: dict[str, Any] = {"json": {}} if method == "POST" else {}
        for headers in wrong:
            refused = httpx.request(method, url + path, headers=headers, **body)
            assert code_of(refused) == (401, "invalid_api_key"), path
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["type"] == "authentication_error", path
        other = "GET" if method == "POST" else "POST"
        assert code_of(httpx.request(other, url + path)) == (401, "invalid_api_key"), path
        for key in (ADA, BOB):
            answer = httpx.request(method, url + path, headers=with_key(key), **body)
            assert answer.status_code == status, path
    both = {"Authorization": "Basic cHJveHk6", "x-api-key": ADA}  # the first is a proxy's
    assert httpx.get(f"{url}/v1/models", headers=both).status_code == 200
    assert httpx.get(f"{url}/health").status_code == 200
    counts = httpx.get(f"{url}/metrics", headers=with_key(ADA)).text
    for handler in ("/stats", "/v1/models/{name:path}", "unknown"):  # the last: /nothing/here
        assert f'handler="{handler}",method="GET",status="401"' in counts, handler
    assert ADA not in guarded.log and BOB not in guarded.log


def test_the_page_needs_no_key_to_ask_for_one(guarded: ServerProcess) -> None:
    url = guarded.url()
    page = httpx.get(f"{url}/")
    policy = page.headers["content-security-policy"]
    assert page.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    found = {*re.findall(r'(?:href|src)="(page/[^"]+)"', page.text), "page/api.js"}
    assert {"page/main.js", "page/style.css", "page/icon.svg"} < found
    for path in found:
        file = httpx.head(f"{url}/{path}")
        assert file.status_code == 200 and file.headers["content-security-policy"] == policy
        assert file.headers["x-content-type-options"] == "nosniff"
    for path in ("page/", "page/../app.py", "page/%2e%2e/app.py", "page//etc/passwd", "page/x.js"):
        assert httpx.get(f"{url}/{path}").status_code in (401, 404), path


def test_the_official_client_brings_its_key(guarded: ServerProcess) -> None:
    url = f"{guarded.url()}/v1"
    client = openai.OpenAI(base_url=url, api_key=BOB, max_retries=0)
    assert client.completions.create(**TEXT, max_tokens=1).usage.completion_tokens == 1
    with pytest.raises(openai.AuthenticationError, match="wants a key"):
        openai.OpenAI(base_url=url, api_key="none", max_retries=0).models.list()


def test_a_key_has_its_own_limits(guarded: ServerProcess) -> None:
    url = f"{guarded.url()}/v1/completions"

    def ask(key: str, **fields: Any) -> httpx.Response:
        body = {**TEXT, "max_tokens": 4, **fields}
        return httpx.post(url, json=body, headers=with_key(key), timeout=20)

    # The prompt and as many as the answer may have: 1 + 99 fit, 2 + 99 do not.
    assert ask(ADA, prompt=[5], max_tokens=99).status_code == 200
    many = ask(ADA, prompt=[5, 6], max_tokens=99)
    assert many.status_code == 400 and many.json()["error"]["param"] == "max_tokens"
    assert "asks for 101 tokens" in many.json()["error"]["message"]
    assert "give 'max_tokens'" in many.json()["error"]["message"]
    asked = {"model": "smollm2", "input": "a", "max_output_tokens": 99}
    many = httpx.post(f"{guarded.url()}/v1/responses", json=asked, headers=with_key(ADA))
    assert many.status_code == 400 and many.json()["error"]["param"] == "max_output_tokens"
    assert "give 'max_output_tokens'" in many.json()["error"]["message"]
    hang = {**TEXT, "prompt": [fake_engine.HANG], "max_tokens": 40, "stream": True}
    with httpx.stream("POST", url, json=hang, headers=with_key(ADA), timeout=20):
        assert "41 tokens in flight" in ask(ADA, prompt=[5], max_tokens=99).text
        with httpx.stream("POST", url, json=hang, headers=with_key(ADA), timeout=20):
            third = ask(ADA)
            assert code_of(third) == (429, "rate_limit_exceeded")
            # The engine's estimate for the first of the two; it comes with the next heartbeat.
            assert wait_until(lambda: ask(ADA).headers["retry-after"] == "8", 20)
            assert int(third.headers["retry-after"]) >= 1
            assert ask(BOB).status_code == 200
    assert wait_until(lambda: ask(ADA, prompt=[5], max_tokens=99).status_code == 200, 10)


def test_only_named_origins_may_use_it_from_a_browser(guarded: ServerProcess) -> None:
    url = guarded.url()
    good, evil = "https://books.example", "https://evil.example"
    asked = {"Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    path = f"{url}/v1/completions"
    preflight = httpx.options(path, headers={"Origin": good, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == good
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = httpx.options(path, headers={"Origin": evil, **asked})
    assert "access-control-allow-origin" not in refused.headers
    asked["Access-Control-Request-Private-Network"] = "true"
    preflight = httpx.options(path, headers={"Origin": good, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-private-network"] == "true"
    assert httpx.options(path, headers={"Origin": evil, **asked}).status_code == 400
    for origin in (evil, "null", "http://books.example", f"{good}.evil.example"):
        headers = {"Origin": origin, **with_key(ADA)}
        foreign = httpx.post(path, json=TEXT, headers=headers)
        assert code_of(foreign) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in foreign.headers
    for origin in (good, url):  # the second is the server's own page
        answer = httpx.post(path, json=TEXT, headers={"Origin": origin, **with_key(ADA)})
        assert answer.status_code == 200
    unknown = httpx.post(path, json=TEXT, headers={"Origin": good})
    assert unknown.headers["access-control-allow-origin"] == good  # a page may read the error


def test_a_server_on_loopback_has_no_other_name(url: str) -> None:
    port = httpx.URL(url).port
    for host in ("evil.example", f"evil.example.:{port}", "127.0.0.1.nip.example", ""):
        for path in ("/health", "/v1/models", "/stats"):
            rebound = httpx.get(url + path, headers={"Host": host})
            assert code_of(rebound) == (403, "host_not_allowed"), host
        rebound = httpx.post(f"{url}/v1/completions", json=TEXT, headers={"Host": host})
        assert code_of(rebound) == (403, "host_not_allowed")
    for host in (f"127.0.0.1:{port}", "LOCALHOST", "localhost.:80", "[::1]:80", "10.0.0.7"):
        assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200, host


def test_a_server_that_is_bound_to_loopback_by_another_name(
    tmp_path: Path,
) -> None:
    async def statuses(app: Any) -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            hosts = "evil.example", "127.1:80", "127.0.0.1"
            url = "http://x/version"
            return [(await http.get(url, headers={"Host": host})).status_code for host in hosts]

    config = ServerConfig(host="127.1", port=0)
    with bind(config) as listener:
        frontend = Frontend(config, EngineClient(tmp_path / "engine"), listener)
        assert asyncio.run(statuses(frontend._uvicorn_config().app)) == [403, 200, 200]
    assert is_loopback("::ffff:127.0.0.1") and not is_loopback("::ffff:10.0.0.7")


def test_a_body_must_say_that_it_is_json(url: str) -> None:
    path = f"{url}/v1/completions"
    content = b'{"model": "smollm2", "prompt": "Hello"}'
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"):
        headers = {} if kind is None else {"Content-Type": kind}
        refused = httpx.post(path, content=content, headers=headers)
        assert code_of(refused) == (415, "unsupported_media_type")
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert httpx.post(path, content=content, headers={"Content-Type": kind}).is_success
    for encoding in ("gzip", "br", "Identity", ""):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        answer = httpx.post(path, content=content, headers=headers)
        if encoding in ("gzip", "br"):
            assert code_of(answer) == (415, "unsupported_media_type")
            assert f"Content-Encoding '{encoding}' is not supported" in answer.text
        else:
            assert answer.is_success


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"api_key": "with space"}, "api_key must be a list of keys"),
        ({"api_key": 5}, "api_key must be a list of keys"),
        ({"api_key": ["sk-1", ""]}, "api_key must be a list of keys"),
        ({"ssl_certfile": "a.pem"}, "ssl_certfile is given without ssl_keyfile"),
        ({"max_requests_per_key": 2}, "max_requests_per_key is a limit for each key"),
        *(
            ({"allowed_origins": origin}, r"allowed_origins must be \* or origins without a path")
            for origin in (
                *('["*"]', "http://app/", "app.example", "https://*.example", "https://a:443"),
                *("http://a:80", "http://b\N{LATIN SMALL LETTER U WITH DIAERESIS}cher", "http://"),
            )
        ),
        *(
            ({"allowed_hosts": ["good", host]}, r"allowed_hosts must be \* or names without scheme")
            for host in ("http://name", '["*"]', "name:8000", "*.example", "name/", "cafe:80")
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        ServerConfig(**settings)
    assert "with space" not in str(error.value)


def test_hosts_and_origins_that_clients_send_are_taken() -> None:
    hosts = "*,app.example,my_app,10.0.0.7,::1,Books.example."
    assert ServerConfig(allowed_hosts=hosts).allowed_hosts == tuple(hosts.split(","))
    origins = "*,null,http://[::1]:3000,https://a.b:8443,chrome-extension://abc,http://a:443"
    found = ServerConfig(allowed_origins=f"{origins},HTTPS://Books.example").allowed_origins
    assert found == (*origins.split(","), "https://books.example")


def test_a_file_of_keys_that_cannot_be_used_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    config = ServerConfig(api_key_file=str(path), api_key="sk-1,sk-2")
    with pytest.raises(ConfigError, match="cannot read api_key_file"):
        load_keys(config)
    for text in ("", "# none\n", "two words\n", "sk-é\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="must hold a key on each line") as error:
            load_keys(config)
        assert not text.strip() or text.strip() not in str(error.value)
    path.write_text("sk-3#4\t# a comment\n#sk-5\n")
    path.chmod(0o644)
    assert {hashlib.sha256(f"sk-{key}".encode()).digest() for key in ("1", "2", "3#4")} == set(
        load_keys(config)
    )
    assert "other users can read the keys" in caplog.text


@pytest.mark.long
def test_it_speaks_tls(certificate: tuple[str, str], tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=certificate[0])
    told = tmp_path / "url"
    tls = ("--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1])
    with fake_server(*tls, "--url-file", str(told)) as server:
        url = server.url(r"^Serving .* on (https://\S+)$")
        with httpx.Client(verify=context) as http:
            assert http.post(f"{url}/v1/completions", json=TEXT).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http{url.removeprefix('https')}/health")
        # The container's health check knows port and scheme, however they were given, and takes
        # no proxy.
        assert told.read_text() == url
        text = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", "")
        found = re.search(r"^HEALTHCHECK .* CMD (.*)$", text, re.MULTILINE)
        assert found is not None
        for file, works in ((told, True), (tmp_path / "none", False)):
            check = [sys.executable, *json.loads(found[1])[1:]]
            environment = {**os.environ, "RAZOR_URL_FILE": str(file), "no_proxy": ""}
            environment |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
            done = subprocess.run(check, env=environment, capture_output=True)
            assert (done.returncode == 0) is works, done.stderr
        assert "Traceback" not in server.log


def test_tls_files_that_cannot_be_used_are_told(
    certificate: tuple[str, str], tmp_path: Path
) -> None:
    encrypted = str(tmp_path / "key.pem")
    secret = ["-aes256", "-passout", "pass:secret"]
    command = ["openssl", "ec", "-in", certificate[1], *secret, "-out", encrypted]
    subprocess.run(command, check=True, capture_output=True)
    for files in ((certificate[0], "/no/key"), certificate[::-1], (certificate[0], encrypted)):
        config = ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1])
        with pytest.raises(ConfigError, match="cannot be used: "):
            tls_context(config)


@pytest.mark.long
def test_keys_are_given_one_by_one_or_together(guarded: ServerProcess) -> None:
    url = f"{guarded.url()}/v1/models"
    keys = (ADA, BOB, "sk-1", "sk-2", "sk-3")
    found = [httpx.get(url, headers=with_key(key)).status_code for key in keys]
    assert found == [200, 200, 200, 200, 401]


@pytest.mark.long
def test_no_other_process_has_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAZOR_API_KEY", ADA)
    with fake_server() as server:
        # So long that another process reads it.
        long = b'{"model": "smollm2", "prompt": "Hi"}' + b" " * 2**18
        headers = with_key(ADA) | {"Content-Type": "application/json"}
        url = f"{server.url()}/tokenize"
        assert httpx.post(url, content=long, headers=headers, timeout=60).status_code == 200
        front, *others = server.family()
        assert front.environ()["RAZOR_API_KEY"] == ADA
        assert len(others) == 3  # two ranks and the process that reads long bodies
        assert not any(ADA in other.environ().values() for other in others)


@pytest.mark.long
def test_an_open_server_warns() -> None:
    with fake_server("--host", "0.0.0.0", "--allowed-hosts", "*") as server:
        health = f"http://127.0.0.1:{httpx.URL(server.url()).port}/health"
        assert "anybody who reaches" in server.log
        assert httpx.get(health, headers={"Host": "x"}).status_code == 200
