"""Which block of a checkpoint tensor a view shows, against numpy's own views of an array of indices."""

import numpy as np
import pytest

from weightwire.vllm.geometry import Unrecordable, block_of, row_major

WHOLE = (6, 4, 10)


def view_of(chain):
    whole = np.arange(np.prod(WHOLE)).reshape(WHOLE)
    return whole, chain(whole)


def geometry(whole, view):
    offset = view.ravel()[0] if view.size else 0
    return view.shape, [s // whole.itemsize for s in view.strides], int(offset)


BLOCKS = {
    "whole": lambda a: a,
    "narrow": lambda a: a[2:5, 1:3, 4:],
    "select": lambda a: a[3],
    "select two": lambda a: a[3, :, 7],
    "one element": lambda a: a[3:4, 2:3, 7:8],
    "transposed": lambda a: a[1:3].transpose(2, 0, 1),
    "added dimension": lambda a: a[2:4, None, :, 3:5],
    "joined": lambda a: a.reshape(24, 10)[4:12],
    "joined inner": lambda a: a[2].reshape(40),
    "joined whole": lambda a: a.reshape(-1),
    "joined and transposed": lambda a: a.reshape(24, 10)[8:16].T,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_view_is_the_block_that_numpy_shows(name):
    whole, view = view_of(BLOCKS[name])
    block = block_of(WHOLE, *geometry(whole, view))
    inside = whole[tuple(slice(a, a + n) for a, n in zip(block.start, block.size))]
    assert sorted(inside.ravel()) == sorted(view.ravel())
    # Copying through the strides of a target of the view's shape puts every element where a plain copy puts it.
    target = np.zeros(view.size + 3, int)[3:].reshape(view.shape)
    strides = block.target_strides([s // target.itemsize for s in target.strides])
    np.lib.stride_tricks.as_strided(target, block.size, [s * target.itemsize for s in strides])[...] = inside
    assert (target == view).all()


NO_BLOCKS = {
    "step": lambda a: a[::2],
    "step inside": lambda a: a[:, :, ::5],
    "broadcast": lambda a: np.broadcast_to(a[:1], (3, 4, 10)),
    "sliding window": lambda a: np.lib.stride_tricks.as_strided(a, (3, 2), (8, 8)),
    "diagonal": lambda a: np.lib.stride_tricks.as_strided(a, (4,), (8 * 50,)),
    "part of joined dimensions": lambda a: a.reshape(24, 10)[2:7],
    "split": lambda a: a.reshape(6, 4, 2, 5)[:, :, :, 1:3],
}


@pytest.mark.parametrize("name", NO_BLOCKS)
def test_a_view_that_is_no_block_is_refused(name):
    whole, view = view_of(NO_BLOCKS[name])
    with pytest.raises(Unrecordable, match="is no block"):
        block_of(WHOLE, *geometry(whole, view))


def test_row_major_strides():
    assert row_major((6, 4, 10)) == (40, 10, 1) and row_major(()) == ()
