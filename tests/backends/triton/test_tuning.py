"""Choosing tiles by measuring once, with a timer that needs no device."""

from __future__ import annotations

import json

import pytest
import torch

from leadframe_triton.arch import ARCHS
from leadframe_triton.launch import TileKey
from leadframe_triton.tiles import tiles_for

ARCH = ARCHS["sm_90"]
KEY = TileKey("decode", 128, 4, 2, 16)
CANDIDATES = tiles_for(ARCH, "decode", 128, 2)


@pytest.fixture
def tuner(tmp_path):
    from leadframe_triton.tuning import TileTuner

    def make(timer=None, measure=True):
        path = tmp_path / "made" / "tiles.json"
        return TileTuner(torch.device("cpu"), measure=measure, path=path, timer=timer)

    return make


class Timer:
    """The last candidate is the fastest; counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, arch, key, tile):
        self.calls += 1
        return 1.0 / (1 + CANDIDATES.index(tile))


def test_the_fastest_tile_is_measured_once(tuner):
    timer = Timer()
    choose = tuner(timer)
    assert len(CANDIDATES) > 1
    assert [choose(ARCH, KEY) for _ in range(3)] == [CANDIDATES[-1]] * 3
    assert timer.calls == len(CANDIDATES)


def test_another_process_takes_it_from_disk(tuner):
    tuner(Timer())(ARCH, KEY)
    again = Timer()
    assert tuner(again)(ARCH, KEY) == CANDIDATES[-1]
    assert tuner(measure=False)(ARCH, KEY) == CANDIDATES[-1]
    assert again.calls == 0


def test_choices_of_several_keys_share_the_file(tuner, tmp_path):
    other = TileKey("decode", 128, 8, 2, 16)
    choose = tuner(Timer())
    choose(ARCH, KEY)
    choose(ARCH, other)
    stored = json.loads((tmp_path / "made" / "tiles.json").read_text())
    assert len(stored) == 2
    assert all("sm_90" in name and "triton-" in name for name in stored)
    assert all(len(entry["seconds"]) == len(CANDIDATES) for entry in stored.values())


def test_products_of_one_architecture_choose_for_themselves(tuner, monkeypatch):
    from leadframe_triton import tuning

    tuner(Timer())(ARCH, KEY)
    monkeypatch.setattr(tuning, "chip_name", lambda device: "NVIDIA H20")
    timer = Timer()
    tuner(timer)(ARCH, KEY)
    assert timer.calls == len(CANDIDATES)


class PretendDevice:
    """A device module whose clock is the number of launches, an hour for the first of a row."""

    def __init__(self):
        self.launches = 0
        self.current = 0

    def current_stream(self, device):
        return None

    def current_device(self):
        return self.current

    def set_device(self, index):
        self.current = index

    def Event(self, enable_timing):
        module = self

        class Event:
            def record(self, stream):
                self.time = module.launches

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return 3600.0 + end.time - self.time

        return Event()


@pytest.fixture
def timer(monkeypatch):
    module = PretendDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    from leadframe_triton.measure import DeviceTimer

    return module, DeviceTimer(torch.device("cuda", 1))


def test_launches_are_timed_behind_others(timer):
    """One alone would be timed from when the host begins to launch it."""
    module, time_tile = timer

    def launch():
        module.launches += 1

    assert time_tile._shortest(launch) < 3.601 / 4


def test_tiles_are_timed_on_the_backends_device(timer):
    module, time_tile = timer
    context = time_tile.context(ARCH, CANDIDATES[0])
    context.options()
    assert module.current == 1
    assert context.choose_tile(ARCH, KEY) == CANDIDATES[0]


def test_without_measuring_the_default_holds(tuner, tmp_path):
    assert tuner(measure=False)(ARCH, KEY) == CANDIDATES[0]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", ["not json", "[]", '{"x": 1}'])
def test_a_broken_file_is_no_choice(tuner, tmp_path, content):
    path = tmp_path / "made" / "tiles.json"
    path.parent.mkdir()
    path.write_text(content)
    assert tuner(measure=False)(ARCH, KEY) == CANDIDATES[0]


def test_a_tile_that_is_no_longer_in_the_table_is_measured_anew(tuner, tmp_path):
    choose = tuner(Timer())
    choose(ARCH, KEY)
    path = tmp_path / "made" / "tiles.json"
    path.write_text(path.read_text().replace('"num_warps": 8', '"num_warps": 64'))
    timer = Timer()
    assert tuner(timer)(ARCH, KEY) == CANDIDATES[-1]
    assert timer.calls == len(CANDIDATES)


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tuner, tmp_path, caplog):
    (tmp_path / "made").write_text("a file where the folder should be")
    assert tuner(Timer())(ARCH, KEY) == CANDIDATES[-1]
    assert "cannot remember tiles" in caplog.text


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    from leadframe_triton.tuning import cache_path

    monkeypatch.setenv("LEADFRAME_CACHE_DIR", str(tmp_path))
    assert cache_path() == tmp_path / "triton-tiles.json"
    monkeypatch.delenv("LEADFRAME_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path() == tmp_path / "leadframe" / "triton-tiles.json"


def test_loads_are_batches_that_the_kernels_take():
    """The batch that a tile is timed on: blocks are distinct, slots and lengths agree."""
    from leadframe_triton.measure import LOADS, arrays_of, cache_of

    for kind, load in LOADS.items():
        arrays = arrays_of(load, 16, torch.device("cpu"))
        cache = cache_of(load, (16, 1, 8), torch.float32, "cpu")
        table = arrays.block_table
        assert table.unique().numel() == table.numel()
        assert 0 < table.min() <= table.max() < cache.shape[1]
        assert arrays.bucket.num_decodes == (load.rows if kind == "decode" else 0)
        assert arrays.query_start[-1] == arrays.bucket.num_tokens == arrays.slots.numel()
        last = arrays.query_start[1:].long() - 1
        assert (arrays.positions[last] == arrays.seq_lens - 1).all()
        own = table[:, (load.context - 1) // 16] * 16 + (load.context - 1) % 16
        assert torch.equal(arrays.slots[last], own.to(torch.int32))
