"""What works in a student's tree until the student's own answer passes."""

from collections.abc import Sequence


def even_cut(costs: Sequence, stages: int) -> list[int]:
    """As many layers in each stage as in the others, the first ones one more; costs don't count."""
    layers = len(costs)
    if not hasattr(stages, "__index__") or not 1 <= stages <= layers:
        raise ValueError(f"stages={stages!r}: legal are 1 to {layers}, the number of layers")
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]
