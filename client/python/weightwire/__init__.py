"""weightwire: moves weights from a trainer fleet to a rollout fleet.

A trainer rank opens a `Publisher`, an engine rank a `Subscriber`; both talk to the sidecar of their
pod over a Unix socket and share memory with it, so that no weight byte passes through Python or gRPC.
`Client` asks and steers the coordinator; `weightwire.aio` is the same for asyncio. Adapters for trainers and
engines are modules of their own, so that `import weightwire` needs neither torch nor any of them.
"""

from weightwire.client import Client
from weightwire.device import Device, DeviceArray
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
from weightwire.subscriber import Offer, RoomWanted, Subscriber
from weightwire.session import default_agent_socket
from weightwire.status import (ContentDifference, EngineContent, EngineStatus, EpochStatus, Event, JobStatus,
                               ParticipantStatus, RolledBack, Verification)
from weightwire.tls import Tls
from weightwire.waiting import Progress

__version__ = "0.1.0"
__all__ = [
    "AbortedError",
    "Arena",
    "Client",
    "ContentDifference",
    "DeadlineError",
    "Device",
    "DeviceArray",
    "EngineContent",
    "EngineStatus",
    "EpochStatus",
    "Event",
    "JobStatus",
    "NotReadyError",
    "Offer",
    "ParticipantStatus",
    "Progress",
    "Publisher",
    "RefusedError",
    "Release",
    "RolledBack",
    "RoomWanted",
    "StaleError",
    "Subscriber",
    "TensorMeta",
    "Tls",
    "UnavailableError",
    "Verification",
    "WeightwireError",
    "default_agent_socket",
    "dtype_bytes",
]
