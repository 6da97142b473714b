"""How a buffer of the stage is mapped: by a file that somebody else writes."""

import ctypes
import mmap
import os

import numpy as np
import pytest

from weightwire import stage_memory
from weightwire.stage_memory import StageMemory

PAGE = mmap.PAGESIZE
BYTES = 40 * PAGE + 77


@pytest.fixture
def file():
    """The agent's side: a memfd, and its bytes to be written."""
    fd = os.memfd_create("stage")
    os.ftruncate(fd, BYTES)
    theirs = np.frombuffer(mmap.mmap(fd, BYTES), np.uint8)
    theirs[:] = 7
    yield fd, theirs
    os.close(fd)


def write(memory: StageMemory, *offsets: int) -> None:
    for offset in offsets:
        ctypes.memset(memory._begin + offset, 9, 1)


def test_what_the_file_says_is_seen_but_for_pages_that_were_written(file):
    fd, theirs = file
    memory = StageMemory(os.dup(fd), BYTES)
    ours = np.frombuffer(memory.map, np.uint8)
    assert memory.private and memory.written() == []
    theirs[:] = 8
    assert (ours == 8).all() and memory.written() == []  # reading takes no copies
    write(memory, 3, 5 * PAGE, BYTES - 1)
    assert (theirs == 8).all()
    assert memory.written() == [(0, PAGE), (5 * PAGE, 6 * PAGE), (40 * PAGE, 41 * PAGE)]
    theirs[:] = 10
    assert ours[3] == ours[5 * PAGE] == 9 and ours[PAGE] == ours[6 * PAGE] == 10
    assert not memory.registered()
    memory.refresh()
    assert (ours == 10).all() and memory.written() == []


def test_many_pages_are_given_up_at_once_and_all_look_registered(file):
    fd, theirs = file
    memory = StageMemory(os.dup(fd), BYTES)
    ours = np.frombuffer(memory.map, np.uint8)
    write(memory, *range(0, BYTES, 2 * PAGE))
    assert not memory.registered()
    write(memory, *range(0, BYTES, PAGE))
    assert memory.written() == [(0, 41 * PAGE)] and memory.registered()
    memory.refresh()
    assert (ours == 7).all()


def test_an_older_kernel_is_asked_for_each_page(file, monkeypatch):
    memory = StageMemory(os.dup(file[0]), BYTES)
    write(memory, PAGE, 39 * PAGE)
    newer = memory.written()
    asked = []

    def refused(*_):
        asked.append(True)
        raise OSError(25, "no such request")

    monkeypatch.setattr(stage_memory.fcntl, "ioctl", refused)
    assert memory.written() == newer == [(PAGE, 2 * PAGE), (39 * PAGE, 40 * PAGE)] and asked


def test_a_shared_one_is_the_files_own_at_the_same_place(file):
    fd, theirs = file
    memory = StageMemory(os.dup(fd), BYTES)
    ours = np.frombuffer(memory.map, np.uint8)
    write(memory, 3)
    memory.share()
    assert not memory.private and memory.written() == []
    theirs[:] = 11
    assert (ours == 11).all()
    pid = os.fork()
    if pid == 0:
        write(memory, 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -11 and (theirs == 11).all()


def test_without_a_look_at_pages_there_are_no_private_ones(file, monkeypatch):
    monkeypatch.setattr(stage_memory.os, "access", lambda *_: False)
    memory = StageMemory(os.dup(file[0]), BYTES)
    assert not memory.private
    file[1][:] = 12
    assert (np.frombuffer(memory.map, np.uint8) == 12).all()


def test_its_descriptor_goes_with_it(file):
    before = len(os.listdir("/proc/self/fd"))
    memory = StageMemory(os.dup(file[0]), BYTES)
    assert len(os.listdir("/proc/self/fd")) == before + 2  # its own, and that of Python's mmap
    del memory
    assert len(os.listdir("/proc/self/fd")) == before
