"""What the numbers of a GPU check were measured on."""

from __future__ import annotations

import platform
import sys
from typing import Any

from gpu_common import Report, parser, prepare


def main() -> None:
    """Writes versions and the device's properties."""
    args = parser(__doc__).parse_args()
    prepare(args.device)
    import torch
    import triton

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    if torch.accelerator.is_available():
        properties = torch.get_device_module().get_device_properties(0)
        facts["device"] = properties.name
        facts["cores"] = properties.multi_processor_count
        facts["memory_bytes"] = properties.total_memory
    Report(args.report).put(**facts)


if __name__ == "__main__":
    sys.exit(main())
