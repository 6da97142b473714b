"""How a checkpoint comes to be: laid out empty beside its place, filled, sealed, synced, renamed.

Under its own name a checkpoint exists whole or not at all; what was interrupted can go on where it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Optional, Tuple

from weightwire.checkpoint import disk, hf, megatron_files, native, torch_dist
from weightwire.checkpoint.execute import Bound
from weightwire.checkpoint.formats import CONFIG, Opened, Wanted, bind, parse_target
from weightwire.checkpoint.stored import CheckpointError

FORMATS: Dict[str, ModuleType] = {"weightwire": native, "torch_dist": torch_dist, "megatron": megatron_files, "hf": hf}
#: Small files that make a folder usable; they go along.
_COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
               "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
               "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_PROGRESS = "progress.json"
_SYNC_BYTES = 512 << 20


def check_free(final: Path) -> None:
    """CheckpointError (ALREADY_EXISTS): something has the target's name."""
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise CheckpointError(f"{final} exists", code="ALREADY_EXISTS", remedy="choose another name, or remove it")


def target_layout(to: str) -> Tuple[str, str]:
    """The format that `to` names, and the layout whose ranks it has."""
    kind, spec = parse_target(to)
    return kind, megatron_files.rank_spec(spec)[0] if kind == "megatron" else spec


def base_folder(base: Optional[os.PathLike[str] | str], kind: str, final: Path) -> Optional[Path]:
    """CheckpointError: changes since a base are kept in the native format alone, and the base is in it."""
    if base is not None and kind != "weightwire":
        raise CheckpointError(f"a checkpoint in {kind} is kept whole", remedy="--base goes with --to weightwire[:SPEC]")
    folder = native.base_at(base, final)
    if folder is not None:
        native.open_base(folder, final).files.close()
    return folder


class Writing:
    """A checkpoint in the making, for `with`. `target` is filled in steps that the caller numbers.

    `key` says what is being written: an earlier attempt with an equal one goes on, after its `done` steps; without a
    key nothing goes on. `base`: what is kept is what changed since that native checkpoint.
    """

    def __init__(self, final: Path, wanted: Wanted, key: Optional[Dict[str, Any]], base: Optional[Path] = None):
        self._final, self._wanted, self._key = final, wanted, key
        self._module = FORMATS[wanted.format]
        self._partial = final.with_name(f".{final.name}.partial")
        self._unsynced = 0
        self._base = base
        self.done = 0

    def __enter__(self) -> "Writing":
        self._partial.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._partial, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise CheckpointError(f"{self._partial} is being written by another process", code="UNAVAILABLE") from error
        try:
            self._begin()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._laid_out.files.close()
        os.close(self._lock)

    def _begin(self) -> None:
        self.done = self._progress()
        if self.done < 0:
            self.done = 0
            for path in self._partial.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._module.lay_out(self._partial, self._wanted)
            disk.allocate(self._partial)
            self._save_progress()
        self._laid_out = self._open()
        self.target = bind(self._laid_out, self._wanted.ranks, "target")
        self.target.files.close()  # what was opened to be read
        self.target.files.writable = True

    def _open(self) -> Opened:
        """What is being written, by its own format's reader."""
        opened: Opened = (self._module.open_unsealed(self._partial, self._wanted) if hasattr(self._module, "open_unsealed")
                          else self._module.open_at(self._partial))
        return opened

    def _progress(self) -> int:
        """Steps that an earlier attempt at the same has done; -1: none to go on with."""
        try:
            progress = json.loads((self._partial / _PROGRESS).read_text())
            return int(progress["done"]) if self._key and progress["key"] == self._key else -1
        except (OSError, ValueError, KeyError, TypeError):
            return -1

    def _save_progress(self) -> None:
        temporary = self._partial / (_PROGRESS + ".new")
        with open(temporary, "w") as out:
            json.dump({"key": self._key, "done": self.done}, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, self._partial / _PROGRESS)

    def wrote(self, size: int) -> None:
        """One more step is done, of `size` bytes; made durable now and then."""
        self.done += 1
        self._unsynced += size
        if self._unsynced >= _SYNC_BYTES:
            for file in {region.file for rank in self.target.ranks for t in rank for region in t.regions}:
                os.fsync(self.target.files.fd(file))
            self._save_progress()
            self._unsynced = 0

    def seal(self) -> None:
        """Everything is written: checksums and the manifest, and what goes along."""
        self._module.seal(self._laid_out, self._wanted)
        config = self._wanted.config
        if self._wanted.config_text is None:
            shutil.copyfile(config, self._partial / CONFIG)
        else:
            (self._partial / CONFIG).write_text(self._wanted.config_text)
        for name in _COMPANIONS:
            if (config.parent / name).is_file():
                shutil.copyfile(config.parent / name, self._partial / name)

    def reopened(self) -> Bound:
        """What was written, opened as any reader would."""
        opened = native.open_at(self._partial) if self._module is native else self._open()
        return bind(opened, self._wanted.ranks, "target")

    def finish(self) -> None:
        """From here on the checkpoint exists."""
        if self._base:
            (self._partial / _PROGRESS).unlink()  # from here on an attempt begins anew
            native.keep_changes(self._partial, self._base, self._final)
        disk.sync_tree(self._partial)
        (self._partial / _PROGRESS).unlink(missing_ok=True)
        disk.sync_folder(self._partial)
        os.rename(self._partial, self._final)
        disk.sync_folder(self._final.parent)
