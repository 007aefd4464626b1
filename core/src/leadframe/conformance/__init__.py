"""The conformance kit: proves that a platform does what the contract says.

`leadframe conformance DEVICE` equals `pytest --pyargs leadframe.conformance --device DEVICE`.
Nothing is subclassed or copied; the kit ships with Leadframe.
"""

from leadframe.conformance.main import main

__all__ = ["main"]
