"""Every row's goal: the time of the best peer divided by ours. Within 0.01 (the noise) below counts as reached."""

from __future__ import annotations

from collections.abc import Sequence

NOISE = 0.01
GOALS: dict[str, float] = {
    "gemm 8192x8192x8192": 1.02,
    "gemm 4096x4096x4096": 1.0,
    "gemm 2048x2048x2048": 1.0,
    "gemm 1024x1024x1024": 1.0,
    "gemm 1024x128x32768": 1.15,
    "gemm 32768x128x1024": 1.15,
    "gemm 128x32768x1024": 1.15,
    "gemm tf32 8192 AB": 1.0,
    "gemm tf32 8192 AB^T": 1.0,
    "gemm tf32 8192 A^TB": 1.0,
    "gemm float32 4096": 1.8,
    "linear bias gelu 8192": 1.05,
    "bias relu 16384x8192": 1.0,
    "bias gelu 16384x8192": 1.0,
    "bias sigmoid 16384x8192": 1.0,
    "bias tanh 16384x8192": 1.0,
    "softmax 65536x128": 1.2,
    "softmax 65536x1024": 1.05,
    "softmax 32768x4096": 1.02,
    "softmax 8192x16384": 1.02,
    "softmax 4096x65536": 1.3,
    "softmax 2048x131072": 1.3,
    "cross-entropy forward+backward 8192x32000": 1.4,
    "text training step 1024x65 of 32754, 128 hidden": 4.0,
    "conv 1->12 7x7 72x72": 5.0,
    "conv 12->24 7x7 33x33": 3.0,
    "conv 1->32 5x5 28x28": 2.5,
    "conv 32->64 5x5 12x12": 1.1,
    "conv 3x3 64@56": 1.15,
    "conv 3x3 128@28": 1.02,
    "conv 3x3 256@14": 1.05,
    "conv 3x3 512@7": 1.12,
    "conv 3x3 256@56": 1.03,
    "conv 3x3 64@56 gradient of the input": 1.05,
    "conv 3x3 128@28 gradient of the input": 1.05,
    "conv 3x3 256@14 gradient of the input": 1.05,
    "conv 3x3 512@7 gradient of the input": 1.05,
    "conv 3x3 256@56 gradient of the input": 1.05,
    "conv 3x3 64@56 gradient of the weight": 1.2,
    "conv 3x3 128@28 gradient of the weight": 1.1,
    "conv 3x3 256@14 gradient of the weight": 1.2,
    "conv 3x3 512@7 gradient of the weight": 1.02,
    "conv 3x3 256@56 gradient of the weight": 1.0,
    "conv 1->12 7x7 72x72 gradient of the weight": 2.5,
    "conv 12->24 7x7 33x33 gradient of the weight": 2.0,
    "conv 1->32 5x5 28x28 gradient of the weight": 2.0,
    "conv 32->64 5x5 12x12 gradient of the weight": 1.1,
    "max pool 2x2 forward+backward 10000x32x24x24": 1.0,
    "average pool 2x2 forward+backward 10000x32x24x24": 1.0,
    "batch norm + relu training forward+backward 1000x64x32x32": 1.2,
    "cnn inference 10000 images": 3.0,
    "cnn training step batch 512 tf32": 2.5,
    "transposed 5x5 stride 2 512->256@4": 1.15,
    "transposed 5x5 stride 2 256->128@8": 1.15,
    "transposed 5x5 stride 2 128->64@16": 1.15,
    "transposed 5x5 stride 2 64->3@32": 6.0,
    "dcgan generation 1000 images float16": 1.8,
    "dcgan generation 1000 images tf32": 1.8,
    "dcgan generation 1000 images float32": 1.8,
}


def chosen(words: Sequence[str]) -> list[str]:
    """The rows whose name contains one of `words`; all rows without words. Raises ValueError for an unmatched word."""
    for word in words:
        if not word or not any(word in name for name in GOALS):
            raise ValueError(f"no row's name contains {word!r}; `minidl bench --list` shows them")
    return [name for name in GOALS if not words or any(word in name for word in words)]
