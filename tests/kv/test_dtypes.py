"""Every pair of dtypes is tried: those that differ are refused unless they are named."""

import itertools

import pytest
import torch

from octavo.kv.dtypes import Unmixed
from octavo.kv.layout import TOKEN_MAJOR
from tests.distributions import spec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)
NAMED = ((torch.bfloat16, torch.float8_e5m2), (torch.float32, torch.bfloat16))


@pytest.mark.parametrize("pairs", [(), NAMED])
@pytest.mark.parametrize(("dtype", "kv_dtype"), tuple(itertools.product(DTYPES, DTYPES)))
def test_pairs_are_named_or_refused(
    dtype: torch.dtype, kv_dtype: torch.dtype, pairs: tuple[tuple[torch.dtype, torch.dtype], ...]
) -> None:
    layout, wanted = Unmixed(TOKEN_MAJOR, pairs), spec(dtype=dtype, kv_dtype=kv_dtype)
    if dtype == kv_dtype or (dtype, kv_dtype) in pairs:
        assert layout(wanted, 16) == TOKEN_MAJOR(wanted, 16)
    else:
        with pytest.raises(ValueError, match=f"a cache of {kv_dtype} is not for queries of {dtype}"):
            layout(wanted, 16)
