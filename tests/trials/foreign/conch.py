"""Cases of conch-triton-kernels: activations, norms, quantisation, caches, attention of pages, and vision."""

import torch
import torch.nn.functional as F
from conch.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
from conch.ops.activation.silu_and_mul import silu_and_mul
from conch.ops.attention.paged_attention import paged_attention
from conch.ops.attention.varlen_attention import varlen_attention
from conch.ops.embedding.rotary_embedding import rotary_embedding
from conch.ops.normalization.gemma_rms_norm import gemma_rms_norm
from conch.ops.normalization.rms_norm import fused_add_rms_norm, rms_norm
from conch.ops.quantization.bitsandbytes import functional as bits
from conch.ops.quantization.fp8 import scaled_fp8_quant
from conch.ops.quantization.gemm import mixed_precision_gemm, scaled_gemm
from conch.ops.quantization.int8 import scaled_int8_quant
from conch.ops.vision.bev_pool import bev_pool, bev_pool_backward
from conch.ops.vision.nms import nms
from conch.ops.vision.voxelization import VoxelizationParameter, generate_voxels
from conch.ops.vllm.copy_blocks import copy_blocks
from conch.ops.vllm.reshape_and_cache import reshape_and_cache
from conch.reference.vision.bev_pool import bev_pool_backward_pytorch, bev_pool_pytorch

from tests.trials.foreign.case import Cases, pairs

cases = Cases()


def halves(x):
    return x.chunk(2, -1)


@cases.add
def activations():
    x = torch.randn(7, 2 * 33)
    told = pairs(gelu_tanh_and_mul, lambda x: F.gelu(halves(x)[0], approximate="tanh") * halves(x)[1], x)
    return told + pairs(silu_and_mul, lambda x: F.silu(halves(x)[0]) * halves(x)[1], torch.randn(2, 5, 2 * 33))


@cases.add
def norms():
    x, r, w = torch.randn(7, 33), torch.randn(7, 33), torch.randn(33)
    told = pairs(lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (33,), w, 1e-6), x, w)
    told += pairs(lambda x, w: gemma_rms_norm(x.clone(), w, 1e-6), lambda x, w: F.rms_norm(x, (33,), 1 + w, 1e-6), x, w)

    def added(x, r, w):
        return F.rms_norm(x + r, (33,), w, 1e-6), x + r

    return told + pairs(lambda x, r, w: fused_add_rms_norm(x.clone(), r.clone(), w, 1e-6), added, x, r, w)


@cases.add
def rotary():
    where, angles = torch.randint(0, 50, (7,)), torch.rand(50, 16)
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    q, k = torch.randn(7, 4 * 40), torch.randn(7, 2 * 40)

    def turned(x):
        x = x.view(7, -1, 40)
        cos, sin = (f(angles[where].double())[:, None] for f in (torch.cos, torch.sin))
        a, b, rest = x[..., :16], x[..., 16:32], x[..., 32:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).view(7, -1)

    return pairs(
        lambda q, k: rotary_embedding(where, q.clone(), k.clone(), 40, cache), lambda q, k: (turned(q), turned(k)), q, k
    )


@cases.add
def quantised():
    """Triton's interpreter loses a carry where it rounds to float8."""
    x = torch.randn(5, 37)
    whole = scaled_int8_quant(x, torch.tensor([1 / 64]))[0]
    small = scaled_fp8_quant(x, torch.tensor([0.5]))[0].float()
    near = (small - 2 * x).abs() <= 0.13 * (2 * x).abs() + 2e-2
    return [(whole, (x.double() * 64).trunc().clamp(-128, 127)), (near.float().mean() > 0.9, torch.tensor(True))]


@cases.add
def scaled_product():
    return scaled(33, 64, 128)


@cases.add
def scaled_product_of_odd_sizes():
    return scaled(33, 41, 70)


def scaled(m, n, k):
    a, b = (torch.randint(-128, 127, shape, dtype=torch.int8) for shape in ((m, k), (k, n)))
    one, other, bias = torch.rand(m, 1), torch.rand(n, 1), torch.randn(n)
    want = one.double() * (a.double() @ b.double()) * other.double().T + bias
    return [(scaled_gemm(a, b, one, other, torch.float32, bias), want)]


@cases.add
def product_of_4_bits():
    x, q = torch.randn(19, 128, dtype=torch.float16), torch.randint(0, 16, (128, 64), dtype=torch.int32)
    scales = torch.rand(2, 64, dtype=torch.float16)
    packed = sum(q[i::8] << (4 * i) for i in range(8)).to(torch.int32)
    got = mixed_precision_gemm(x, packed, scales, None, 4, 8, 64)
    want = x.double() @ ((q - 8).double() * scales.double().repeat_interleave(64, 0))
    return [(got, want)]


@cases.add
def blockwise_4_bits():
    told = []
    for kind, coarse in (("fp4", 0.17), ("nf4", 0.16)):
        x = torch.randn(640, dtype=torch.float16)
        packed, state = bits.quantize_4bit(x, blocksize=64, quant_type=kind)
        back = bits.dequantize_4bit(packed, state, quant_type=kind)
        largest = x.view(-1, 64).abs().amax(-1, keepdim=True)
        apart = ((back - x).view(-1, 64).abs() / largest).max()
        told += [(state.absmax, largest[:, 0]), (apart < coarse, torch.tensor(True))]
    return told


@cases.add
def caches():
    keys, values = (torch.randn(6, 3 * 16 * 20) for _ in range(2))
    k, v, slots = torch.randn(5, 3, 20), torch.randn(5, 3, 20), torch.tensor([3, 17, -1, 40, 95])
    told = []
    caches = [(torch.randn(6, 16, 3, 20), torch.randn(6, 16, 3, 20)) for _ in range(2)]
    for key, value in caches:
        wanted = key.clone(), value.clone()
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                wanted[0][slot // 16, slot % 16], wanted[1][slot // 16, slot % 16] = k[i], v[i]
        reshape_and_cache(k, v, key, value, slots)
        told += [(key, wanted[0]), (value, wanted[1])]
    mapping, before = torch.tensor([[0, 3], [1, 5]]), keys.clone()
    copy_blocks([keys], [values], mapping)
    before[3], before[5] = before[0], before[1]
    return [*told, (keys, before)]


def paged(lengths, block=16, heads=2, size=32):
    """A cache of pages in a drawn order, the table of each sequence, and its keys and values in order."""
    most = max(-(-n // block) for n in lengths)
    order = torch.randperm(most * len(lengths))
    table = order.view(len(lengths), most).to(torch.int32)
    key, value = (torch.randn(len(order), block, heads, size) for _ in range(2))
    rows = [[c[table[i].long()].flatten(0, 1)[:n] for c in (key, value)] for i, n in enumerate(lengths)]
    return key, value, table, rows


def attended(q, k, v, causal):
    """Attention of [queries, heads, size]; the i-th query sees the first i keys."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * q.shape[-1] ** -0.5
    if causal:
        unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


@cases.add
def attention_of_pages():
    told = []
    for lengths in ((1, 16, 37), (150, 3)):
        key, value, table, rows = paged(lengths)
        q = torch.randn(len(lengths), 4, 32)
        got = paged_attention(q, key, value, table, torch.tensor(lengths, dtype=torch.int32))
        want = torch.cat([attended(q[i : i + 1], *rows[i], False) for i in range(len(lengths))])
        told.append((got, want))
    return told


@cases.add
def attention_of_pages_and_lengths():
    told = []
    for causal in (False, True):
        lengths, new = (5, 16, 37), (5, 3, 20)
        key, value, table, rows = paged(lengths)
        q, bounds = torch.randn(sum(new), 4, 32), torch.tensor([0, 5, 8, 28], dtype=torch.int32)
        got = varlen_attention(
            q, key, value, bounds, max(new), torch.tensor(lengths, dtype=torch.int32), max(lengths), table,
            causal=causal,
        )  # fmt: skip
        told.append((got, torch.cat([attended(part, *r, causal) for part, r in zip(q.split(new), rows, strict=True)])))
    return told


@cases.add
def non_maximum_suppression():
    corners = torch.rand(70, 2) * 10
    boxes = torch.cat((corners, corners + torch.rand(70, 2) * 4), -1)
    scores, kept = torch.rand(70), []
    for i in scores.argsort(descending=True).tolist():
        low = torch.maximum(boxes[kept, :2], boxes[i, :2])
        inner = (torch.minimum(boxes[kept, 2:], boxes[i, 2:]) - low).clamp(min=0).prod(-1)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
        if not (inner / (areas[kept] + areas[i] - inner) > 0.3).any():
            kept.append(i)
    return [(nms(boxes, scores, 0.3), torch.tensor(kept))]


@cases.add
def pooling_of_a_birds_eye_view():
    features = torch.randn(50, 20)
    cells = torch.randint(0, 12, (50,)).sort().values
    where = torch.stack((cells // 4 % 3, cells % 4, torch.zeros_like(cells), torch.zeros_like(cells)), -1)
    starts = torch.cat((torch.tensor([0]), (cells[1:] != cells[:-1]).nonzero()[:, 0] + 1))
    lengths = torch.diff(torch.cat((starts, torch.tensor([50]))))
    plan = where.int(), starts.int(), lengths.int()
    got = bev_pool(features, *plan, 1, 1, 3, 4)
    gradient = torch.randn_like(got)
    return [
        (got, bev_pool_pytorch(features, *plan, 1, 1, 3, 4)),
        (bev_pool_backward(gradient, *plan), bev_pool_backward_pytorch(gradient, *plan)),
    ]


@cases.add
def voxels():
    points = torch.rand(100, 4) * 4
    size = VoxelizationParameter(
        min_range=(0.0, 0.0, 0.0), max_range=(4.0, 4.0, 4.0), voxel_dim=(1.0, 1.0, 4.0), max_num_points_per_voxel=5
    )
    count, *_, filled = generate_voxels(points, size)
    cells = (points[:, 0].floor() * 4 + points[:, 1].floor()).unique(return_counts=True)[1]
    return [(count[0], torch.tensor(len(cells))), (filled[: count[0]].sum(), cells.clamp(max=5).sum())]
