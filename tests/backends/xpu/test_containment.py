"""A library that patches others while it is imported leaves them as they were."""

import sys
import types

import pytest

from leadframe_xpu.containment import hidden, unchanged


@pytest.fixture
def victim(monkeypatch):
    """A package with a function and a class, in sys.modules."""
    module = types.ModuleType("victim")

    class Base:
        def inherited(self):
            return "base"

    class Thing(Base):
        def method(self):
            return "own"

        def __format__(self, spec):
            return "own"

    Thing.__module__ = "victim"
    module.function, module.Thing, module._private = (lambda: "own"), Thing, lambda: "own"
    monkeypatch.setitem(sys.modules, "victim", module)
    return module


def test_replaced_functions_and_methods_come_back(victim):
    with unchanged("victim"):
        victim.function = lambda: "patched"
        victim.Thing.method = victim.Thing.__format__ = lambda *args: "patched"
        assert victim.function() == "patched"
    assert victim.function() == "own"
    assert victim.Thing().method() == f"{victim.Thing()}" == "own"


def test_what_shadows_a_base_goes_and_other_additions_stay(victim):
    with unchanged("victim"):
        victim.Thing.inherited = lambda self: "patched"
        victim.Thing.added = victim.added = "new"
    assert victim.Thing().inherited() == "base"
    assert victim.Thing.added == victim.added == "new"


def test_private_names_of_modules_are_their_own_affair(victim):
    with unchanged("victim"):
        victim._private = None
    assert victim._private is None


def test_a_failing_import_is_undone_too(victim):
    def fail():
        with unchanged("victim"):
            victim.function = None
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert victim.function() == "own"


def test_a_hidden_package_cannot_be_imported_and_comes_back(victim):
    with hidden("victim"), pytest.raises(ImportError):
        import victim as _  # noqa: F401
    assert sys.modules["victim"] is victim
    with hidden("no_such_package"):
        assert sys.modules["no_such_package"] is None
    assert "no_such_package" not in sys.modules
