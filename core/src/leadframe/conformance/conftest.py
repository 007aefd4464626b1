"""Makes `pytest --pyargs leadframe.conformance --device NAME` work."""

pytest_plugins = ("leadframe.conformance.pytest_plugin",)
