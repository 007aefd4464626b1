"""One process of a compile check: compiles its share of the cases, one JSON row a line.

Usage: python -m leadframe_triton.compile_check.worker OPTIONS, where OPTIONS is JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from leadframe_triton.arch import ARCHS

Matrix = Literal["standard", "full"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker does.

    Attributes:
      targets: architecture names.
      matrix: "standard" or "full".
      match: only cases whose kernel and configuration contain this text.
      index: this worker's place among `count`.
      count: how many workers share the work.
    """

    targets: tuple[str, ...]
    matrix: Matrix = "full"
    match: str = ""
    index: int = 0
    count: int = 1

    def as_json(self) -> str:
        """The argument of the worker process."""
        return json.dumps(asdict(self))


def run(share: Share) -> None:
    """Compiles a share and prints its rows as they come."""
    from leadframe_triton.compile_check.cases import cases_for
    from leadframe_triton.compile_check.run import check

    for target in share.targets:
        arch = ARCHS[target]
        cases = [case for case in cases_for(arch, share.matrix) if share.match in str(case)]
        for row in check(arch, cases[share.index :: share.count]):
            sys.stdout.write(json.dumps(row.as_dict()) + "\n")
            sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Reads the share from the command line and runs it."""
    options = json.loads(argv[0])
    warnings.simplefilter("ignore")
    run(Share(**{**options, "targets": tuple(options["targets"])}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
