"""llama.cpp as a peer for `leadframe bench throughput`: JSON lines in, JSON lines out.

    pip install llama-cpp-python        # in an environment of its own
    leadframe bench throughput --compare "/that/environment/bin/python bench/llama_cpp_peer.py"

All requests of a workload are sequences of one context, and every step decodes one token of each,
as llama.cpp's own batched benchmark does. The weights are those of the GGUF file that Leadframe
serves; llama.cpp multiplies them with activations that it rounds to 8 bits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import llama_cpp
import numpy as np

BATCH = 2048
"""Tokens that one call may bring, as many as Leadframe's default token budget."""


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, data: Any) -> None:
    """Leaves out what llama.cpp logs of every context."""


class Sequences:
    """A loaded model, and contexts of as many sequences as a workload has."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_log_set(_quiet, None)
        llama_cpp.llama_backend_init()
        self._threads = threads
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Generates exactly `max_tokens` greedy tokens for each prompt."""
        context = self._context(prompts, max_tokens)
        try:
            return self._decode(context, prompts, max_tokens)
        finally:
            llama_cpp.llama_free(context)

    def _context(self, prompts: list[list[int]], max_tokens: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sum(len(prompt) + max_tokens for prompt in prompts) + 256
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = len(prompts)
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = True
        return llama_cpp.llama_init_from_model(self._model, params)

    def _decode(self, context: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        self._prefill(context, prompts, outputs)
        for step in range(1, max_tokens):
            self._batch.n_tokens = 0
            for row, prompt in enumerate(prompts):
                self._add(outputs[row][-1], len(prompt) + step - 1, row, wants_logits=True)
            self._run(context)
            for row in range(len(prompts)):
                outputs[row].append(self._argmax(context, row))
        return outputs

    def _prefill(self, context: Any, prompts: list[list[int]], outputs: list[list[int]]) -> None:
        """Runs the prompts, as many tokens at a time as a batch takes."""
        self._batch.n_tokens, ends = 0, {}
        for row, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                if self._batch.n_tokens == BATCH:
                    self._flush(context, ends, outputs)
                is_last = position == len(prompt) - 1
                if is_last:
                    ends[row] = self._batch.n_tokens
                self._add(token, position, row, wants_logits=is_last)
        self._flush(context, ends, outputs)

    def _flush(self, context: Any, ends: dict[int, int], outputs: list[list[int]]) -> None:
        self._run(context)
        for row, index in ends.items():
            outputs[row].append(self._argmax(context, index))
        ends.clear()
        self._batch.n_tokens = 0

    def _add(self, token: int, position: int, row: int, *, wants_logits: bool) -> None:
        batch, i = self._batch, self._batch.n_tokens
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        batch.logits[i] = wants_logits
        batch.n_tokens = i + 1

    def _run(self, context: Any) -> None:
        status = llama_cpp.llama_decode(context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _argmax(self, context: Any, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, (self._num_tokens,)).argmax())


def serve(model: Sequences, requests: TextIO, replies: TextIO) -> None:
    """Answers one line with one line until the input ends."""
    for line in requests:
        request = json.loads(line)
        start = time.perf_counter()
        tokens = model.generate(request["prompts"], request["max_tokens"])
        seconds = time.perf_counter() - start
        replies.write(json.dumps({"seconds": seconds, "token_ids": tokens}) + "\n")
        replies.flush()


def main() -> None:
    """Loads the model that the command line names and serves it."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not reach the protocol
    model = Sequences(sys.argv[1], int(sys.argv[2]))
    replies.write(json.dumps({"name": f"llama.cpp ({llama_cpp.__version__})"}) + "\n")
    replies.flush()
    serve(model, sys.stdin, replies)


if __name__ == "__main__":
    main()
