"""Versions in object storage, so that a model's weights reach rollout fleets in other regions and clouds.

A writer is an engine where the trainer is, a follower is the trainer where other engines are, and between them there is a store:
S3 and what speaks its protocol, Google's, or a shared file system. docs/regions.md has the whole of it.

>>> from weightwire import store
>>> reader = store.Reader(store.Objects("s3://bucket/job"))
>>> store.pull(reader, reader.version(7), "step-7", to="hf")

Needs the packages obstore and zstandard: pip install 'weightwire[store]'.
"""

from weightwire.store.barrier import Barrier
from weightwire.store.figures import Figures, MetricsServer
from weightwire.store.follower import Follower
from weightwire.store.format import Latest, Layout, Link, Manifest, Part
from weightwire.store.objects import Found, Objects, StoreError
from weightwire.store.reading import Image, Loaded, Reader
from weightwire.store.retention import Kept, Lease, gc
from weightwire.store.signing import Signer, TrustedKeys
from weightwire.store.transfer import Checked, pull, push, verify
from weightwire.store.uploading import Uploaded, Uploader
from weightwire.store.writer import Writer

__all__ = ["Barrier", "Checked", "Figures", "Follower", "Found", "Image", "Kept", "Latest", "Layout", "Lease", "Link", "Loaded", "Manifest",
           "MetricsServer", "Objects", "Part", "Reader", "Signer", "StoreError", "Uploaded", "Uploader", "TrustedKeys", "Writer", "gc",
           "pull", "push", "verify"]
