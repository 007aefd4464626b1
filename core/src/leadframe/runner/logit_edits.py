"""Logit edits of one request: penalties, biases, bans and the only ids allowed, as sparse edits.

Every rule that touches single tokens becomes one (scale, add) pair per token id; the device
applies x → (x / scale if x > 0 else x * scale) + add. So a bias is added after the repetition
penalty has scaled.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from leadframe.request import Request

_ROOM = 16
"""Edits that fit before the arrays grow."""


class LogitEdits:
    """What to change in a request's logits before it samples, kept up to date token by token.

    - repetition penalty: scale, on tokens of prompt and output;
    - presence and frequency penalties: add, on tokens of the output;
    - logit bias: add;
    - stop ids before `min_tokens`, and the last id of a bad word whose other ids stand at the
      end: add -inf;
    - allowed ids: every other token is dropped. If bans would leave none of them, bans yield, as
      they do where they and a token mask would leave nothing.
    """

    def __init__(self, request: Request) -> None:
        params = request.params
        self._request = request
        self._index: dict[int, int] = {}
        self._ids = np.zeros(_ROOM, np.int32)
        self._scale = np.ones(_ROOM, np.float32)
        self._add = np.zeros(_ROOM, np.float32)
        self._counts: dict[int, int] = {}
        self._penalises = params.has_penalties
        self._num_read = 0
        self._register(params.allowed_token_ids or ())
        self._num_allowed = len(self._index)
        self._register(params.logit_bias)
        self._add[[self._index[t] for t in params.logit_bias]] = list(params.logit_bias.values())
        if params.min_tokens:
            self._register(request.stop_ids)
        self._register(words[-1] for words in params.bad_words_ids)
        self._may_ban = bool(params.bad_words_ids or (params.min_tokens and request.stop_ids))
        if params.repetition_penalty != 1.0:
            prompt = set(request.prompt_token_ids)
            self._register(prompt)
            self._scale[[self._index[token] for token in prompt]] = params.repetition_penalty

    @staticmethod
    def are_needed(request: Request) -> bool:
        """Whether a request ever edits its logits."""
        params = request.params
        return bool(
            params.has_penalties
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words_ids
            or (params.min_tokens and request.stop_ids)
        )

    @property
    def keep_only(self) -> bool:
        """Whether tokens that are not edited are dropped."""
        return self._num_allowed > 0

    def current(
        self, mask: npt.NDArray[np.int32] | None = None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Returns ids, scale and add, [A] each, for the next token of the request.

        Args:
          mask: the tokens that are masked besides, int32 [W]; see `StepArrays.token_mask`.
        """
        self._read_output()
        size = self._num_allowed or len(self._index)  # allowed ids were registered first
        ids, scale, add = self._ids[:size], self._scale[:size], self._add[:size]
        if not self._may_ban:
            return ids, scale, add
        tokens = self._banned()
        if mask is not None and tokens and not _leaves_any(mask, tokens):
            tokens = set()
        banned = [self._index[token] for token in tokens]
        add = add.copy()
        if self.keep_only:
            banned = [index for index in banned if index < size]
            add[banned if len(banned) < size else []] = -np.inf
            return ids, scale, add
        add[banned] = -np.inf
        kept = (scale != 1) | (add != 0)
        return ids[kept], scale[kept], add[kept]

    def _banned(self) -> set[int]:
        request, params = self._request, self._request.params
        banned: set[int] = set()
        if len(request.output_token_ids) < params.min_tokens:
            banned |= request.stop_ids
        known = request.num_tokens
        for words in params.bad_words_ids:
            start = known - (len(words) - 1)
            if start >= 0 and request.token_ids(start, known) == list(words[:-1]):
                banned.add(words[-1])
        return banned

    def _read_output(self) -> None:
        """Counts what the request has sampled since; runs for each of its tokens."""
        fresh = self._request.output_token_ids[self._num_read :]
        self._num_read += len(fresh)
        if not self._penalises:
            return
        params, counts = self._request.params, self._counts
        for token in fresh:
            index = self._index.get(token)
            if index is None:
                index = self._append(token)
            count = counts[token] = counts.get(token, 0) + 1
            penalty = params.frequency_penalty * count + params.presence_penalty
            self._add[index] = params.logit_bias.get(token, 0.0) - penalty
            self._scale[index] = params.repetition_penalty

    def _append(self, token: int) -> int:
        index = self._index[token] = len(self._index)
        self._make_room(index + 1)
        self._ids[index] = token
        return index

    def _register(self, token_ids: Iterable[int]) -> None:
        start = len(self._index)
        for token in token_ids:
            self._index.setdefault(token, len(self._index))
        size = len(self._index)
        self._make_room(size)
        if size > start:
            self._ids[start:size] = [*islice(reversed(self._index), size - start)][::-1]

    def _make_room(self, size: int) -> None:
        if size > len(self._ids):
            room = 2 * size - len(self._ids)
            self._ids = np.append(self._ids, np.zeros(room, np.int32))
            self._scale = np.append(self._scale, np.ones(room, np.float32))
            self._add = np.append(self._add, np.zeros(room, np.float32))


def _leaves_any(mask: npt.NDArray[np.int32], banned: Iterable[int]) -> bool:
    """Whether a token is neither masked nor banned; bits past the vocabulary are set."""
    both = mask.copy()
    ids = np.fromiter(banned, np.int64)
    np.bitwise_or.at(both, ids // 32, np.left_shift(1, ids % 32).astype(np.uint32).view(np.int32))
    return bool((both != -1).any())
