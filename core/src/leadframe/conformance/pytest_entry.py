"""Makes `pytest --pyargs leadframe.conformance --device NAME` work, and nothing else.

pytest loads this in every session where Leadframe is installed, so it adds no option unless the
kit was named.
"""

from __future__ import annotations

import pytest

_KIT = "leadframe.conformance"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Loads the kit's plugin when the kit is what is being tested."""
    if any(arg == _KIT or arg.startswith((f"{_KIT}.", f"{_KIT}::")) for arg in args):
        early_config.pluginmanager.import_plugin(f"{_KIT}.pytest_plugin")
