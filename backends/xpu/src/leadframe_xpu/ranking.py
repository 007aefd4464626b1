"""Which kernels serve: one order, one reason for each that does not. Pure, over `Installed`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from leadframe.errors import Unsupported
from leadframe_xpu.installed import Installed, release

Target = Literal["gpu", "host"]
"""Where kernels run: on an Intel GPU, or IPEX's CPU build on the host."""

KernelName = Literal["vllm-xpu-kernels", "ipex", "triton", "torch"]

ORDER: Final[tuple[KernelName, ...]] = ("vllm-xpu-kernels", "ipex", "triton", "torch")
"""Best first. torch's own operators come last: they gather every key before they use it."""

VLLM_KERNELS_TORCH: Final = (2, 14)
"""The torch release that vllm-xpu-kernels' binaries are built for."""

IPEX_END = "IPEX ended with 2.8"


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result for one target.

    Attributes:
      target: where.
      used: the best kernels without an objection; None when there are none.
      passed_over: (name, reason) of every other one, best first.
    """

    target: Target
    used: KernelName | None
    passed_over: tuple[tuple[KernelName, str], ...]

    def summary(self) -> str:
        """One line for people: what is used, and why not the rest."""
        why = "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over)
        return f"kernels: {self.used or 'none'}" + (f" ({why})" if why else "")


def rank(installed: Installed, target: Target, wanted: str = "auto") -> Ranking:
    """Chooses kernels.

    Args:
      installed: what there is.
      target: where they shall run.
      wanted: a name from `ORDER` takes that one or nothing; "auto" takes the best.

    Raises:
      Unsupported: `wanted` names kernels that cannot serve; the message says why.
    """
    reasons = {name: why_not(name, installed, target) for name in ORDER}
    if wanted != "auto":
        reason = reasons[wanted]  # type: ignore[index]  # the option's choices are the names
        if reason is not None:
            raise Unsupported("attention", f"kernels={wanted}", reason)
        reasons |= {name: "another was asked for" for name in ORDER if name != wanted}
    used = next((name for name in ORDER if reasons[name] is None), None)
    better = "one that is better serves"
    rest = tuple((name, reasons[name] or better) for name in ORDER if name != used)
    return Ranking(target, used, rest)


def why_not(name: KernelName, installed: Installed, target: Target) -> str | None:
    """Returns why kernels cannot serve a target, or None."""
    if name == "ipex":
        return _why_not_ipex(installed, target)
    if target == "host":
        return "it has no kernels for the host"
    if name == "vllm-xpu-kernels":
        return _why_not_vllm(installed)
    if name == "triton":
        return _why_not_triton(installed)
    return _why_not_torch(installed)


def _why_not_torch(installed: Installed) -> str | None:
    if installed.torch is None:
        return "torch is not installed"
    if not installed.torch_has_xpu:
        return f"torch {installed.torch} is not built for Intel GPUs"
    return None


def _why_not_vllm(installed: Installed) -> str | None:
    if installed.vllm_xpu_kernels is None:
        return "not installed"
    torch = installed.torch or "0.0"
    if release(torch) < VLLM_KERNELS_TORCH:
        needed = ".".join(map(str, VLLM_KERNELS_TORCH))
        return f"{installed.vllm_xpu_kernels} needs torch {needed} or newer, torch is {torch}"
    return _why_not_torch(installed)


def _why_not_ipex(installed: Installed, target: Target) -> str | None:
    if installed.ipex is None:
        return f"not installed ({IPEX_END}; it needs torch 2.8)"
    torch = installed.torch or "0.0"
    if release(torch) != release(installed.ipex):
        wanted = ".".join(map(str, release(installed.ipex)))
        return f"{installed.ipex} needs torch {wanted}, torch is {torch} ({IPEX_END})"
    if target == "host":
        return None if installed.ipex_is_cpu_build else f"{installed.ipex} is the XPU build"
    if installed.ipex_is_cpu_build:
        return f"{installed.ipex} is the CPU build; XPU wheels are on Intel's package index"
    return _why_not_torch(installed)


def _why_not_triton(installed: Installed) -> str | None:
    if installed.triton is None:
        return "not installed"
    if not installed.triton_has_intel:
        return f"{installed.triton} has no Intel backend"
    return _why_not_torch(installed)
