"""A buffer of the stage as this process has it mapped: the agent's memory, which the agent alone writes."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import struct
import weakref

import numpy as np

log = logging.getLogger("weightwire")
# Linux's numbers; Python has some of the names from 3.10 on, and no others. The agent has made the pages: mapping them now
# keeps a fault for each of them out of the first reads, when an engine may stand still.
_MAP_POPULATE, _MAP_NORESERVE, _MAP_FIXED = 0x8000, 0x4000, 0x10
_PAGE = mmap.PAGESIZE
_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))  # proc_pid_pagemap(5)
_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg), from Linux 6.7 on
_SCAN_ARGUMENT = struct.Struct("12Q")
_FILE, _RESIDENT = 1 << 2, (1 << 3) | (1 << 4)  # categories of a scan: PAGE_IS_FILE; PAGE_IS_PRESENT, PAGE_IS_SWAPPED
_FOUND_MAX = 64  # ranges of one scan: whoever asks wants to know whether there are any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class StageMemory:
    """`nbytes` of the file `fd`, which this takes over.

    Arrays over `map` are read-only to numpy. A write that numpy does not see (torch.from_numpy drops its flag) changes a copy of
    its page, which is this process's alone and follows the file no more: `written` finds such pages and `refresh` gives them up,
    before the buffer is used for another version. Where pages cannot be looked at, or after `share`, the mapping is the file's
    own without the right to write: such a write is SIGSEGV.
    """

    def __init__(self, fd: int, nbytes: int):
        self._close = weakref.finalize(self, os.close, fd)
        self._fd = fd
        #: True: private pages; False: the file's own.
        self.private = os.access("/proc/self/pagemap", os.R_OK)
        kind = mmap.MAP_PRIVATE | _MAP_NORESERVE if self.private else mmap.MAP_SHARED
        self.map = mmap.mmap(fd, nbytes, kind | _MAP_POPULATE, mmap.PROT_READ)
        self._begin = np.frombuffer(self.map, np.uint8).ctypes.data
        self._bytes = -(-nbytes // _PAGE) * _PAGE
        # Only now: to populate a private mapping that may be written is to copy every page.
        if self.private and _libc.mprotect(self._begin, self._bytes, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
            self.share()

    def share(self) -> None:
        """Maps the file itself, at the same place. Needed before the memory is registered with a device or a network card,
        which would take private copies of all pages, and go on reading these when the file changes."""
        if self.private and _libc.mmap(self._begin, self._bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE,
                                       self._fd, 0) != self._begin:
            raise OSError(ctypes.get_errno(), "a stage cannot be mapped again")
        self.private = False

    def written(self) -> list[tuple[int, int]]:
        """Where this process has pages of its own in place of the file's: (begin, end) in bytes; some at least, if any."""
        if not self.private:
            return []
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            try:
                return self._scan(pagemap.fileno())
            except OSError:  # an older kernel
                return self._read(pagemap.fileno())

    def registered(self) -> bool:
        """True: what `written` found looks like memory that was registered with a device, which would go on reading the copies:
        all pages are private, or the process has some that are pinned (proc_pid_status(5), VmPin: RDMA)."""
        if self.written() == [(0, self._bytes)]:
            return True
        with open("/proc/self/status") as status:
            return any(line.startswith("VmPin:") and int(line.split()[1]) > 0 for line in status)

    def refresh(self) -> None:
        """Gives up the pages that are this process's own: what the file says is seen again."""
        found = self.written()
        if len(found) >= _FOUND_MAX:
            found = [(0, self._bytes)]
        for begin, end in found:
            if _libc.madvise(self._begin + begin, end - begin, mmap.MADV_DONTNEED) != 0:
                raise OSError(ctypes.get_errno(), "pages of a stage cannot be given up")

    def _scan(self, pagemap: int) -> list[tuple[int, int]]:
        found = bytearray(_FOUND_MAX * 24)  # struct page_region: start, end, categories
        at = ctypes.addressof((ctypes.c_char * len(found)).from_buffer(found))
        argument = bytearray(_SCAN_ARGUMENT.pack(_SCAN_ARGUMENT.size, 0, self._begin, self._begin + self._bytes, 0, at, _FOUND_MAX,
                                                 0, _FILE, _FILE, _RESIDENT, _FILE))
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument, True)
        regions = struct.iter_unpack("3Q", bytes(found[:24 * count]))
        return [(begin - self._begin, end - self._begin) for begin, end, _ in regions]

    def _read(self, pagemap: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        pages, step = self._bytes // _PAGE, 1 << 18
        for first in range(0, pages, step):
            count = min(step, pages - first)
            text = os.pread(pagemap, 8 * count, 8 * (self._begin // _PAGE + first))
            entries = np.frombuffer(text, np.uint64)
            own = np.flatnonzero(((entries & (_PRESENT | _SWAPPED)) != 0) & ((entries & _OF_A_FILE) == 0)) + first
            found += [(int(page) * _PAGE, (int(page) + 1) * _PAGE) for page in own[:_FOUND_MAX]]
        return found
