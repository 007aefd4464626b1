"""Fixtures of the HTTP tests."""

import importlib.util
from pathlib import Path

import pytest


def _load():
    path = Path(__file__).with_name("scripted_world.py")
    spec = importlib.util.spec_from_file_location("leadframe_scripted_world", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_SCRIPTED = _load()


@pytest.fixture(scope="session")
def scripted():
    """The module scripted_world.py."""
    return _SCRIPTED


@pytest.fixture(scope="module")
def world():
    """A server whose model says "Hello, world!" to everything; shared by the tests of a file."""
    with _SCRIPTED.running(_SCRIPTED.says("Hello, world!")) as world:
        yield world
        world.wait_idle()


@pytest.fixture
def start():
    """Starts servers of one's own: start(script, server={...}, **engine)."""
    worlds = []

    def make(script, **kwargs):
        worlds.append(_SCRIPTED.World(script, **kwargs))
        return worlds[-1]

    yield make
    for world in worlds:
        world.stop()


@pytest.fixture
def error_of():
    """Checks that a reply is a bounded error of OpenAI's shape, and returns the error."""

    def check(response, status=400, param=None):
        assert response.status_code == status, response.text
        assert len(response.content) < 4096
        assert response.headers["content-type"] == "application/json"
        body = response.json()
        assert list(body) == ["error"]
        assert set(body["error"]) == {"message", "type", "param", "code"}
        if param is not None:
            assert body["error"]["param"] == param, body
        return body["error"]

    return check
