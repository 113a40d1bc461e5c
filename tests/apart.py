"""A device's memory where there is no device: tensors that lie on the host but are kept apart from the host's.

Through the emulator all tensors are the CPU's, so nothing fails where one of the host meets one of the device, and
nothing tells where the host waits for the device. Under `Apart` both show, as far as torch is called by Python.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from conftest import ROOT
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda")
# These give the host numbers, or a size that depends on numbers.
READS = {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "nonzero", "equal",
         "allclose", "masked_select", "unique"}


class Far(torch.Tensor):
    """A tensor of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Apart(TorchFunctionMode):
    """While it is entered: tensors made for DEVICE, or of such tensors, are Far and say that they lie there.
    AssertionError where one and a tensor of the host (but a single number) are given to one operation; `waits` counts,
    by the function of ours that did it, what makes the host wait until the device has come so far."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __torch_function__(self, function, types, arguments=(), options=None):
        options, name = dict(options or {}), function.__name__
        tensors = list(tensors_in((arguments, options)))
        is_far = any(isinstance(tensor, Far) for tensor in tensors)
        if function == torch.Tensor.device.__get__:
            return DEVICE if is_far else torch.device("cpu")
        if name == "pin_memory":
            assert not is_far, f"{caller()}: only memory of the host can be pinned"
            return arguments[0]
        if name in ("to", "cpu"):
            return self.move(function, arguments, options)
        if name in ("copy_", "__setitem__"):
            return self.write(function, arguments, options)
        if torch.device(options.get("device") or "cpu").type == DEVICE.type:
            options["device"], is_far = "cpu", True
        elif is_far:
            self.look_at(name, tensors)
        if is_far and (name in READS or name == "__getitem__" and chooses(arguments[1])):
            self.wait()
        result = function(*arguments, **options)
        return far(result, arguments) if is_far else result

    def look_at(self, name: str, tensors: list[torch.Tensor]) -> None:
        strange = [tensor for tensor in tensors if not isinstance(tensor, Far) and tensor.dim()]
        assert not strange, f"{caller()}: {name} of the device is given a tensor of the host {tuple(strange[0].shape)}"

    def move(self, function, arguments, options):
        """To another place, another type, or both."""
        subject, *rest = arguments
        given = (*rest, *options.values())
        goal = next((thing for thing in given if isinstance(thing, str | torch.device | torch.Tensor)), subject)
        if isinstance(goal, torch.Tensor):
            goes_far = isinstance(goal, Far) and function is not torch.Tensor.cpu
        else:
            goes_far = torch.device(goal).type == DEVICE.type
        self.pass_over(subject, goes_far, options)
        dtype = next((thing for thing in given if isinstance(thing, torch.dtype)),
                     goal.dtype if isinstance(goal, torch.Tensor) else subject.dtype)
        if goes_far == isinstance(subject, Far) and dtype == subject.dtype:
            return subject
        moved = torch.Tensor.to(subject, dtype, copy=True)
        return far(moved, ()) if goes_far else moved

    def write(self, function, arguments, options):
        """Into a tensor, or a part of it."""
        subject, *where, source = arguments
        if isinstance(subject, Far):
            self.look_at(function.__name__, list(tensors_in(where)))
        self.pass_over(source, isinstance(subject, Far), options)
        return function(*arguments, **options)

    def pass_over(self, source, goes_far: bool, options: dict) -> None:
        """The host waits for a copy to the other side unless it says non_blocking."""
        if isinstance(source, torch.Tensor) and source.dim() and isinstance(source, Far) != goes_far:
            if not options.get("non_blocking"):
                self.wait()

    def wait(self) -> None:
        self.waits[caller()] += 1


def tensors_in(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def chooses(index) -> bool:
    return any(tensor.dtype == torch.bool for tensor in tensors_in(index))


def far(result, arguments):
    """The same tensors as the device's; what was changed in place stays itself."""
    if isinstance(result, torch.Tensor):
        return result if any(result is argument for argument in arguments) else result.as_subclass(Far)
    if isinstance(result, tuple | list):
        parts = [far(part, arguments) for part in result]
        return parts if isinstance(result, list) else type(result)(parts)
    return result


def caller() -> str:
    """The innermost of the project's functions that are at work, as module.function."""
    frame = sys._getframe()
    while Path(frame.f_code.co_filename).parent != ROOT:
        frame = frame.f_back
        if frame is None:
            return "a test"
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
