"""Whether a plugin and this core can work together."""

from __future__ import annotations

import importlib.metadata

from leadframe.errors import IncompatibleContract
from leadframe.platform.info import PlatformInfo, contract_text
from leadframe.platform.version import CONTRACT


def check_contract(info: PlatformInfo, core: tuple[int, int] = CONTRACT) -> None:
    """Checks the contract versions of a plugin against the core's.

    Same major, and the oldest core that the plugin runs on must not be newer than this one.

    Raises:
      IncompatibleContract: names both versions and the command that mends it.
    """
    is_old = info.contract[0] < core[0]
    is_new = info.contract[0] > core[0] or info.min_contract > core
    if not is_old and not is_new:
        return
    try:
        version = importlib.metadata.version("leadframe")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    needs = contract_text(
        info.contract if is_old else max(info.min_contract, (info.contract[0], 0))
    )
    upgrade = info.distribution if is_old else "leadframe"
    word = "was written for" if is_old else "needs"
    raise IncompatibleContract(
        f"plugin {info.name!r} of {info.distribution} {info.version} {word} platform contract "
        f"{needs}; leadframe {version} serves {contract_text(core)}; "
        f"run: pip install --upgrade {upgrade}"
    )


__all__ = ["check_contract"]
