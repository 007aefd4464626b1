"""Plugins that are broken in every way that we could think of."""

import re
import time
import types
from dataclasses import replace

import pytest

from leadframe.errors import (
    AmbiguousDevice,
    BackendBug,
    ConfigError,
    ContractViolation,
    DeviceNotFound,
    DeviceOOM,
    IncompatibleContract,
    PlatformNotInstalled,
    PluginLoadError,
)
from leadframe.platform import (
    Detection,
    Device,
    KernelImpl,
    OptionSpec,
    PlatformInfo,
    create_backend,
    hookimpl,
    list_devices,
    select_device,
)
from leadframe.platform.discovery import EntryPoint
from leadframe.platform.reference.backend import ReferenceBackend
from leadframe.platform.selection import extra_kernels

INFO = PlatformInfo("dev", "a test", (1, 0), (1, 0), "leadframe-dev", "2.3", "accelerator")


def plugin_object(name="dev", kind="accelerator", **hooks):
    """A plugin with working hooks, of which some are replaced; None removes one."""
    info = replace(INFO, name=name, kind=kind, distribution=f"leadframe-{name}")
    working = {
        "platform_info": lambda: info,
        "platform_detect": lambda env: Detection((Device(0, "Chip"), Device(1, "Other")), "two"),
        "platform_create": lambda device, options, limits: ReferenceBackend(),
    }
    module = types.SimpleNamespace()
    for hook, function in {**working, **hooks}.items():
        if function is not None:
            setattr(module, hook, hookimpl(function))
    return module


def point(module, name="dev", distribution=None):
    def load():
        if isinstance(module, BaseException):
            raise module
        return module

    return EntryPoint(name, distribution or f"leadframe-{name}", "2.3", load)


def _info(**changes):
    return lambda: replace(INFO, **changes)


def _raises(error):
    def hook():
        raise error

    return hook


def _create(value):
    def hook(device, options, limits):
        if isinstance(value, Exception):
            raise value
        return value

    return hook


def _detect(value):
    def hook(env):
        if isinstance(value, Exception):
            raise value
        return value

    return hook


def _opens_a_device(env):
    env_fd.append(open("/dev/ptmx", "rb"))  # noqa: SIM115
    return Detection((Device(0, "x"),), "x")


env_fd = []

BROKEN = {
    "import error": (ImportError("no libfoo.so"), PluginLoadError, "no libfoo.so"),
    "exit at import": (SystemExit(3), PluginLoadError, "SystemExit"),
    "missing hook": ({"platform_create": None}, ContractViolation, "'platform_create' is missing"),
    "misspelt hook": (
        {"platform_optoins": lambda: ()},
        ContractViolation,
        "did you mean 'platform_options'",
    ),
    "wrong signature": (
        {"platform_detect": lambda environment: None},
        ContractViolation,
        "environment",
    ),
    "info raises": ({"platform_info": _raises(ValueError("x"))}, ContractViolation, "raised"),
    "info is rubbish": ({"platform_info": lambda: {"a": 1}}, ContractViolation, "dict"),
    "older contract": (
        {"platform_info": _info(contract=(0, 9), min_contract=(0, 1))},
        IncompatibleContract,
        "pip install --upgrade leadframe-dev",
    ),
    "newer major": (
        {"platform_info": _info(contract=(2, 0), min_contract=(2, 0))},
        IncompatibleContract,
        "pip install --upgrade leadframe$",
    ),
    "newer minor": (
        {"platform_info": _info(contract=(1, 5), min_contract=(1, 4))},
        IncompatibleContract,
        "needs platform contract 1.4; leadframe .* serves 1.0",
    ),
    "absent contract": ({"platform_info": _info(contract=None)}, ContractViolation, "major, minor"),
    "another name": ({"platform_info": _info(name="dve")}, ContractViolation, "'dve'"),
    "another distribution": (
        {"platform_info": _info(distribution="other")},
        ContractViolation,
        "pip knows",
    ),
    "detection raises": (
        {"platform_detect": _detect(RuntimeError("driver"))},
        ContractViolation,
        "driver",
    ),
    "detection is rubbish": ({"platform_detect": _detect(["x"])}, ContractViolation, "list"),
    "detection opens a device": (
        {"platform_detect": _opens_a_device},
        ContractViolation,
        "left /dev/.*ptmx open",
    ),
    "no device": (
        {"platform_detect": _detect(Detection((), "no chip on the bus"))},
        DeviceNotFound,
        "no chip on the bus",
    ),
    "create raises": ({"platform_create": _create(KeyError("q"))}, BackendBug, "leadframe-dev"),
    "create returns None": ({"platform_create": _create(None)}, ContractViolation, "NoneType"),
    "create returns rubbish": ({"platform_create": _create(7)}, ContractViolation, "int"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_named_with_its_fault_and_nothing_else_starts(case):
    hooks, error, message = BROKEN[case]
    module = hooks if isinstance(hooks, BaseException) else plugin_object(**hooks)
    points = [point(module), point(plugin_object("host", "host"), "host")]
    started = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        create_backend(select_device("dev", {}, points=points))
    assert time.monotonic() - started < 2
    assert type(caught.value) is error
    assert "leadframe-dev" in str(caught.value)


def test_an_unmarked_hook_is_told_apart_from_a_missing_one():
    module = plugin_object(platform_detect=None)
    module.platform_detect = lambda env: None
    with pytest.raises(ContractViolation, match="not marked with @hookimpl"):
        select_device("dev", {}, points=[point(module)])


def test_detection_that_hangs_ends_with_its_time_out():
    def hang(env):
        time.sleep(30)

    points = [point(plugin_object(platform_detect=hang))]
    started = time.monotonic()
    with pytest.raises(ContractViolation, match="did not return within"):
        select_device("dev", {"LEADFRAME_DETECT_TIMEOUT": "0.2"}, points=points)
    assert time.monotonic() - started < 1.5
    with pytest.raises(ConfigError, match="LEADFRAME_DETECT_TIMEOUT"):
        select_device("dev", {"LEADFRAME_DETECT_TIMEOUT": "soon"}, points=points)


def test_two_distributions_that_claim_one_name():
    points = [point(plugin_object()), point(plugin_object(), distribution="other-dev")]
    with pytest.raises(AmbiguousDevice, match=r"leadframe-dev 2.3 and other-dev 2.3"):
        select_device("dev", {}, points=points)
    assert [row.state for row in list_devices({}, points)] == ["broken", "broken"]


def test_a_reserved_name_is_refused():
    rows = list_devices({}, [point(plugin_object("auto"), "auto")])
    assert rows[0].state == "broken"
    assert "reserved" in rows[0].reason


def test_one_broken_plugin_hides_no_other():
    points = [
        point(ImportError("x"), "aaa"),
        point(plugin_object()),
        point(plugin_object("zzz"), "zzz"),
    ]
    rows = list_devices({}, points)
    assert [(row.name, row.state) for row in rows] == [
        ("aaa", "broken"),
        ("dev", "ready"),
        ("zzz", "ready"),
    ]
    keys = ["name", "distribution", "version", "contract", "kind", "state", "reason", "devices"]
    assert list(rows[1].as_json()) == keys


def test_a_named_device_imports_only_its_plugin():
    other = point(AssertionError("was imported"), "other")
    assert select_device("dev:1", {}, points=[other, point(plugin_object())]).device.name == "Other"


def test_the_index_may_be_the_devices_name():
    points = [point(plugin_object())]
    assert select_device("dev:other", {}, points=points).name == "dev:1"
    with pytest.raises(DeviceNotFound, match=r"0 \(Chip\), 1 \(Other\)"):
        select_device("dev:7", {}, points=points)


def test_precedence():
    points = [point(plugin_object(name), name) for name in ("aa", "bb", "cc")]
    env = {"LEADFRAME_DEVICE": "bb"}
    assert select_device("aa", env, "cc", points=points).name == "aa:0"
    assert select_device(None, env, "cc", points=points).source == "LEADFRAME_DEVICE"
    assert select_device(None, {}, "cc:1", points=points).name == "cc:1"
    with pytest.raises(AmbiguousDevice):
        select_device("auto", env, "cc", points=points)


def test_not_installed_says_what_is_and_how_to_get_it():
    how = r"from a checkout of Leadframe: pip install '\./backends/tpu\[tpu\]'$"
    with pytest.raises(PlatformNotInstalled, match=re.compile(how, re.MULTILINE)) as caught:
        select_device("tpu", {}, points=[point(plugin_object())])
    assert "dev  leadframe-dev 2.3" in str(caught.value)
    with pytest.raises(PlatformNotInstalled, match="did you mean 'dev'"):
        select_device("deev", {}, points=[point(plugin_object())])
    with pytest.raises(PlatformNotInstalled) as caught:
        select_device("gpu", {}, points=[point(plugin_object())])
    assert "did you mean" not in str(caught.value)
    codes = {PlatformNotInstalled.exit_code, DeviceNotFound.exit_code, PluginLoadError.exit_code}
    assert len(codes) == 3


ABSENT = {"platform_detect": _detect(Detection((), "none"))}


def test_auto_takes_the_single_accelerator():
    points = [
        point(plugin_object()),
        point(plugin_object("host", "host"), "host"),
        point(plugin_object("toy", "test"), "toy"),
    ]
    chosen = select_device(None, {}, points=points)
    assert (chosen.name, chosen.source) == ("dev:0", "auto")


def test_auto_falls_to_the_host_and_says_so():
    points = [point(plugin_object(**ABSENT)), point(plugin_object("host", "host"), "host")]
    chosen = select_device("auto", {}, points=points)
    assert chosen.name == "host:0"
    assert chosen.note.endswith("auto: no device of dev is ready; `leadframe devices` says why)")


def test_auto_does_not_say_that_nothing_is_present_where_nothing_looked():
    toy = point(plugin_object("toy", "test"), "toy")
    chosen = select_device("auto", {}, points=[point(plugin_object("host", "host"), "host"), toy])
    assert chosen.note.endswith("auto: no accelerator plugin is installed)")


def test_auto_does_not_take_a_broken_plugin_for_an_absent_device():
    points = [point(ImportError("boom")), point(plugin_object("host", "host"), "host")]
    with pytest.raises(AmbiguousDevice, match="boom"):
        select_device("auto", {}, points=points)


def test_auto_with_nothing_to_fall_to():
    with pytest.raises(PlatformNotInstalled, match=r"pip install \./backends/torch \S+/cpu"):
        select_device("auto", {}, points=[point(plugin_object(**ABSENT))])


def test_options_are_converted_and_checked():
    seen = {}

    def create(device, options, limits):
        seen.update(options)
        return ReferenceBackend()

    specs = (OptionSpec("size", int, 4, "h"), OptionSpec("mode", str, "a", "h", ("a", "b")))
    module = plugin_object(platform_create=create, platform_options=lambda: specs)
    chosen = select_device("dev", {}, points=[point(module)])
    create_backend(chosen, {"size": "8"})
    assert seen == {"size": 8, "mode": "a"}
    for bad, message in (
        ({"sise": "1"}, "did you mean 'size'"),
        ({"size": "x"}, "invalid literal"),
        ({"mode": "c"}, "one of a, b"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_backend(chosen, bad)


def test_errors_of_the_tree_pass_through_create():
    module = plugin_object(platform_create=_create(DeviceOOM(1, 0, "load")))
    with pytest.raises(DeviceOOM):
        create_backend(select_device("dev", {}, points=[point(module)]))


def _kernel_plugin(kernels, **info):
    module = types.SimpleNamespace()
    module.platform_info = hookimpl(_info(name="extra", **info))
    module.platform_kernels = hookimpl(lambda platform: kernels)
    return module


KERNEL = KernelImpl("linear", "mine", lambda x, weight, bias=None: x)


def test_kernels_of_others_are_found_by_the_platform_that_they_extend():
    points = [point(_kernel_plugin([KERNEL])), point(ImportError("not for us"), "other")]
    assert extra_kernels("dev", points) == (KERNEL,)
    assert extra_kernels("third", points) == ()


def test_a_newer_plugin_may_offer_kernels_for_ops_that_this_core_does_not_know():
    newer = _kernel_plugin([KERNEL, replace(KERNEL, op="warp")], contract=(1, 9))
    assert extra_kernels("dev", [point(newer)]) == (KERNEL,)


@pytest.mark.parametrize(
    ("module", "error"),
    [
        (ImportError("boom"), PluginLoadError),
        (_kernel_plugin([1]), ContractViolation),
        (_kernel_plugin([replace(KERNEL, op="linaer")]), ContractViolation),
        (_kernel_plugin([replace(KERNEL, fn=lambda x: x)]), ContractViolation),
        (_kernel_plugin([KERNEL], contract=(9, 0), min_contract=(9, 0)), IncompatibleContract),
        (types.SimpleNamespace(platform_info=hookimpl(_info())), ContractViolation),
    ],
)
def test_a_broken_kernel_plugin_is_not_skipped(module, error):
    with pytest.raises(error, match="leadframe-dev"):
        extra_kernels("dev", [point(module)])
