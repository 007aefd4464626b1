"""Group E over ranks: whole models that devices share answer as on one device."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from leadframe.conformance.case import Case
from leadframe.conformance.groups.e_engine import check_logits, prompts, tiny
from leadframe.conformance.groups.e_serving import (
    Settings,
    Tokens,
    generate,
    head_dim,
    needs_float32,
    run_engine,
    same_tokens,
)
from leadframe.conformance.kit import Kit
from leadframe.conformance.rank_group import Process, collect, group_of, no_ranks
from leadframe.conformance.tiny_model import Driver, TinyModel, oracle_logits

_COUNT = 6


def _shared(kit: Kit, kv_heads: int) -> TinyModel:
    """A model whose sizes divide among the ranks."""
    count = group_of(kit).count
    return replace(
        tiny(kit), vocab=54 * count, hidden=32 * count, heads=2 * count, kv_heads=kv_heads
    )


def _logits(kit: Kit, kv_heads: int, capture: bool) -> None:
    """Logits of every rank against the float64 oracle of the whole model."""
    model = _shared(kit, kv_heads)
    (prompt,) = prompts(kit, [21])
    fields = {"model": asdict(model), "capture": capture, "count": _COUNT, "chunk": 16}
    given = {"prompt": np.array(prompt, np.int32)}
    replies = group_of(kit).ask("model", fields, given)
    driver = Driver(kit, model)
    tokens = [int(token) for token in replies[0]["tokens"]]
    exact = oracle_logits(kit, driver, tokens[:-1])[len(prompt) - 1 :]
    driver.close()
    for reply in replies:
        kit.same("tokens of a rank", reply["tokens"], replies[0]["tokens"])
        check_logits(kit, driver.dtype, reply["logits"], exact, tokens[len(prompt) :])


def _needs_two(kit: Kit) -> str | None:
    return no_ranks(kit) or needs_float32(kit) or _needs_installed(kit)


def _needs_installed(kit: Kit) -> str | None:
    return "this plugin is not installed" if "--object" in kit.probe_args else None


def _engine(kit: Kit) -> None:
    """Two ranks under the real engine generate what one device generates."""
    want = generate(kit, kit.open(), Settings())
    options = dict(pair.split("=", 1) for pair in kit.options)
    shared = Settings(device=kit.device, options=options, ranks=2)
    run = _in_process if kit.backend.caps.rank_processes else run_engine
    same_tokens(kit, "two ranks", run(shared, head_dim(kit), kit.seed), want)


def _in_process(settings: Settings, dim: int, seed: int) -> Tokens:
    """An engine that loses a rank may end its process: it gets one of its own."""
    process = Process()
    fields = {"settings": asdict(settings), "head_dim": dim, "seed": seed}
    try:
        process.tell("engine", fields)
        message = collect([process], [0], "an engine on two ranks")[0]
    finally:
        process.close()
    tokens: Tokens = message.fields["tokens"]
    return tokens


CASES = [
    Case("E.ranks[logits]", lambda kit: _logits(kit, group_of(kit).count, False), "core", no_ranks),
    Case("E.ranks[repeated-heads]", lambda kit: _logits(kit, 1, True), "core", no_ranks),
    Case("E.engine[two-ranks]", _engine, "full", _needs_two),
]
