"""Boxes of flattened tensors, against numpy's own flattening."""

import numpy as np

from weightwire.boxes import block, flat_boxes, submission, whole
from weightwire.memory import TensorMeta


def test_flat_boxes_are_exactly_the_elements_of_the_range_in_its_order():
    rng = np.random.Generator(np.random.SFC64(5))
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(0, 5)))
        numbers = np.arange(int(np.prod(shape))).reshape(shape)
        begin, end = sorted(int(n) for n in rng.integers(0, numbers.size + 1, 2))
        offset = int(rng.integers(0, 4))
        local = np.full(offset + end - begin, -1)
        found = list(flat_boxes("t", shape, begin, end, offset))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        for box in found:
            values = numbers[tuple(slice(b, b + e) for b, e in zip(box.begin, box.extent))]
            for index in np.ndindex(*box.extent):
                place = box.offset + sum(i * s for i, s in zip(index, box.stride))
                assert local[place] == -1
                local[place] = values[index]
        assert np.array_equal(local[offset:], numbers.reshape(-1)[begin:end]), (shape, begin, end)


def test_a_block_without_elements_has_no_boxes():
    assert block("t", "BF16", [4, 0], [0, 3]).boxes == []
    assert len(block("t", "BF16", [4, 0], [2, 3]).boxes) == 1


def test_a_submission_refers_to_tensors_by_their_place_among_sorted_names():
    metas = {name: TensorMeta(name, "F32", (2, 3)) for name in ("b", "a")}
    explicit = submission(metas, [whole(metas["b"])]).boxes
    assert [t.name for t in explicit.canonical.tensors] == ["a", "b"]
    piece = explicit.layout.tensors[0].pieces[0]
    assert (piece.tensor, list(piece.extent), list(piece.local_stride)) == (1, [2, 3], [3, 1])
