"""Finding AMD GPUs through a double of the kernel driver's topology."""

from __future__ import annotations

import pytest

from leadframe_rocm.kfd import find, gfx_name


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_node(sysfs, node, *, version=0, simds=0, minor=0, unique=0, banks=(), name=None):
    folder = sysfs / f"class/kfd/kfd/topology/nodes/{node}"
    lines = [
        f"cpu_cores_count {0 if simds else 64}",
        f"simd_count {simds}",
        f"gfx_target_version {version}",
        f"drm_render_minor {minor}",
        f"unique_id {unique}",
        "a malformed line of five words",
    ]
    write(folder / "properties", "\n".join(lines))
    for index, size in enumerate(banks):
        write(folder / f"mem_banks/{index}/properties", f"heap_type 1\nsize_in_bytes {size}\n")
    if name is not None:
        write(sysfs / f"class/drm/renderD{minor}/device/product_name", name + "\n")


@pytest.fixture
def two(tmp_path):
    """A processor node, an MI300X and a 7900 XTX."""
    add_node(tmp_path, 0, banks=(10**11,))
    add_node(
        tmp_path,
        1,
        version=90402,
        simds=1216,
        minor=128,
        unique=0xAB,
        banks=(206_141_652_992,),
        name="AMD Instinct MI300X OAM",
    )
    add_node(tmp_path, 10, version=110000, simds=192, minor=129, unique=0xCD)
    return tmp_path


def test_devices_come_with_architecture_and_memory(two):
    found = find({}, two)
    assert [(d.index, d.name, d.arch, d.memory_bytes) for d in found.devices] == [
        (0, "AMD Instinct MI300X OAM", "gfx942", 206_141_652_992),
        (1, "AMD gfx1100", "gfx1100", None),
    ]


@pytest.mark.parametrize(
    "env",
    [
        {"ROCR_VISIBLE_DEVICES": "1"},
        {"HIP_VISIBLE_DEVICES": "1"},
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"ROCR_VISIBLE_DEVICES": "GPU-00000000000000cd"},
        {"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"},
        {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"},
    ],
)
def test_masks_select_and_renumber(two, env):
    assert [(d.index, d.arch) for d in find(env, two).devices] == [(0, "gfx1100")]


def test_a_mask_that_hides_everything_is_the_reason(two):
    found = find({"HIP_VISIBLE_DEVICES": ""}, two)
    assert found.devices == ()
    assert "HIP_VISIBLE_DEVICES" in found.reason


def test_without_the_driver_the_reason_names_it(tmp_path):
    assert "/dev/kfd" in find({}, tmp_path).reason


def test_a_processor_alone_is_no_gpu(tmp_path):
    add_node(tmp_path, 0)
    found = find({}, tmp_path)
    assert found.devices == ()
    assert "lists none" in found.reason


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
    ],
)
def test_architecture_names(version, name):
    assert gfx_name(version) == name
