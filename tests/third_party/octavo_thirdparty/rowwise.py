"""Attention one row and one key head at a time: slow, and easy to check by eye."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import AttentionBackend
from octavo.attention.contract import AttentionBatch, Capabilities
from octavo.kv.layout import TOKEN_MAJOR

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Row(NamedTuple):
    """Where a row's queries lie in the batch, and its keys in the cache."""

    queries: slice
    slots: Tensor
    """[context] int64."""
    hidden: Tensor
    """[queries, context] bool: keys that a query must not see."""


class Rowwise(AttentionBackend):
    """A loop over rows, with the keys and values of each gathered into one piece."""

    name = "rowwise"
    platform = "example"
    contract = 1
    priority = -1
    capabilities = Capabilities(
        dtypes=FLOATS,
        kv_dtypes=FLOATS,
        head_sizes=(...,),
        block_sizes=(16, ...),
        features=frozenset({"window", "softcap", "sinks"}),
        prefix_caching=True,
    )
    layout_type = TOKEN_MAJOR

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> list[Row]:
        starts, contexts = batch.query_starts.tolist(), batch.context_lengths.tolist()
        rows = []
        for index, context in enumerate(contexts):
            queries = slice(starts[index], starts[index + 1])
            keys = torch.arange(context, device=batch.block_table.device)
            blocks = batch.block_table[index, keys // self.block_size].long()
            rows.append(Row(queries, blocks * self.block_size + keys % self.block_size, self._hidden(queries, keys)))
        return rows

    def _hidden(self, queries: slice, keys: Tensor) -> Tensor:
        """Later keys, and those that the window has left behind; the row's last query is its last key's token."""
        length = queries.stop - queries.start
        positions = torch.arange(len(keys) - length, len(keys), device=keys.device)[:, None]
        hidden = keys > positions
        return hidden if self.spec.window is None else hidden | (keys <= positions - self.spec.window)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Any, plan: list[Row], layer: int) -> Tensor:
        output = torch.zeros_like(query, dtype=torch.float32)
        for queries, slots, hidden in plan:
            if not len(slots):
                continue
            keys, values = (part.float() for part in self.layout.read(cache, layer, slots))
            for head in range(self.spec.heads):
                shared = head // self.spec.group
                scores = self.spec.scale * (query[queries, head].float() @ keys[:, shared].T)
                if self.spec.softcap is not None:
                    scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
                output[queries, head] = self._weights(scores, hidden, layer, head) @ values[:, shared]
        return output.to(self.spec.dtype)

    def _weights(self, scores: Tensor, hidden: Tensor, layer: int, head: int) -> Tensor:
        """The softmax over the keys that are seen, [queries, context]; a sink takes its part and gives nothing."""
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is None:
            return scores.softmax(-1)
        sink = self.sinks[layer, head].float().expand(len(scores), 1)
        return torch.cat([scores, sink], -1).softmax(-1)[:, :-1]
