"""Random trees of new tokens, parents before children, and what model.Batch says of them."""

import torch


def random_paths(num: int, picks: torch.Generator, near: int = 6) -> list[list[int]]:
    """For each of `num` new tokens those that it sees, itself the last. Parents are among the `near` before a token."""
    paths = [[0]]
    for i in range(1, num):
        parent = int(torch.randint(max(0, i - near), i, (), generator=picks))
        paths.append([*paths[parent], i])
    return paths


def ancestors(paths: list[list[int]]) -> torch.Tensor:
    """Batch.ancestors_T of these tokens."""
    numbers = [sum(1 << i for i in path) for path in paths]
    return torch.tensor([number - 2**64 if number >= 2**63 else number for number in numbers])


def in_window(place_L: list, window: int) -> list:
    return place_L[-window:] if window else place_L
