"""What stands in for the compiled parts of torchvision and torchaudio, which do not load beside a torch that was built for CPUs alone."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.util import find_spec

import torch
from torch import Tensor

_KEPT: list[torch.library.Library] = []


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of boxes that overlap none of a higher score by more, as `torchvision.ops.nms` gives them."""
    order, kept = scores.argsort(descending=True), []
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while order.numel():
        best, order = order[0], order[1:]
        kept.append(best)
        low, high = torch.maximum(boxes[best, :2], boxes[order, :2]), torch.minimum(boxes[best, 2:], boxes[order, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        order = order[shared / (area[best] + area[order] - shared) <= iou_threshold]
    return torch.stack(kept) if kept else order


def put_stubs() -> None:
    """For this process, before anything imports either library; where they load, nothing."""
    if not _loads("torchvision"):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", nms, "CPU")
        _KEPT.append(library)
    if not _loads("torchaudio"):
        extension = types.ModuleType("torchaudio._extension")
        vars(extension).update(_IS_TORCHAUDIO_EXT_AVAILABLE=False, _IS_ALIGN_AVAILABLE=False, fail_if_no_align=lambda function: function)
        sys.modules[extension.__name__] = extension


def _loads(name: str) -> bool:
    """Whether a library loads as it is, or is not there; of one that does not load nothing is left imported."""
    if find_spec(name) is None:
        return True
    try:
        importlib.import_module(name)
    except (RuntimeError, OSError):
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
        return False
    return True
