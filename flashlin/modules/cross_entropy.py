"""Losses over a vocabulary as modules; mirrors ``fla.modules``. They have no parameters."""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from flashlin.guards import scalars
from flashlin.guards.tensors import check_dense, check_floats
from flashlin.ops.cross_entropy import counted, cross_entropy_loss, fused_linear_cross_entropy_loss


@dataclass(eq=False, repr=False)  # nn.Module defines equality and repr
class FusedCrossEntropyLoss(nn.Module):
    """The reduced cross entropy of logits, computed by ``cross_entropy_loss``.

    Drop-in for ``fla.modules.FusedCrossEntropyLoss``. The arguments that are not listed have the meaning that
    they have in ``cross_entropy_loss``.

    reduction: ``mean`` over the rows whose target is not ignored, ``sum``, or ``none``. Any other value
        raises NotImplementedError.
    return_z_loss: also return z_loss, with the same reduction.

    If every row is ignored, the mean is 0 and its gradient is 0. fla and torch return NaN, so a single batch
    without labels ends a training run.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    lse_square_scale: float = 0.0
    logit_softcapping: float | None = None
    inplace_backward: bool = False
    process_group: Any = None
    return_z_loss: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        if self.reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(f"reduction: got {self.reduction!r}, need 'mean', 'sum' or 'none'")

    def extra_repr(self) -> str:
        """Return the main options for torch's printed form of the module."""
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"

    def forward(self, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the float32 loss of logits ``input`` [N, V] and ``target`` [N].

        The loss is a scalar, or [N] with the reduction ``none``. With return_z_loss the result is (loss,
        z_loss).
        """
        loss, z_loss = cross_entropy_loss(input, target, self.label_smoothing, self.logit_scale,
                                          self.lse_square_scale, self.logit_softcapping, self.ignore_index,
                                          self.inplace_backward, self.process_group)
        if self.reduction != "none":
            loss, z_loss = loss.sum(), z_loss.sum()
        if self.reduction == "mean":
            rows = counted(target, input.shape[1], self.ignore_index)
            loss, z_loss = loss / rows, z_loss / rows
        return (loss, z_loss) if self.return_z_loss else loss


@dataclass(eq=False, repr=False)
class FusedLinearCrossEntropyLoss(nn.Module):
    """The cross entropy of a linear layer's output, computed in pieces.

    The whole output [N, V] is never in memory. It calls ``fused_linear_cross_entropy_loss`` and has the same
    arguments. Drop-in for ``fla.modules.FusedLinearCrossEntropyLoss``.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    logit_softcapping: float | None = None
    num_chunks: int = 8
    reduction: str = "mean"
    use_l2warp: bool = False
    l2_penalty_factor: float = 1e-4
    accumulate_grad_in_fp32: bool = True
    process_group: Any = None

    def __post_init__(self) -> None:
        super().__init__()
        scalars.choice("reduction", self.reduction, ("mean", "sum"), "'mean' or 'sum'")

    def extra_repr(self) -> str:
        """Return the main options for torch's printed form of the module."""
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, num_chunks={self.num_chunks}"

    def forward(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the loss of x [..., D] and target [...] as a float32 scalar.

        target: has x's shape without D. weight: [V, D]. bias: [V] or None.
        """
        check_floats("x", x, "[..., D]")
        check_dense("target", target, "an int32 or int64 tensor of x's shape without D")
        if x.ndim:
            if target.shape != x.shape[:-1]:
                raise ValueError(f"target: got shape {list(target.shape)}, need x's without its last "
                                 f"dimension, {list(x.shape[:-1])}")
            x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        options = {name: getattr(self, name) for name in _OPTIONS_OF_LINEAR}
        return fused_linear_cross_entropy_loss(x, target, weight, bias, **options)


_OPTIONS_OF_LINEAR = tuple(field.name for field in fields(FusedLinearCrossEntropyLoss))
