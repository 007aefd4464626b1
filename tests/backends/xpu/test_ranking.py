"""Which kernels serve, and what people are told about the others."""

from importlib import metadata

import pytest

from leadframe.errors import Unsupported
from leadframe_xpu.installed import Installed, read_installed, release
from leadframe_xpu.ranking import ORDER, rank, why_not

CPU_TORCH = Installed(torch="2.13.0+cpu", triton="3.9.0")
NEW_GPU = Installed(torch="2.14.0+xpu", torch_has_xpu=True, vllm_xpu_kernels="0.1.16.2")
OLD_GPU = Installed(torch="2.8.0+xpu", torch_has_xpu=True, ipex="2.8.10+xpu")
PLAIN_GPU = Installed(torch="2.12.0+xpu", torch_has_xpu=True)
IPEX_HOST = Installed(torch="2.8.0", ipex="2.8.0")


@pytest.mark.parametrize(
    ("installed", "target", "used"),
    [
        (CPU_TORCH, "gpu", None),
        (CPU_TORCH, "host", None),
        (NEW_GPU, "gpu", "vllm-xpu-kernels"),
        (OLD_GPU, "gpu", "ipex"),
        (OLD_GPU, "host", None),
        (PLAIN_GPU, "gpu", "torch"),
        (IPEX_HOST, "gpu", None),
        (IPEX_HOST, "host", "ipex"),
    ],
)
def test_the_best_without_an_objection_serves(installed, target, used):
    assert rank(installed, target).used == used


@pytest.mark.parametrize(
    ("name", "installed", "target", "reason"),
    [
        ("vllm-xpu-kernels", CPU_TORCH, "gpu", "not installed"),
        (
            "vllm-xpu-kernels",
            Installed(torch="2.13.0+xpu", torch_has_xpu=True, vllm_xpu_kernels="0.1.16.2"),
            "gpu",
            "0.1.16.2 needs torch 2.14 or newer, torch is 2.13.0",
        ),
        (
            "vllm-xpu-kernels",
            Installed(torch="2.14.0", vllm_xpu_kernels="0.1.16.2"),
            "gpu",
            "torch 2.14.0 is not built for Intel GPUs",
        ),
        ("vllm-xpu-kernels", IPEX_HOST, "host", "no kernels for the host"),
        ("ipex", CPU_TORCH, "gpu", "IPEX ended with 2.8"),
        ("ipex", Installed(torch="2.13.0", ipex="2.8.0"), "host", "needs torch 2.8"),
        ("ipex", IPEX_HOST, "gpu", "is the CPU build"),
        ("ipex", OLD_GPU, "host", "is the XPU build"),
        ("triton", CPU_TORCH, "gpu", "3.9.0 has no Intel backend"),
        ("triton", PLAIN_GPU, "gpu", "not installed"),
        ("torch", CPU_TORCH, "gpu", "is not built for Intel GPUs"),
        ("torch", Installed(), "gpu", "torch is not installed"),
    ],
)
def test_why_not(name, installed, target, reason):
    assert reason in why_not(name, installed, target)


def test_intel_triton_serves_when_nothing_better_does():
    installed = Installed("2.13.0+xpu", True, None, None, "3.7.0", triton_has_intel=True)
    assert rank(installed, "gpu").used == "triton"


def test_the_summary_names_every_other_one_once():
    summary = rank(NEW_GPU, "gpu").summary()
    assert summary.startswith("kernels: vllm-xpu-kernels (not ipex: ")
    assert all(summary.count(f"not {name}:") == 1 for name in ORDER[1:])
    assert "\n" not in summary


def test_asking_for_kernels_takes_those_or_fails_with_the_reason():
    assert rank(NEW_GPU, "gpu", "torch").used == "torch"
    with pytest.raises(Unsupported, match=r"IPEX ended with 2\.8"):
        rank(NEW_GPU, "gpu", "ipex")


@pytest.mark.parametrize(
    ("version", "expected"), [("2.8.10+xpu", (2, 8)), ("2.14.0a0+git", (2, 14)), ("odd", (0, 0))]
)
def test_release(version, expected):
    assert release(version) == expected


def test_reading_takes_versions_from_metadata_and_builds_from_files(tmp_path):
    versions = {"torch": "2.14.0+xpu", "triton-xpu": "3.7.0", "triton": "3.9.0"}

    def version_of(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "triton/backends/intel").mkdir(parents=True)
    installed = read_installed(version_of, lambda name: tmp_path / name)
    assert installed == Installed(
        torch="2.14.0+xpu", torch_has_xpu=False, triton="3.7.0", triton_has_intel=True
    )
    (tmp_path / "torch/lib/libtorch_xpu.so").touch()
    assert read_installed(version_of, lambda name: tmp_path / name).torch_has_xpu


def test_packages_that_are_absent_are_no_error():
    def version_of(name):
        raise metadata.PackageNotFoundError(name)

    assert read_installed(version_of, lambda name: None) == Installed()
