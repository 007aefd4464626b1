"""Uploads in chunks, on the host: the same code that drives a device, without pinning."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def uploader():
    from leadframe_triton.upload import PinnedUploader

    return PinnedUploader(torch.device("cpu"), chunk_bytes=64, pin=False)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_add_up_and_are_converted(uploader, count, dtype):
    host = torch.arange(count, dtype=torch.float32).reshape(count, 1)
    copied = uploader.copy(host, dtype)
    assert copied.dtype == dtype
    assert torch.equal(copied, host.to(dtype))


def test_buffers_are_reused_and_hold_nothing_back(uploader):
    first, second = torch.full((40,), 1.0), torch.full((40,), 2.0)
    copies = uploader.copy(first, torch.float32), uploader.copy(second, torch.float32)
    assert torch.equal(copies[0], first)
    assert torch.equal(copies[1], second)


def test_types_may_follow_each_other(uploader):
    ints = torch.arange(30, dtype=torch.int64)
    assert torch.equal(uploader.copy(ints, torch.int64), ints)
    half = torch.arange(30, dtype=torch.float16)
    assert torch.equal(uploader.copy(half, torch.float32), half.float())


def test_it_can_be_used_after_closing(uploader):
    uploader.copy(torch.ones(40), torch.float32)
    uploader.close()
    assert torch.equal(uploader.copy(torch.ones(40), torch.float32), torch.ones(40))
