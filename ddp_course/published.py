"""How large models were really trained: sizes and parallelism as their papers print them.

Both used 80 GB GPUs, eight to a node. What the chooser of `strategy` is checked against.
"""

from dataclasses import dataclass

from .strategy import FP32_GRADIENTS, MEGATRON_FP16


@dataclass(frozen=True)
class Published:
    """A run as published: `given` are the arguments of `strategy.choose`, the rest its choice."""

    name: str
    given: dict
    tensor: int
    pipeline: int
    context: int = 1

    @property
    def data(self) -> int:
        return self.given["gpus"] // (self.tensor * self.pipeline * self.context)

    @property
    def model_parallel(self) -> int:
        return self.tensor * self.pipeline


# D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM", SC21, table 1: 10⁹ parameters, heads, width, layers, tensor, pipeline, GPUs, batch.
# Context 2048; fp16, activations recomputed, no ZeRO.
_MEGATRON = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512),
    (3.6, 32, 3072, 30, 2, 1, 64, 512),
    (7.5, 32, 4096, 36, 4, 1, 128, 512),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536),
    (76.1, 80, 10_240, 60, 8, 4, 1024, 1792),
    (145.6, 96, 12_288, 80, 8, 8, 1536, 2304),
    (310.1, 128, 16_384, 96, 8, 16, 1920, 2160),
    (529.6, 128, 20_480, 105, 8, 35, 2520, 2520),
    (1008.0, 160, 25_600, 128, 8, 64, 3072, 3072),
)
MEGATRON = tuple(
    Published(
        f"Megatron-LM {billions:g} B",
        {"parameters": billions * 1e9, "heads": heads, "width": width, "layers": layers,
         "context": 2048, "global_batch": batch, "gpus": gpus, "bytes_each": MEGATRON_FP16,
         "sharding": False},
        tensor, pipeline,
    )
    for billions, heads, width, layers, tensor, pipeline, gpus, batch in _MEGATRON
)  # fmt: skip

# A. Grattafiori et al., "The Llama 3 Herd of Models", 2024, tables 3 and 4: 405 B parameters, 16 M
# tokens a batch on H100s; bf16, gradients added up in fp32 (section 3.3.2).
_LLAMA = {"parameters": 405e9, "layers": 126, "width": 16_384, "heads": 128,
          "bytes_each": FP32_GRADIENTS}  # fmt: skip
LLAMA = tuple(
    Published(
        f"Llama 3 405 B, {gpus:,} GPUs, context {tokens:,}",
        {**_LLAMA, "gpus": gpus, "context": tokens, "global_batch": 2**24 // tokens},
        tensor=8,
        pipeline=16,
        context=context,
    )
    for gpus, tokens, context in ((8192, 8192, 1), (16_384, 8192, 1), (16_384, 131_072, 16))
)
