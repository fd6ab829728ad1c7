"""Distribution of an engine's ranks over pods: as few pods as hold them, all alike, and no rank left over."""

from __future__ import annotations

from dataclasses import dataclass

from trtpipe.engines.errors import UsageError


@dataclass(frozen=True)
class Placement:
    """`pods` pods with `ranks` ranks each, in the order of the ranks. A rank has a GPU of its own."""

    pods: int
    ranks: int


def place(tp_size: int, pp_size: int, gpus_per_node: int) -> Placement:
    """One pod when a node has GPUs for all ranks, else as few as possible. Raises UsageError when no division fits.

    Ranks of one pipeline stage are consecutive and talk in every layer, those of two stages once a step. So a pod
    holds whole stages where a node can, and a stage that is wider than a node takes whole nodes.
    """
    world = tp_size * pp_size
    if world <= gpus_per_node:
        return Placement(1, world)
    if tp_size <= gpus_per_node:
        stages = max(
            count for count in range(1, pp_size + 1) if pp_size % count == 0 and tp_size * count <= gpus_per_node
        )
        return Placement(pp_size // stages, tp_size * stages)
    if tp_size % gpus_per_node:
        raise UsageError(
            f"tensor parallelism of {tp_size} does not fit nodes of {gpus_per_node} GPUs",
            why="it fills no whole number of nodes",
            remedy=f"build with a tp_size that {gpus_per_node} divides, or with a smaller one and more pp_size",
        )
    return Placement(world // gpus_per_node, gpus_per_node)
