"""Three small models for the course's data: an MLP and a CNN for digits, a GPT for characters."""

import inspect
import itertools

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Sequential):
    """`depth` hidden layers of `width` ReLU units: x [N, inputs] → logits [N, classes]."""

    def __init__(self, width: int = 256, depth: int = 2, inputs: int = 64, classes: int = 10):
        _check_sizes(width=width, depth=depth, inputs=inputs, classes=classes)
        sizes = [inputs] + depth * [width]
        layers = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(sizes[-1], classes))


class CNN(nn.Module):
    """Two 3×3 convolutions and a linear layer: x [N, 64] or [N, 1, 8, 8] → logits [N, classes].

    Without BatchNorm unless asked for: its statistics are each rank's own, so a DDP run with it
    does not equal one process on the global batch.
    """

    def __init__(self, channels: int = 16, classes: int = 10, batch_norm: bool = False):
        super().__init__()
        _check_sizes(channels=channels, classes=classes)
        norm = nn.BatchNorm2d if batch_norm else lambda _: nn.Identity()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), norm(channels), nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1), norm(2 * channels), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(2 * channels * 4 * 4, classes)

    def forward(self, x):
        return self.head(self.features(x.reshape(len(x), 1, 8, 8)))


class GPT(nn.Module):
    """A decoder-only transformer as in GPT-2: numbers int64 [N, T ≤ context] → logits [N, T, V].

    Learned positions, pre-norm blocks, causal attention, output weights tied to the embedding.
    Layout and initialisation follow nanoGPT (github.com/karpathy/nanoGPT, model.py).
    """

    def __init__(
        self, vocabulary: int, context: int = 64, width: int = 128, layers: int = 2, heads: int = 4
    ):
        super().__init__()
        _check_sizes(
            vocabulary=vocabulary, context=context, width=width, layers=layers, heads=heads
        )
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}.")
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self._initialise(layers)

    def _initialise(self, layers):
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each block adds to the residual stream twice: keep the sum's variance at one.
                depth = 2 * layers if name.endswith("output.weight") else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, numbers):
        length = numbers.shape[1]
        if length > self.context:
            raise ValueError(
                f"{length} characters at once, but this GPT's context is {self.context}."
            )
        positions = torch.arange(length, device=numbers.device)
        x = self.token(numbers) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))


class Block(nn.Module):
    """One transformer layer on x [N, T, width]: attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_input, self.mlp_output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention_output(self.attend(self.attention_norm(x)))
        return x + self.mlp_output(F.gelu(self.mlp_input(self.mlp_norm(x))))

    def attend(self, x):
        """Return for each position a mixture of its own and earlier positions' values."""
        split = self.query_key_value(x).unflatten(2, (3, self.heads, -1))  # [N, T, 3, heads, size]
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [N, heads, T, size]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def parameters_of(model: nn.Module) -> int:
    """Return how many numbers the model learns or holds frozen; a tied weight counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def build(name: str, **sizes) -> nn.Module:
    """Return a new model by name, "mlp", "cnn" or "gpt", with these sizes (see the classes).

    Weights come from torch's global generator: seed it to repeat them. Raises ValueError for an
    unknown name and TypeError for a size that the model does not have or cannot do without.
    """
    models = {"mlp": MLP, "cnn": CNN, "gpt": GPT}
    if name not in models:
        raise ValueError(f"unknown model {name!r}: choose from {', '.join(models)}.")
    signature = inspect.signature(models[name])
    try:
        signature.bind(**sizes)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise TypeError(f"{name}: {error}; its sizes are {known}.") from None
    return models[name](**sizes)


def _check_sizes(**sizes):
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {size!r}.")
