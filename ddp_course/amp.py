"""Mixed precision: autocast, the loss scaler, and what happened in each step.

    amp = MixedPrecision("fp16", device, max_norm=1.0)
    with amp.autocast():
        loss = F.cross_entropy(model(x), y)
    amp.backward(loss)
    result = amp.step(optimizer)    # loss_scale, skipped, grad_norm

is the same code in all three precisions, on CPU and GPU, with DDP and without.
"""

import math
import warnings
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd as _Convolution

PRECISIONS = ("fp32", "bf16", "fp16")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LOST = (
    "the loss scale fell below 1: step after step overflows in fp16 and is skipped, so nothing "
    "is learned. Look for inf or nan in the data and the loss, lower the learning rate, or use "
    "bf16 or fp32."
)


class StepResult(NamedTuple):
    """What one call of `MixedPrecision.step` did."""

    loss_scale: float  # the factor the loss was multiplied by for this step; 1.0 without a scaler
    skipped: bool  # a gradient was inf or nan in fp16: weights unchanged, scale halved
    grad_norm: float  # L2, after unscaling and before clipping; not finite when skipped


class MixedPrecision:
    """Run forward, backward and step in "fp32", "bf16" or "fp16", the model's weights in float32.

    fp16 scales the loss (its smallest number is 6e-8, gradients are often smaller); bf16 has
    float32's range and needs no scaler. `max_norm` clips the gradients' global norm. One object for
    one optimizer; ranks stay in step because DDP's averaged gradient, inf included, is the same on
    all.

    Raises ValueError for a wrong argument and for a precision that the device cannot do,
    RuntimeError for "cuda" without a GPU. Warns when a GPU only emulates bf16.
    """

    def __init__(
        self,
        precision: str = "fp32",
        device: str | torch.device = "cpu",
        max_norm: float | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
    ):
        if max_norm is not None and not _is_positive(max_norm):
            raise ValueError(f"max_norm must be above 0, or None (no clipping), not {max_norm!r}.")
        if not _is_positive(init_scale):
            raise ValueError(f"init_scale must be above 0 and finite, not {init_scale!r}.")
        if not _is_positive(growth_interval) or int(growth_interval) != growth_interval:
            raise ValueError(f"growth_interval must be a number of steps, not {growth_interval!r}.")
        self.device = torch.device(device)
        check_device(precision, self.device)
        self.precision, self.max_norm = precision, max_norm
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=float(init_scale),
            growth_interval=int(growth_interval),
            enabled=precision == "fp16",
        )
        self.history: list[StepResult] = []
        self._ready = self._warned = False

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError if this model cannot, or had better not, run in this precision here."""
        fine = (torch.float32, torch.float64) if self.precision == "fp32" else (torch.float32,)
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype not in fine:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}: leave the model in float32, without "
                    ".half() or .to(dtype); autocast casts copies for the operations that gain."
                )
        on_cpu = (self.precision, self.device.type) == ("fp16", "cpu")
        if on_cpu and any(isinstance(module, _Convolution) for module in model.modules()):
            raise ValueError(
                "fp16 convolutions on a CPU are many times slower than fp32: use "
                "precision 'bf16' or 'fp32', or a model without convolutions (mlp, gpt)."
            )

    def autocast(self):
        """Return the context manager for forward and loss, not for backward; none in fp32."""
        return torch.amp.autocast(
            self.device.type, dtype=_DTYPES[self.precision], enabled=self.precision != "fp32"
        )

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of the scaled loss to `.grad`; call it for every micro-batch."""
        self.scaler.scale(loss).backward()
        self._ready = True

    def step(self, optimizer: torch.optim.Optimizer) -> StepResult:
        """Unscale, clip, step unless a gradient is inf or nan (fp16), update the scale, zero_grad.

        Call it once a window, on every rank. The learning-rate schedule must not advance when the
        result is `skipped`. Warns once if the loss scale falls below 1. Raises RuntimeError if
        there is no gradient, or none from `backward`.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._check_gradients(parameters)
        loss_scale = self.scaler.get_scale()
        self.scaler.unscale_(optimizer)  # first, so that norm and clipping see the true gradients
        grad_norm = self._clip(parameters)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        self._ready = False
        # A scaler lowers its scale exactly when it skips; at 0, where it ends, it cannot any more.
        skipped = self.scaler.get_scale() < loss_scale or loss_scale == 0
        self.history.append(StepResult(loss_scale, skipped, grad_norm))
        if self.scaler.get_scale() < 1 and skipped and not self._warned:
            self._warned = True
            warnings.warn(LOST, stacklevel=2)
        return self.history[-1]

    def _check_gradients(self, parameters):
        if not self._ready:
            raise RuntimeError(
                "no amp.backward(loss) since the last step: call it instead of loss.backward()."
            )
        if all(parameter.grad is None for parameter in parameters):
            raise RuntimeError(
                "no parameter of this optimizer has a gradient: was it made for another model?"
            )

    def _clip(self, parameters) -> float:
        if self.max_norm is not None:
            return torch.nn.utils.clip_grad_norm_(parameters, self.max_norm).item()
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()

    def state_dict(self) -> dict:
        """Return what a resume needs: the precision and the scaler's state, not the history."""
        return {"precision": self.precision, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Take over a saved state. Raises ValueError if it is that of another precision."""
        if state["precision"] != self.precision:
            raise ValueError(
                f"saved with precision {state['precision']!r}, this run uses {self.precision!r}: "
                "resume with the same precision."
            )
        self.scaler.load_state_dict(state["scaler"])


def check_device(precision: str, device: torch.device) -> None:
    """Raise or warn, in one line, if the device cannot run this precision: a small matmul tells."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: choose from {', '.join(PRECISIONS)}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device 'cuda' was asked for, but PyTorch sees no GPU here: use 'cpu'.")
    if precision == "fp32":
        return
    if device.type not in ("cpu", "cuda") or not _autocast_works(precision, device):
        raise ValueError(f"{precision} does not work on {device} with this PyTorch: use 'fp32'.")
    native = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bf16" and not native:
        name = torch.cuda.get_device_name(device)
        warnings.warn(f"{name} emulates bf16: right results, but slow; fp16 is fast.", stacklevel=3)


def _is_positive(number) -> bool:
    return isinstance(number, int | float) and 0 < number < math.inf


def _autocast_works(precision, device) -> bool:
    # Which types autocast takes on a CPU differs by release, and it disables itself with a warning.
    try:
        with warnings.catch_warnings(), torch.amp.autocast(device.type, dtype=_DTYPES[precision]):
            warnings.simplefilter("ignore")
            square = torch.ones(2, 2, device=device)
            return (square @ square).dtype == _DTYPES[precision]
    except RuntimeError:
        return False
