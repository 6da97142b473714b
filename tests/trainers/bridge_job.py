"""The targets of worlds with a stub of Transformer Engine. Imports nothing by itself: a parent has no stub."""

from __future__ import annotations


def train(rank: int, *arguments) -> None:
    import bridge_ranks  # installs the stub before megatron is imported
    bridge_ranks.train(rank, *arguments)


def delayed(rank: int, *arguments) -> None:
    import bridge_ranks
    bridge_ranks.delayed(rank, *arguments)


def interleaved(rank: int, *arguments) -> None:
    import bridge_ranks
    bridge_ranks.interleaved(rank, *arguments)


def mappings(rank: int, *arguments) -> None:
    import bridge_ranks
    bridge_ranks.mappings(rank, *arguments)


def computing(rank: int, *arguments) -> None:
    import bridge_ranks
    bridge_ranks.computing(rank, *arguments)


def added(rank: int, *arguments) -> None:
    import bridge_ranks
    bridge_ranks.added(rank, *arguments)


def adapted(rank: int, *arguments) -> None:
    import bridge_ranks
    bridge_ranks.adapted(rank, *arguments)


def fused_experts(rank: int, *arguments) -> None:
    import bridge_ranks
    bridge_ranks.fused_experts(rank, *arguments)


def hybrid(rank: int, *arguments) -> None:
    import hybrid_ranks
    hybrid_ranks.train(rank, *arguments)


def hybrid_less_one(rank: int, *arguments) -> None:
    import hybrid_ranks
    hybrid_ranks.train_less_one(rank, *arguments)
