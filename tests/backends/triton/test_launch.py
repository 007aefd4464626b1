"""Launch options, and the device that a launch goes to."""

from __future__ import annotations

import threading

import pytest
import torch

from leadframe_triton.arch import ARCHS
from leadframe_triton.launch import CurrentDevice, LaunchContext


class PretendModule:
    """A device module whose current device belongs to the thread, as CUDA's does."""

    def __init__(self):
        self._local = threading.local()
        self.sets = 0

    def current_device(self):
        return getattr(self._local, "index", 0)

    def set_device(self, index):
        self.sets += 1
        self._local.index = index


@pytest.fixture
def module(monkeypatch):
    module = PretendModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_every_thread_that_launches_launches_on_the_backends_device(module):
    context = LaunchContext(ARCHS["sm_90"], make_current=CurrentDevice(torch.device("cuda", 1)))
    context.options()
    seen = []

    def engine():
        seen.append(module.current_device())
        context.options()
        seen.append(module.current_device())

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert module.current_device() == 1
    assert seen == [0, 1]


def test_a_device_that_is_current_is_not_set_again(module):
    first, second = (CurrentDevice(torch.device("cuda", index)) for index in (0, 2))
    first()
    assert module.sets == 0
    second()
    second()
    assert module.sets == 1
    first()
    assert module.current_device() == 0


def test_nothing_is_set_inside_torch_compile(module, monkeypatch):
    """Inductor's launches choose the device themselves, and tracing must meet no side effect."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    context = LaunchContext(ARCHS["sm_90"], make_current=CurrentDevice(torch.device("cuda", 1)))
    assert "enable_fp_fusion" not in context.options()
    assert module.sets == 0
