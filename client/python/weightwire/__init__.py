"""weightwire: moves weights from a trainer fleet to a rollout fleet.

A trainer rank opens a `Publisher`, an engine rank a `Subscriber`; both talk to the sidecar of their
pod over a Unix socket and share memory with it, so that no weight byte passes through Python or gRPC.
"""

from weightwire.errors import (
    AbortedError,
    DeadlineError,
    NotReadyError,
    RefusedError,
    StaleError,
    UnavailableError,
    WeightwireError,
)
from weightwire.memory import Arena, TensorMeta, dtype_bytes
from weightwire.publisher import Publisher, Release
from weightwire.subscriber import Offer, Subscriber
from weightwire.session import default_agent_socket

__version__ = "0.1.0"
__all__ = [
    "AbortedError",
    "Arena",
    "DeadlineError",
    "NotReadyError",
    "Offer",
    "Publisher",
    "RefusedError",
    "Release",
    "StaleError",
    "Subscriber",
    "TensorMeta",
    "UnavailableError",
    "WeightwireError",
    "default_agent_socket",
    "dtype_bytes",
]
