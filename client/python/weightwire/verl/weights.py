"""What receive_weights gives to a rollout adapter."""

from __future__ import annotations

from typing import Any, AsyncIterator, Awaitable, Callable, Iterator

from weightwire import errors
from weightwire.verl.receiver import Version


class Weights:
    """The tensors of a round. verl's adapters iterate: they have told their engine already that weights come, so that after a round that
    failed they get the version before once more. Ours asks for the version first, and tells its engine nothing when none came."""

    def __init__(self, receive: Callable[[], Awaitable[Version | None]], served: Callable[[], Version],
                 named: Callable[[Version], Iterator[tuple[str, Any]]], acknowledge: Callable[[Version], Awaitable[None]],
                 deadline: float, role: str = "alone"):
        self._receive, self._served, self._named, self._acknowledge = receive, served, named, acknowledge
        self.deadline = deadline  #: seconds
        #: "alone"; with stage "node": "leads", and sends to engine workers beside other workers, too, or "follows", and has no tensors
        self.role = role

    async def version(self) -> Version | None:
        """The round's, complete and verified; None: the round failed."""
        return await self._receive()

    def named(self, version: Version) -> list[tuple[str, Any]]:
        """Read-only views, all of them."""
        return list(self._named(version))

    async def installed(self, version: Version) -> None:
        await self._acknowledge(version)

    async def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        if self.role != "alone":
            raise errors.RefusedError("stage 'node' needs weightwire's adapter for vLLM", code="INVALID_ARGUMENT", reason="invalid_request",
                                      remedy="stage: worker")
        version = await self._receive() or self._served()
        for named in self._named(version):
            yield named
        await self._acknowledge(version)
