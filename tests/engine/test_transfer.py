"""Arrays that go to a device together arrive as they were."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as some
from numpy.typing import NDArray

from octavo.engine.transfer import Download, staged, upload, views

DTYPES = st.sampled_from([np.int32, np.int64, np.float32, np.float64])
ARRAYS = st.lists(some.arrays(DTYPES, some.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=7)), min_size=1)


@given(ARRAYS)
def test_what_is_staged_is_found_again(arrays: list[NDArray[np.float64]]) -> None:
    packed = staged(arrays, pin=False)
    for array, tensor in zip(arrays, views(packed.clone(), arrays), strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_a_part_of_a_larger_array_goes_alone() -> None:
    table = np.arange(24, dtype=np.int32).reshape(4, 6)[:, 1:3]
    (tensor,) = views(staged([table], pin=False), [table])
    assert tensor.tolist() == table.tolist()


def test_a_cpu_shares_the_memory_and_another_device_gets_the_shapes() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    (here,) = upload([array], torch.device("cpu"))
    array[0, 0] = 9
    assert here[0, 0] == 9
    there = upload([array, array[0].astype(np.float32)], torch.device("meta"))
    assert [(tensor.shape, tensor.dtype) for tensor in there] == [((2, 3), torch.int64), ((3,), torch.float32)]
    assert [found.tolist() for found in Download([here]).arrays()] == [array.tolist()]
