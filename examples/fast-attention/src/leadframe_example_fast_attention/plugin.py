"""Offers `row-by-row` attention for the platform `reference`."""

from __future__ import annotations

from collections.abc import Sequence

from leadframe.platform import KernelImpl, OpSpec, PlatformInfo, hookimpl

_FEATURES = frozenset({"window"})


@hookimpl
def platform_info() -> PlatformInfo:
    """Says what this plugin is; it has no devices, so its name is free."""
    return PlatformInfo(
        name="fast-attention",
        summary="row-by-row attention for the reference platform",
        contract=(1, 0),
        min_contract=(1, 0),
        distribution="leadframe-example-fast-attention",
        version="0.1.0",
        kind="test",
    )


def _why_not(spec: OpSpec) -> str | None:
    """Refuses what the kernel does not do; the platform's own op takes over."""
    unknown = sorted(spec.features - _FEATURES)
    return f"attention feature {unknown[0]!r} is not implemented" if unknown else None


@hookimpl
def platform_kernels(platform: str) -> Sequence[KernelImpl]:
    """Offers the kernel to the platform whose KV layout it knows."""
    from leadframe_example_fast_attention.kernel import attention

    if platform != "reference":
        return ()
    return (KernelImpl("attention", "row-by-row", attention, _why_not, priority=10),)
