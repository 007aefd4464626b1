"""How a model divides among the ranks of a tensor-parallel group, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from leadframe.errors import ConfigError
from leadframe.models.info import Parameter
from leadframe.models.model import Model

_MOST: Final = 64
"""Sizes that are tried for the error message."""


def heads_per_rank(heads: int, ranks: int) -> int:
    """Returns the heads that a rank holds: its share, and at least one, which then is repeated."""
    return max(1, heads // ranks)


def check_ranks(model: Model, ranks: int) -> None:
    """Checks that every weight divides: whole heads, and equal shares of everything else.

    Raises:
      ConfigError: one does not; names it and the sizes that would do.
    """
    for name, problem in _problems(model, ranks):
        sizes = [n for n in range(1, _MOST + 1) if next(_problems(model, n), None) is None]
        raise ConfigError(
            f"--tensor-parallel-size is {ranks}, and {name} has {problem}, which do not divide "
            f"among {ranks} ranks; sizes that this model divides by: {', '.join(map(str, sizes))}"
        )


def _problems(model: Model, ranks: int) -> Iterator[tuple[str, str]]:
    for name, parameter in model.parameters.items():
        problem = _problem(parameter, ranks, model.info.num_heads)
        if problem is not None:
            yield name, problem


def _problem(parameter: Parameter, ranks: int, num_heads: int) -> str | None:
    partition = parameter.partition
    if partition.axis is None:
        return None
    if partition.heads is None:
        parts = parameter.shape[partition.axis]
        what = "columns" if partition.axis else "rows"
        return f"{parts} {what}" if parts % ranks else None
    # KV heads may be repeated; a query head that two ranks had would be counted twice
    is_repeated = partition.heads < num_heads and ranks % partition.heads == 0
    return None if is_repeated or partition.heads % ranks == 0 else f"{partition.heads} heads"


__all__ = ["check_ranks", "heads_per_rank"]
