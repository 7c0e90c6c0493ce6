"""The kernels of `product`."""

import triton
import triton.language as tl


@triton.jit
def one_row(
    out,
    x,
    weight,
    bias,
    columns,
    depth,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """COLUMNS outputs of one row. Grid: so many at a time. WHOLE: DEPTH divides the inputs."""
    column, inner = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    # What is beyond the last column is read from that, and not stored.
    weights = weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * depth + inner[None, :]
    sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for at in tl.range(0, depth, DEPTH, num_stages=STAGES):
        if WHOLE:
            some = tl.load(weights + at, eviction_policy="evict_first")
            of = tl.load(x + at + inner)
        else:
            inside = at + inner < depth
            some = tl.load(weights + at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            of = tl.load(x + at + inner, mask=inside, other=0.0)
        sums += some.to(tl.float32) * of.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if bias is not None:
        result += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
def few_rows(
    out,
    x,
    weight,
    bias,
    partial,
    arrived,
    rows,
    columns,
    depth,
    x_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """COLUMNS outputs of up to ROWS rows, from a part of the inputs. Grid: tiles of outputs, parts.

    partial: float32 [programs, COLUMNS, ROWS]; arrived: int32 [tiles], 0, and so again at the end.
    """
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column, row, inner = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS), tl.arange(0, DEPTH)
    steps = tl.cdiv(depth, DEPTH)
    share = tl.cdiv(steps, parts)
    first = part * share
    # What is beyond the last column is read from that, and not stored. Rows of padding are 0: if all of them read the
    # last row, they would queue for it.
    weights = weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * depth + inner[None, :]
    inputs = x + row[None, :] * x_row + inner[:, None]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in tl.range(first, tl.minimum(first + share, steps), num_stages=STAGES):
        at = step * DEPTH
        if WHOLE:
            some = tl.load(weights + at, eviction_policy="evict_first")
            of = tl.load(inputs + at, mask=(row < rows)[None, :], other=0.0)
        else:
            inside = at + inner < depth
            some = tl.load(weights + at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            of = tl.load(inputs + at, mask=inside[:, None] & (row < rows)[None, :], other=0.0)
        sums = tl.dot(some, of, sums)
    to = out + row.to(tl.int64)[None, :] * columns + column[:, None]
    real = (row < rows)[None, :] & (column < columns)[:, None]
    if SPLIT:
        shares = partial + tile * parts * (COLUMNS * ROWS) + tl.arange(0, COLUMNS)[:, None] * ROWS + row[None, :]
        tl.store(shares + part * (COLUMNS * ROWS), sums)
        tl.debug_barrier()  # all threads' stores, before the one that counts
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == parts - 1:
            sums = tl.zeros([COLUMNS, ROWS], tl.float32)
            for each in range(parts):
                # Other processors wrote them: not from this one's own cache.
                sums += tl.load(shares + each * (COLUMNS * ROWS), cache_modifier=".cg")
            sums = biased(sums, bias, column, columns)
            tl.store(to, sums.to(out.dtype.element_ty), mask=real)
            tl.store(arrived + tile, 0)
    else:
        sums = biased(sums, bias, column, columns)
        tl.store(to, sums.to(out.dtype.element_ty), mask=real)


@triton.jit
def biased(sums, bias, column, columns):
    """Each column's bias to its sums [columns, rows], if there are any."""
    if bias is not None:
        sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    return sums
