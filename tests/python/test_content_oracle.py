"""The roots that tests in C++ compare with are those of the definition, for the checkpoints that are in the tree."""

import json

import numpy as np

from content_oracle import ROOTS, root, roots
from weightwire import TensorMeta


def test_the_roots_in_the_tree_are_the_definitions():
    assert json.loads(ROOTS.read_text()) == roots()


def test_a_root_is_of_every_bit_name_dtype_and_count_of_elements():
    def changed(name="t", dtype="BF16", shape=(3, 5), bit=None):
        bits = np.arange(15, dtype=np.uint16)
        if bit is not None:
            bits[bit // 16] ^= np.uint16(1 << bit % 16)
        return root({name: (TensorMeta(name, dtype, shape), bits[:np.prod(shape)]), "u": (TensorMeta("u", "BF16", (1,)), bits[:1])})

    variants = [changed(), changed(name="s"), changed(dtype="F16"), changed(shape=(2, 7)), changed(shape=(13,))]
    variants += [changed(bit=bit) for bit in range(15 * 16)]
    assert len(set(variants)) == len(variants)
    assert changed(shape=(5, 3)) == changed(shape=(15,)) == changed()  # dimensions may be split or joined
