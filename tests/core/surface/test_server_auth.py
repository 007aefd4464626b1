"""The API key guards every route but an explicit list, however the path is spelt."""

import http.client

import pytest

KEY = "sk-one"
OTHER = "sk-two"


@pytest.fixture(scope="module")
def guarded(scripted):
    server = {"api_keys": (KEY, OTHER)}
    with scripted.running(scripted.says("x"), server=server) as world:
        yield world


def raw(world, method, target, headers=None):
    """Sends a request target as it is: no client may tidy it up."""
    connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=5)
    connection.putrequest(method, target, skip_accept_encoding=True)
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


PATHS = [
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
    "/metrics", "/version", "/openapi.json", "/score", "/pooling", "/", "//v1/models",
    "//health", "/health/", "/health/..//v1/models", "/%76%31/models", "/v1/../v1/models",
    "/v1/models?x=/health", "/health%2f", "/HEALTH", "/v1/models#/health", "/docs", "/redoc",
    "http://127.0.0.1/v1/models", "/health/ready/x", "/.", "*",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "PUT", "BREW"])
@pytest.mark.parametrize("path", PATHS)
def test_without_a_key_nothing_is_reached(guarded, method, path):
    response, body = raw(guarded, method, path)
    assert response.status == 401
    assert response.headers["www-authenticate"] == "Bearer"
    if method != "HEAD":
        assert b'"type":"authentication_error"' in body


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/%68ealth", "/health?x=1"])
def test_the_open_list(guarded, path):
    assert raw(guarded, "GET", path)[0].status == 200
    assert raw(guarded, "POST", path)[0].status == 401
    assert raw(guarded, "OPTIONS", path)[0].status == 401


def test_every_route_of_the_application_is_guarded_or_listed(guarded):
    """A route that somebody adds is guarded unless it is put on the list."""
    from leadframe.server.app import OPEN_PATHS, create_app

    paths = {route.path for route in create_app(guarded.services).router.routes}
    assert paths >= OPEN_PATHS
    for path in paths - OPEN_PATHS:
        target = path.replace("{model:path}", "x")
        assert raw(guarded, "GET", target)[0].status == 401, path


@pytest.mark.parametrize(
    "value",
    [
        "", "Bearer", "Bearer ", "Bearer  ", "bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}", f"Bearer{KEY}", f"Bearer {KEY} {KEY}", "Bearer sk-ONE",
        f"Token {KEY}", "Bearer \u00e9",
    ],
)  # fmt: skip
def test_wrong_keys(guarded, value):
    headers = {"Authorization": value.encode("latin-1")}
    assert raw(guarded, "GET", "/v1/models", headers)[0].status == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("key", [KEY, OTHER])
def test_every_key_opens_every_route(guarded, scheme, key):
    headers = {"Authorization": f"{scheme} {key}"}
    assert raw(guarded, "GET", "/v1/models", headers)[0].status == 200
    assert raw(guarded, "GET", "/metrics", headers)[0].status == 200
    assert raw(guarded, "GET", "/nope", headers)[0].status == 404
    assert guarded.http.post("/v1/completions", json={"prompt": "a"}, headers=headers).is_success


def test_two_authorization_headers_are_refused(guarded):
    headers = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer x")]
    assert guarded.http.get("/v1/models", headers=headers).status_code == 401


def test_a_refusal_does_not_read_the_body(guarded):
    response, _ = raw(guarded, "POST", "/v1/completions", {"Content-Length": str(10**9)})
    assert response.status == 401
    assert response.headers["connection"] == "close"


def test_root_path_opens_nothing(guarded):
    """An ASGI server may set root_path; the guard asks the same routes as the dispatch."""
    import asyncio

    from leadframe.server.app import create_app

    app = create_app(guarded.services)

    async def status_of(path, root_path):
        statuses = []
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
            "root_path": root_path, "query_string": b"", "headers": [], "scheme": "http",
            "http_version": "1.1", "server": ("x", 80), "client": ("y", 1), "state": {},
        }  # fmt: skip

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            statuses.append(message.get("status"))

        await app(scope, receive, send)
        return statuses[0]

    for path, root_path in (
        ("/v1/models", "/v1"), ("/health/v1/models", "/health"), ("/v1/models", "/health"),
        ("/x/v1/models", "/x"), ("/health/health/v1/models", "/health"),
    ):  # fmt: skip
        assert asyncio.run(status_of(path, root_path)) == 401
    assert asyncio.run(status_of("/x/health", "/x")) == 200


def test_digests_of_all_keys_are_compared_in_constant_time(guarded, monkeypatch):
    import hmac

    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        "leadframe.server.auth.hmac.compare_digest",
        lambda a, b: compared.append((len(a), len(b))) or compare(a, b),
    )
    for key in (KEY, OTHER, "wrong"):
        compared.clear()
        guarded.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert compared == [(32, 32), (32, 32)]


def test_without_keys_every_route_is_open(world):
    assert world.http.get("/v1/models").status_code == 200
    assert world.http.get("/metrics").status_code == 200
