"""GPUs that share a model: which one a rank takes, and two ranks in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from leadframe import LLM, SamplingParams
from leadframe.errors import ConfigError, DeviceNotFound
from leadframe.platform import Limits
from leadframe.platform.info import Device
from leadframe_triton.plugin import Found, GpuPlugin, TorchBuild


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch see four GPUs, none of which can be used."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")


@pytest.mark.parametrize(("index", "ranks"), [(0, 5), (2, 3), (3, 2)])
def test_too_few_gpus_are_refused_with_their_numbers(gpus, index, ranks):
    plugin = GpuPlugin(
        name="cuda",
        summary="test",
        distribution="leadframe-cuda",
        version="0.1.0",
        find=lambda env: Found(()),
        build=TorchBuild("libtorch_cpu.so", "install another torch"),
    )
    wanted = rf"size is {ranks}; from cuda:{index} on there are {4 - index} of 4 devices"
    limits = Limits(tensor_parallel_size=ranks, rank=0)
    with pytest.raises(DeviceNotFound, match=wanted):
        plugin._check_visible(Device(index, "GPU"), limits.tensor_parallel_size)
    plugin._check_visible(Device(index, "GPU"), 4 - index)


@pytest.mark.triton_interp
def test_a_rank_counts_its_gpu_from_the_first(gpus, monkeypatch):
    from leadframe_triton import backend
    from leadframe_triton.arch import ARCHS

    monkeypatch.setattr(backend, "_arch", lambda device: ARCHS["sm_90"])
    monkeypatch.setattr(backend, "_num_cores", lambda device: 132)
    for name in ("current_device", "PinnedUploader"):
        monkeypatch.setattr(backend, name, lambda device: SimpleNamespace(device=device))
    for rank in range(2):
        limits = Limits(tensor_parallel_size=2, rank=rank, rendezvous="/nowhere")
        made = backend.device_backend(1, backend.Settings(), limits)
        assert made.device == torch.device("cuda", 1 + rank)
        assert made.caps.rank_processes
        assert made.caps.tensor_parallel == 3


@pytest.mark.triton_interp
def test_ranks_exclude_batch_invariance():
    from leadframe_triton.backend import Settings, interpreter_backend

    limits = Limits(tensor_parallel_size=2, rendezvous="/nowhere")
    with pytest.raises(ConfigError, match="size is 2 with -o batch_invariant=on"):
        interpreter_backend(Settings(batch_invariant=True), limits)


@pytest.mark.triton_interp
def test_two_interpreted_ranks_answer_as_one(tiny_model):
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks_override": 8}
    answers = []
    for ranks in (1, 2):
        with LLM(
            str(tiny_model), device="cuda:interpreter", tensor_parallel_size=ranks, **settings
        ) as llm:
            answers.append(llm.generate([[5, 6, 7, 8, 9]], greedy)[0])
    one, two = answers
    assert two.token_ids == one.token_ids
    for a, b in zip(one.logprobs, two.logprobs, strict=True):
        assert b.logprob == pytest.approx(a.logprob, abs=1e-5)
