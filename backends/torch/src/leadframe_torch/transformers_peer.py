"""Transformers' batched `generate`, as a peer for `leadframe bench`: JSON lines in, JSON lines out.

Run as `python -m leadframe_torch.transformers_peer MODEL THREADS`. It loads the same weights in
float32, then answers each {"prompts", "max_tokens"} with {"seconds", "token_ids"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO


def load(path: str) -> Any:
    """Loads a model from a Hugging Face directory or a GGUF file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    source = Path(path)
    where = {"pretrained_model_name_or_path": str(source)}
    if source.is_file():
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval()


def generate(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Generates exactly `max_tokens` greedy tokens for each prompt, padded on the left."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
        )
    tokens: list[list[int]] = out[:, longest:].tolist()
    return tokens


def serve(model: Any, requests: TextIO, replies: TextIO) -> None:
    """Answers one line with one line until the input ends."""
    for line in requests:
        request = json.loads(line)
        start = time.perf_counter()
        tokens = generate(model, request["prompts"], request["max_tokens"])
        seconds = time.perf_counter() - start
        replies.write(json.dumps({"seconds": seconds, "token_ids": tokens}) + "\n")
        replies.flush()


def main() -> None:
    """Loads the model that the command line names and serves it."""
    path, threads = sys.argv[1], int(sys.argv[2])
    import torch
    import transformers

    torch.set_num_threads(threads)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not reach the protocol
    messages: Any = transformers.utils.logging
    messages.disable_progress_bar()
    model = load(path)
    name = f"transformers {transformers.__version__}, float32, torch {torch.__version__}"
    replies.write(json.dumps({"name": name}) + "\n")
    replies.flush()
    serve(model, sys.stdin, replies)


if __name__ == "__main__":
    main()
