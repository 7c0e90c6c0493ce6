"""Which thread has what of tiles of keys and values, where a warp's lanes load them straight into registers.

A tile has TOKENS tokens for each of WARPS warps, each of which has a running softmax of its own. A warp's lanes load
whole lines of memory; where the matrix unit wants another lane to have an element, lanes exchange them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo_triton.tuning import WARP_TOKENS

TOKENS = gl.constexpr(WARP_TOKENS)
"""Of a warp's tile."""


@gluon.constexpr_function
def matrix(warps):
    """Of scores [warps, tokens, heads] and of sums [warps, dims, heads].

    There are 8 heads at least; the other way round, [heads, tokens], there would be 16.
    """
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def run(size, packed):
    """Dims that a thread has side by side: in a product it does not matter which, if queries are held alike."""
    return 8 if packed == 2 else size // 8


@gluon.constexpr_function
def key_operand(warps, size, packed, of_words=False):
    """Of keys [warps, tokens, dims], or of words of so many elements of theirs."""
    return gl.DotOperandLayout(0, matrix(warps), run(size, packed) // (packed if of_words else 1))


@gluon.constexpr_function
def query_operand(warps, size, packed):
    """Of queries [warps, dims, heads]."""
    return gl.DotOperandLayout(1, matrix(warps), run(size, packed))


@gluon.constexpr_function
def value_operand(warps, upright, packed=1):
    """Of values [warps, dims, tokens], or of words of so many elements of theirs."""
    return gl.DotOperandLayout(0, matrix(warps), (4 if upright else 2) // packed)


@gluon.constexpr_function
def weight_operand(warps, upright):
    """Of weights [warps, tokens, heads]."""
    return gl.DotOperandLayout(1, matrix(warps), 4 if upright else 2)


@gluon.constexpr_function
def _linear(warps, shape, registers, lanes, packed):
    """Bases of a thread's elements and of a warp's lanes, each warp with an entry of the first axis.

    packed: elements in a word, those side by side along the last axis, which are a thread's first.
    """
    held = [[bit, 0, 0] for bit in (1, 2) if bit < warps]
    registers = registers[packed.bit_length() - 1 :]
    registers, lanes = ([[*outer, last // packed] for *outer, last in bases] for bases in (registers, lanes))
    return gl.DistributedLinearLayout(registers, lanes, held, [], [warps, shape[0], shape[1] // packed])


@gluon.constexpr_function
def loaded_keys(warps, size, upright, packed):
    """[warps, tokens, size / packed] as they are loaded. upright: dims lie in runs, and a run of all slots together.

    Then, and where a run is a sector of memory or more, that is as the matrix unit wants them; else it is whole lines.
    """
    if upright or packed == 4:
        return key_operand(warps, size, packed, True)
    eight = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    if size == 64:
        lanes = [[0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 2, 0], [0, 4, 0]]
        return _linear(warps, [16, size], [*eight, [0, 8, 0], [0, 1, 0]], lanes, packed)
    lanes = [[0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 0, 64], [0, 4, 0]]
    return _linear(warps, [16, size], [*eight, [0, 8, 0], [0, 1, 0], [0, 2, 0]], lanes, packed)


@gluon.constexpr_function
def loaded_values(warps, size, upright, packed, of_words=True):
    """[warps, tokens, size / packed] as they are loaded; upright [warps, size, tokens / packed]: slots side by side."""
    words = packed if of_words else 1
    if upright and packed == 2:
        return value_operand(warps, True, words)
    if upright:
        lanes = [[0, 8, 0], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
        registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + [[0, bit, 0] for bit in (16, 32, 64) if bit < size]
        return _linear(warps, [size, 16], registers, lanes, words)
    many = run(size, packed)
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, many], [0, 0, 2 * many], [0, 0, 4 * many]]
    registers = [[0, 0, bit] for bit in (1, 2, 4, 8) if bit < many] + [[0, 1, 0], [0, 8, 0]]
    return _linear(
        warps, [16, size], registers + [[0, 0, bit] for bit in (64,) if 8 * many <= bit < size], lanes, words
    )
