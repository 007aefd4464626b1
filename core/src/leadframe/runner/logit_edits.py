"""Logit edits of one request: penalties, biases, bans and the only ids allowed, as sparse edits.

Every rule that touches single tokens becomes one (scale, add) pair per token id; the device
applies x → (x / scale if x > 0 else x * scale) + add. So a bias is added after the repetition
penalty has scaled.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from leadframe.request import Request


class LogitEdits:
    """What to change in a request's logits before it samples, kept up to date token by token.

    - repetition penalty: scale, on tokens of prompt and output;
    - presence and frequency penalties: add, on tokens of the output;
    - logit bias: add;
    - stop ids before `min_tokens`, and the last id of a bad word whose other ids stand at the
      end: add -inf;
    - allowed ids: every other token is dropped. If bans would leave none of them, bans yield.
    """

    def __init__(self, request: Request) -> None:
        params = request.params
        self._request = request
        self._index: dict[int, int] = {}
        self._ids = np.zeros(0, np.int32)
        self._bias = np.zeros(0, np.float32)
        self._counts = np.zeros(0, np.float32)
        self._seen = np.zeros(0, bool)
        self._num_read = 0
        self._register(params.allowed_token_ids or ())
        self._num_allowed = len(self._ids)
        self._register(params.logit_bias)
        self._bias[[self._index[t] for t in params.logit_bias]] = list(params.logit_bias.values())
        if params.min_tokens:
            self._register(request.stop_ids)
        self._register(words[-1] for words in params.bad_words_ids)
        if params.repetition_penalty != 1.0:
            prompt = set(request.prompt_token_ids)
            self._register(prompt)
            self._seen[[self._index[token] for token in prompt]] = True

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
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Returns ids, scale and add, [A] each, for the next token of the request."""
        params = self._request.params
        self._read_output()
        scale = np.where(self._seen, np.float32(params.repetition_penalty), np.float32(1))
        add = self._bias - np.float32(params.frequency_penalty) * self._counts
        add -= np.float32(params.presence_penalty) * (self._counts > 0)
        banned = [self._index[token] for token in self._banned()]
        if self.keep_only:
            # Allowed ids were registered first.
            kept = np.arange(len(self._ids)) < self._num_allowed
            left = kept.copy()
            left[banned] = False
            banned = banned if left.any() else []
        else:
            kept = (scale != 1) | (add != 0)
            kept[banned] = True
        add[banned] = -np.inf
        return self._ids[kept], scale[kept], add[kept]

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
        fresh = self._request.output_token_ids[self._num_read :]
        self._num_read += len(fresh)
        if self._request.params.has_penalties:
            self._register(fresh)
            for token in fresh:
                self._counts[self._index[token]] += 1
                self._seen[self._index[token]] = True

    def _register(self, token_ids: Iterable[int]) -> None:
        new = [token for token in dict.fromkeys(token_ids) if token not in self._index]
        for token in new:
            self._index[token] = len(self._index)
        if new:
            zeros = np.zeros(len(new), np.float32)
            self._ids = np.concatenate([self._ids, np.array(new, np.int32)])
            self._bias = np.concatenate([self._bias, zeros])
            self._counts = np.concatenate([self._counts, zeros])
            self._seen = np.concatenate([self._seen, zeros.astype(bool)])
