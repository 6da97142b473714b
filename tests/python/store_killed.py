"""Stores a version and is killed at the n-th request that changes the store, for n = 1, 2, … until one attempt ends by itself.

store_killed.py URL SEED: for each n a child stores version 1 + n and gets SIGKILL before or after that request. A line for each:
n, where it was killed ("before", "after", "end"), what it held as SHA-256 of each rank. Children are forks of a process that has
used no store yet, for a thread that talks to one does not survive a fork.
"""

import hashlib
import os
import signal
import sys

import numpy as np

from test_store import SMALL as LAYOUT
from weightwire.store import Image, Objects, Reader, Uploader


def arrays(seed: int) -> Image:
    image = Image.empty(LAYOUT)
    random = np.random.default_rng(7)
    for flats in image.flats:
        for flat in flats:
            flat[...] = random.integers(0, 255, flat.shape, np.uint8).astype(flat.dtype)
            flat[:] += np.where(np.random.default_rng(seed).random(flat.shape) < 0.02, 1, 0).astype(flat.dtype)
    return image


def sums(image: Image) -> str:
    return " ".join(hashlib.sha256(b"".join(flat.tobytes() for flat in flats)).hexdigest() for flats in image.flats)


def killed_at(number: int, when: str) -> None:
    left = [number]

    def deadly(function):
        def wrapped(*arguments, **words):
            left[0] -= 1
            if left[0] == 0 and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*arguments, **words)
            finally:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        return wrapped
    Objects._put, Objects._replace = deadly(Objects._put), deadly(Objects._replace)


def store(url: str, version: int) -> None:
    reader = Reader(Objects(url), workers=1)
    uploader = Uploader(reader, LAYOUT, anchor_every=1, workers=1)
    head, base = uploader.adopt(), None
    if head is not None:
        base = Image.empty(LAYOUT)
        reader.load(head, base)
        uploader.head = head
    image = arrays(version)
    uploader.store(version, 1, image, base)
    if uploader.anchor_due:
        uploader.put_anchor(image)


def main(url: str) -> None:
    number, ended = 0, False
    while not ended:
        number += 1
        for when in ("before", "after"):
            version = 2 * number + (when == "after")
            child = os.fork()
            if child == 0:
                killed_at(number, when)
                store(url, version)
                os._exit(0)
            ended = os.waitpid(child, 0)[1] == 0
            print(version, "end" if ended else when, number, sums(arrays(version)), flush=True)
            sys.stdin.readline()  # whoever reads looks at the store now


if __name__ == "__main__":
    main(sys.argv[1])
