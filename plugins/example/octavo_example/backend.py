"""Attention on a device that takes flat lists of blocks, as Intel's Gaudi does: here in PyTorch, on a CPU.

Such a device has a program for each shape, so a step becomes lists of few lengths, padded with work that has no effect.
An item is a block of the cache and the tile of query tokens that meets it; sums over a tile's items join what it got.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import AttentionBackend
from octavo.attention.contract import AttentionBatch, Capabilities
from octavo.attention.device import Device
from octavo.kv.layout import TOKEN_MAJOR, KVCache

FLOATS = (torch.float32, torch.bfloat16)


class Tile(NamedTuple):
    """Query tokens of one row that follow each other."""

    row: int
    tokens: range
    """Their places in the packed batch."""
    context: int
    """Keys of the row up to that of the last of them."""


class Lists(NamedTuple):
    """Tiles that are computed together."""

    tokens: Tensor
    """[tiles, width] int64: places in the packed batch; padding has the place behind the last token."""
    blocks: Tensor
    """[items] int64: the blocks of all tiles, and of padding."""
    owners: Tensor
    """[items] int64: the tile that meets each block."""
    visible: Tensor
    """[items, width, block size] bool: which keys does each token see?"""


def bucketed(length: int) -> int:
    """The next power of two: a length that the device has a program for."""
    return 1 << (length - 1).bit_length()


def tiles(row: int, tokens: range, context: int, width: int) -> list[Tile]:
    """A row's query tokens, which are the last of its context, `width` at a time."""
    parts = [tokens[first : first + width] for first in range(0, len(tokens), width)]
    return [Tile(row, part, context - (tokens.stop - part.stop)) for part in parts]


class ExampleBackend(AttentionBackend):
    """Gathers blocks by a list, multiplies each by its tile, and takes the softmax over all blocks of a tile."""

    name = "example"
    platform = "cpu"
    contract = 1
    priority = -1  # only where it is asked for
    capabilities = Capabilities(
        dtypes=FLOATS,
        kv_dtypes=FLOATS,
        head_sizes=(...,),
        block_sizes=(128,),
        prefix_caching=True,
        spare_slots=1,  # the block of a row's next token is listed a step ahead
    )
    layout_type = TOKEN_MAJOR

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """Why it cannot run on this device, or None."""
        return None if device.name == "cpu" else f"it runs on cpu, not on {device.name}: set DEVICE=cpu"

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> list[Lists]:
        """Rows that decode are one list, each tile of a prompt is one."""
        starts, contexts = batch.query_starts.tolist(), batch.context_lengths.tolist()
        rows = [(row, range(starts[row], starts[row + 1]), contexts[row]) for row in range(batch.rows)]
        decodes = [Tile(*row) for row in rows[: batch.decodes]]
        prompts = [[tile] for row in rows[batch.decodes :] for tile in tiles(*row, width=self.block_size)]
        return [self._lists(batch, together) for together in (decodes, *prompts) if together]

    def _lists(self, batch: AttentionBatch, together: list[Tile]) -> Lists:
        """Everything padded to lengths that the device has programs for."""
        width = max(len(tile.tokens) for tile in together)
        tokens = torch.full((bucketed(len(together)), bucketed(width)), len(batch.slots))
        positions = torch.full_like(tokens, -1)
        items: list[tuple[int, int, int]] = []  # block, owner, the position of the block's first key
        for owner, tile in enumerate(together):
            own = slice(len(tile.tokens))
            tokens[owner, own] = torch.tensor(tile.tokens)
            positions[owner, own] = torch.arange(tile.context - len(tile.tokens), tile.context)
            listed = batch.block_table[tile.row, : tile.context // self.block_size + 1].tolist()
            items += [(block, owner, number * self.block_size) for number, block in enumerate(listed)]
        nothing = (0, 0, batch.max_context)  # block 0 is nobody's, and no token sees so far
        items += [nothing] * (bucketed(len(items)) - len(items))
        blocks, owners, starts = torch.tensor(items).unbind(1)
        keys = starts[:, None, None] + torch.arange(self.block_size)
        visible = self._sees(positions[owners][:, :, None], keys)
        return Lists(tokens, blocks, owners, visible)

    def _sees(self, position: Tensor, key: Tensor) -> Tensor:
        """Does the token at a position see the key at another? Both count from the start of a row."""
        return key <= position

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: list[Lists], layer: int
    ) -> Tensor:
        """[tokens, heads, head_size]."""
        padded = torch.cat([query, query.new_zeros(1, *query.shape[1:])]).float()
        out = torch.zeros_like(padded)
        for lists in plan:
            keys, values = cache.keys[layer][lists.blocks].float(), cache.values[layer][lists.blocks].float()
            out[lists.tokens] = self._meet(padded[lists.tokens], keys, values, lists)
        return out[:-1].to(query.dtype)

    def _meet(self, query: Tensor, keys: Tensor, values: Tensor, lists: Lists) -> Tensor:
        """query [tiles, width, heads, size], keys and values [items, block size, kv_heads, size] -> as query."""
        query = query.unflatten(2, (self.spec.kv_heads, self.spec.group))
        scores = torch.einsum("iwhgd,ishd->ihgws", query[lists.owners], keys) * self.spec.scale
        scores = scores.masked_fill(~lists.visible[:, None, None], -torch.inf)
        # What nobody sees was perhaps never written: it may be NaN, and 0 · NaN is NaN.
        values = values.masked_fill(~lists.visible.any(1)[:, :, None, None], 0)
        most = scores.amax(-1)
        largest = most.new_full((len(query), *most.shape[1:]), torch.finfo(most.dtype).min)
        largest = largest.scatter_reduce(0, lists.owners.view(-1, 1, 1, 1).expand_as(most), most, "amax")
        weights = torch.exp(scores - largest[lists.owners][..., None])
        total = torch.zeros_like(largest).index_add(0, lists.owners, weights.sum(-1))
        met = torch.einsum("ihgws,ishd->iwhgd", weights, values)
        out = torch.zeros_like(query).index_add(0, lists.owners, met)
        return (out / total.clamp(min=torch.finfo(total.dtype).tiny).movedim(-1, 1)[..., None]).flatten(2, 3)
