"""What the exercises on fp16 share: a model and a scaler that note how they are used."""

import torch
from torch import nn

# Of weights: a last bit more or less in float32 can round a 16-bit copy to its other neighbour,
# 0.1 % away, and from there on gradients differ by as much.
ALLOWED = 0.01

TWICE = "unscale_ belongs once into a step: first unscale_, then everything that needs gradients."
NO_UPDATE = "update() is missing: it ends a step, and adapts the scale for the next."
TOO_LATE = "The step comes after all that needs gradients: unscale_, clip, step."
HINTS = {  # what PyTorch says: what it means
    "unscale FP16 gradients": "The weights were cast to fp16, and so their gradients are: leave "
    "the model in fp32, and let autocast make the 16-bit copies.",
    "No inf checks": "Nobody has looked for inf: update() without unscale_ or scaler.step before "
    "it, or gradients that were cleared too early.",
}


class Watch(nn.Module):
    """Passes logits on, and notes their type and whether their backward ran under autocast."""

    def __init__(self):
        super().__init__()
        self.types, self.backward = [], []

    def forward(self, logits):
        self.types.append(str(logits.dtype).removeprefix("torch."))
        if logits.requires_grad:
            logits.register_hook(self._in_backward)
        return logits

    def _in_backward(self, gradient):
        self.backward.append(torch.is_autocast_enabled("cpu"))

    def notes(self) -> dict:
        """Return what was noted, as plain data."""
        return {"types": sorted(set(self.types)), "autocast_in_backward": any(self.backward)}


class Scaler(torch.amp.GradScaler):
    """PyTorch's, with a log of what was called: it only helps to name a mistake."""

    def __init__(self, scale: float, growth_interval: int):
        super().__init__("cpu", init_scale=scale, growth_interval=growth_interval)
        self.log = []
        self.scale(torch.ones(()))  # a scaler makes its scale at the first use
        self.log.clear()

    def scale(self, outputs):
        self.log.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer):
        self.log.append("unscale_")
        return super().unscale_(optimizer)

    def step(self, optimizer, *arguments, **options):
        self.log.append("step")
        return super().step(optimizer, *arguments, **options)

    def update(self, new_scale=None):
        self.log.append("update")
        return super().update(new_scale)


def classifier(seed: int, frozen: bool = False) -> nn.Sequential:
    """Return an MLP, 6 inputs to 3 classes, with a Watch as its last layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), Watch())
    model[0].requires_grad_(not frozen)
    return model


def weights(model) -> torch.Tensor:
    """Return all weights as one float32 vector."""
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def close(mine: torch.Tensor, wanted: torch.Tensor, start: torch.Tensor) -> bool:
    """Say whether weights are where they should be, up to ALLOWED of the way from `start`."""
    most = (mine - wanted).abs().nan_to_num(nan=torch.inf).max()
    return bool(most <= ALLOWED * (wanted - start).abs().max() + 1e-7)


def add_hint(error: Exception, log: list[str]) -> None:
    """Add to an error of the scaler what it means; `log` is the scaler's."""
    text = str(error)
    since = log[len(log) - log[::-1].index("update") :] if "update" in log else log
    stepped = since[since.index("step") :] if "step" in since else []
    if "since the last update" in text:
        error.add_note(NO_UPDATE if stepped else TWICE)
    if "called after step()" in text:
        error.add_note(NO_UPDATE if "scale" in stepped else TOO_LATE)
    for said, hint in HINTS.items():
        if said in text:
            error.add_note(hint)


def plain(value):
    """Return a number, True, False or None as plain data, of anything else what it is."""
    if value is None or type(value) in (bool, int, float):
        return value
    try:
        value = getattr(value, "detach", lambda: value)()
        return bool(value) if "bool" in str(getattr(value, "dtype", "")) else float(value)
    except Exception:
        return f"a {type(value).__name__}"


def types_wrong(notes: dict) -> str | None:
    """Say what is wrong with where autocast was, from the notes of a Watch, or None."""
    if not notes["types"]:
        return "the model was never called."
    if notes["types"] != ["float16"]:
        return (
            f"the model's outputs are {' and '.join(notes['types'])}, not float16: every forward "
            'belongs under torch.amp.autocast("cpu", dtype=torch.float16).'
        )
    if notes["autocast_in_backward"]:
        return (
            "backward runs under autocast: only forward and loss belong inside the `with`; "
            "backward takes the types of the forward by itself."
        )
    return None
