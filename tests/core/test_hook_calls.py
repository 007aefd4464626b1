"""Only the typed `Plugin` calls hooks, and nothing does while a step runs."""

import re
from pathlib import Path

import pluggy

import leadframe

CORE = Path(leadframe.__file__).parent


def test_hooks_are_called_in_one_module():
    callers = [
        path.relative_to(CORE).as_posix()
        for path in CORE.rglob("*.py")
        if re.search(r"manager\.hook\b", path.read_text())
    ]
    assert sorted(callers) == ["platform/discovery.py", "platform/plugin.py"]
    discovery = (CORE / "platform/discovery.py").read_text()
    assert not re.search(r"manager\.hook\.\w+\(", discovery)  # it only looks at what is there


def test_no_hook_is_called_while_an_engine_serves(tiny_llm, monkeypatch):
    calls = []
    original = pluggy.HookCaller.__call__

    def counted(self, **arguments):
        calls.append(self.name)
        return original(self, **arguments)

    monkeypatch.setattr(pluggy.HookCaller, "__call__", counted)
    llm = tiny_llm()
    assert "platform_create" in calls  # every manager's calls are seen
    calls.clear()
    llm.generate(["a b c", "d"])
    assert calls == []
