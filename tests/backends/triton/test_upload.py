"""Uploads in chunks, on the host: the same code that drives a device, without pinning."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch


@pytest.fixture
def uploader():
    from leadframe_triton.upload import PinnedUploader

    return PinnedUploader(torch.device("cpu"), chunk_bytes=64, pin=False)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_chunks_add_up_and_are_converted(uploader, count, dtype):
    host = np.arange(count, dtype=np.float32).reshape(count, 1)
    copied = uploader.copy(host, dtype)
    assert copied.dtype == (dtype or torch.float32)
    assert torch.equal(copied, torch.from_numpy(host).to(dtype or torch.float32))


def test_buffers_are_reused_and_hold_nothing_back(uploader):
    first, second = np.full(40, 1.0, np.float32), np.full(40, 2.0, np.float32)
    copies = uploader.copy(first), uploader.copy(second)
    assert (copies[0] == 1.0).all()
    assert (copies[1] == 2.0).all()


def test_the_source_may_change_after_the_call(uploader):
    host = np.full(5, 1.0, np.float32)
    copied = uploader.copy(host)
    host[:] = 9.0
    assert (copied == 1.0).all()


@pytest.mark.parametrize("dtype", [np.int64, np.float16, np.bool_, ml_dtypes.bfloat16])
def test_types_that_weights_come_in(uploader, dtype):
    host = (np.arange(30) % 2).astype(dtype)
    copied = uploader.copy(host)
    assert copied.dtype == getattr(torch, np.dtype(dtype).name)
    assert copied.float().tolist() == host.astype(np.float32).tolist()


def test_slices_need_not_be_contiguous(uploader):
    host = np.arange(120, dtype=np.int32).reshape(10, 12)
    assert np.array_equal(uploader.copy(host[:, 3:7]).numpy(), host[:, 3:7])


def test_read_only_arrays_are_taken_without_a_warning(uploader):
    host = np.arange(4, dtype=np.int32)
    host.flags.writeable = False
    assert uploader.copy(host).tolist() == [0, 1, 2, 3]


def test_it_can_be_used_after_closing(uploader):
    uploader.copy(np.ones(40, np.float32))
    uploader.close()
    assert (uploader.copy(np.ones(40, np.float32)) == 1.0).all()
