"""What can be served at all, and when a request ends."""

from __future__ import annotations

from leadframe.config import SchedulerConfig
from leadframe.errors import ConfigError, PromptTooLong, RequestError
from leadframe.kv_cache import KVCacheManager
from leadframe.request import FinishReason, Request


def check_budget(config: SchedulerConfig, max_model_len: int) -> None:
    """Refuses a budget that a prompt could never fit.

    Raises:
      ConfigError: chunked prefill is off and the budget is less than the longest sequence.
    """
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            f"chunked prefill is off and --max-num-batched-tokens is {budget}, less than the "
            f"longest sequence, {max_model_len}; raise it, lower --max-model-len or enable "
            "chunked prefill"
        )


def check_fits(request: Request, max_model_len: int, kv: KVCacheManager) -> None:
    """Refuses a request that could not end even if it were alone.

    What passes can always be admitted to an empty pool and run to its end there, so that no
    request waits for ever.

    Raises:
      PromptTooLong: it exceeds the context or the blocks there are.
      RequestError: it has no tokens.
    """
    num_prompt, total = request.num_prompt_tokens, request.max_total_tokens
    if not num_prompt:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    size = f"the prompt has {num_prompt:,} tokens, {total:,} with the output that is asked for"
    if max(total, num_prompt) > max_model_len:
        raise PromptTooLong(
            f"{size}; the context holds {max_model_len:,}; shorten the prompt or lower max_tokens",
            param="prompt",
        )
    # The last token that is sampled ends the request: its K/V is never needed.
    num_blocks = kv.blocks_for(max(num_prompt, total - 1))
    if num_blocks > kv.num_blocks:
        raise PromptTooLong(
            f"{size}: {num_blocks:,} KV blocks of {kv.block_size:,} tokens; the cache has "
            f"{kv.num_blocks:,}; shorten the prompt, lower max_tokens or give the cache more "
            "memory",
            param="prompt",
        )


def check_stop(
    request: Request, token: int | None, at_limit: bool
) -> tuple[FinishReason, int | None] | None:
    """Says whether a request ends: by its last token, else by its length.

    Args:
      request: the token, if one was sampled, is the last of its output.
      token: what was sampled; None if the step sampled nothing for this request.
      at_limit: it has all the tokens that it may have, and they are computed as far as needed.

    Returns:
      The reason, and the stop id if the request named it; None if it goes on.
    """
    params = request.params
    if token in request.stop_ids and len(request.output_token_ids) >= params.min_tokens:
        return FinishReason.STOP, token if token in params.stop_token_ids else None
    return (FinishReason.LENGTH, None) if at_limit else None
