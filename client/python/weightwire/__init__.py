"""weightwire: moves weights from a trainer fleet to a rollout fleet.

A trainer rank opens a `Publisher`, an engine rank a `Subscriber`; both talk to the sidecar of their
pod over a Unix socket and share memory with it, so that no weight byte passes through Python or gRPC.
`Client` asks and steers the coordinator; `weightwire.aio` is the same for asyncio. Adapters for trainers and
engines are modules of their own, so that `import weightwire` needs neither torch nor any of them.

These arguments mean the same wherever they appear:

    group             name of the trainer or of the engine whose rank this is
    rank, world_size  this rank's number and the number of ranks in the group. Adapters take them from torch.distributed
    job               name of the job, compared with the agent's; "": whatever job the agent serves
    agent             path of the agent's Unix socket; None: WEIGHTWIRE_AGENT_SOCKET, or the default of `weightwired`
    timeout           seconds; without another meaning at the method: that one call may take
    device            the GPU where the memory is to lie, if the agent has GPU memory to give; `device_refused` says why not
    lineage           see Publisher.publish
    names             function from a module's name of a tensor to Hugging Face's name; None leaves the tensor out
    model_name        of an engine: which of the trainer's models it holds, where it publishes several; see `weightwire.models`
    verify            the trainer's own export, which some versions are compared with before they go out: see LivePublisher
    verify_every      every so many versions; 0: only the first one and those that `publish(verify=True)` asks for
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
from weightwire.local_daemon import Local, local
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
    "Local",
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
    "local",
]
