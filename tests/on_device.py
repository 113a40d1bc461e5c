"""Operations on a device behind operations on CPU tensors, so that a test written for one serves the other."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import torch

from gpu import Cuda, Packed


class OnDevice:
    """Every call's tensors are copied to the device, and back: what a call changes is changed here, too."""

    def __init__(self, ops: Cuda):
        self.ops = ops

    def __getattr__(self, name: str) -> Callable:
        def call(*arguments):
            sent: list[tuple[torch.Tensor, torch.Tensor]] = []
            result = getattr(self.ops, name)(*(self.there(argument, sent) for argument in arguments))
            for here, there in sent:
                here.copy_(there)
            return here_of(result)

        return call

    def there(self, value, sent: list):
        if isinstance(value, torch.Tensor):
            sent.append((value, value.to(self.ops.device, copy=True)))
            return sent[-1][1]
        if isinstance(value, Packed):
            return value
        if isinstance(value, SimpleNamespace):
            return SimpleNamespace(**{name: self.there(part, sent) for name, part in vars(value).items()})
        if is_dataclass(value):
            return replace(value, **{part.name: self.there(getattr(value, part.name), sent) for part in fields(value)})
        if isinstance(value, tuple | list):
            return type(value)(self.there(part, sent) for part in value)
        return value


def here_of(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if is_dataclass(value) and not isinstance(value, Packed):
        return replace(value, **{field.name: here_of(getattr(value, field.name)) for field in fields(value)})
    return tuple(map(here_of, value)) if isinstance(value, tuple) else value
