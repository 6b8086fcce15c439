"""Cases of liger-kernel: losses, norms, activations, embeddings, attention and mixtures of experts."""

import torch
import torch.nn.functional as F
from liger_kernel import ops
from liger_kernel.ops import dyt as asking
from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction
from liger_kernel.ops.experimental.mm_int8int2 import matmul, pack_weights
from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction

from tests.trials.foreign.case import Cases, graded, pairs
from tests.trials.foreign.shim import pretend_gpu

pretend_gpu()
asking.infer_device = lambda: "cuda"
cases = Cases()


def rms(x, w, eps=1e-6, offset=0.0):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (w + offset)


def mean_of(losses, labels, ignored=-100):
    kept = labels != ignored
    return torch.where(kept, losses, torch.zeros_like(losses)).sum() / kept.sum().clamp(min=1)


@cases.add
def cross_entropy():
    labels = torch.randint(0, 37, (11,))
    labels[[0, 4]] = -100
    return graded(
        lambda x: ops.LigerCrossEntropyFunction.apply(x, labels, None)[0],
        lambda x: F.cross_entropy(x, labels),
        torch.randn(11, 37),
    )


@cases.add
def cross_entropy_of_everything():
    labels, weight = torch.randint(0, 100, (2, 7)).view(-1), torch.rand(100) + 0.1
    labels[3] = 5

    def reference(x):
        x = 5 * torch.tanh(x / 5)
        return F.cross_entropy(x, labels, weight.to(x.dtype), ignore_index=5, label_smoothing=0.1)

    return graded(
        lambda x: ops.LigerCrossEntropyFunction.apply(x, labels, weight, 5, 0.0, 0.1, "mean", 5.0)[0],
        reference,
        torch.randn(14, 100),
    )


@cases.add
def cross_entropy_with_z_loss_and_accuracy():
    labels = torch.randint(0, 129, (6,))
    x = torch.randn(6, 129)
    loss, z, accuracy, predicted = ops.LigerCrossEntropyFunction.apply(
        x.clone().requires_grad_(), labels, None, -100, 1e-2, 0.0, "mean", None, True, True, True
    )
    squares = 1e-2 * x.double().logsumexp(-1).square().mean()
    right = (x.argmax(-1) == labels).float().mean()
    wanted = F.cross_entropy(x.double(), labels) + squares
    return [(loss, wanted), (z, squares), (accuracy, right), (predicted, x.argmax(-1))]


@cases.add
def cross_entropy_of_each_in_strided_rows():
    labels = torch.randint(0, 33, (5,))
    return graded(
        lambda x: ops.LigerCrossEntropyFunction.apply(x[:, ::2], labels, None, -100, 0.0, 0.0, "none")[0],
        lambda x: F.cross_entropy(x[:, ::2], labels, reduction="none"),
        torch.randn(5, 66),
    )


@cases.add
def fused_linear_cross_entropy():
    labels = torch.randint(0, 29, (9,))
    labels[2] = -100
    return graded(
        lambda x, w, b: ops.LigerFusedLinearCrossEntropyFunction.apply(x, w, labels, b)[0],
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), labels),
        torch.randn(9, 24), torch.randn(29, 24), torch.randn(29),
    )  # fmt: skip


@cases.add
def fused_linear_jsd():
    teacher, weight = torch.randn(6, 20), torch.randn(31, 20)

    def reference(x, w):
        p, q = F.log_softmax(x @ w.T, -1), F.log_softmax((teacher @ weight.T).to(x.dtype), -1)
        m = (p.exp() + q.exp()) / 2
        return ((p.exp() * (p - m.log()) + q.exp() * (q - m.log())) / 2).sum() / len(x)

    return graded(
        lambda x, w: ops.LigerFusedLinearJSDFunction.apply(x, w, teacher, weight, None, 0.5),
        reference, torch.randn(6, 20), torch.randn(31, 20),
    )  # fmt: skip


@cases.add
def fused_linear_kl_div():
    target = torch.randn(6, 31).softmax(-1)
    return graded(
        lambda x, w: ops.LigerFusedLinearKLDivFunction.apply(x, w, target),
        lambda x, w: F.kl_div(F.log_softmax(x @ w.T, -1), target.to(x.dtype), reduction="batchmean"),
        torch.randn(6, 20), torch.randn(31, 20),
    )  # fmt: skip


@cases.add
def jsd():
    target, labels = torch.randn(7, 41).log_softmax(-1), torch.randint(0, 41, (7,))
    labels[1] = -100

    def reference(x):
        x, y = F.log_softmax(x, -1), target.to(x.dtype)
        m = 0.3 * y.exp() + 0.7 * x.exp()
        rows = (0.3 * y.exp() * (y - m.log()) + 0.7 * x.exp() * (x - m.log())).sum(-1)
        return mean_of(rows, labels)

    return graded(
        lambda x: ops.LigerJSDFunction.apply(F.log_softmax(x, -1), target, labels, 0.3), reference, torch.randn(7, 41)
    )


@cases.add
def jsd_that_is_a_kl_div():
    target = torch.randn(5, 300).log_softmax(-1)
    return graded(
        lambda x: ops.LigerJSDFunction.apply(F.log_softmax(x, -1), target, None, 0.0),
        lambda x: F.kl_div(F.log_softmax(x, -1), target.to(x.dtype), reduction="batchmean", log_target=True),
        torch.randn(5, 300),
    )


@cases.add
def kl_div():
    target = torch.randn(4, 53).softmax(-1)
    told = []
    for how in ("batchmean", "sum", "mean", "none"):
        told += graded(
            lambda x, how=how: ops.LigerKLDivLossFunction.apply(F.log_softmax(x, -1), target, how),
            lambda x, how=how: F.kl_div(F.log_softmax(x, -1), target.to(x.dtype), reduction=how),
            torch.randn(4, 53),
        )
    return told


@cases.add
def tvd():
    q, labels = torch.randn(6, 45).softmax(-1), torch.randint(0, 45, (6,))
    labels[3] = -100
    return graded(
        lambda p: ops.LigerTVDLossFunction.apply(p, q, labels, "batchmean"),
        lambda p: mean_of((p - q.to(p.dtype)).abs().sum(-1) / 2, labels),
        torch.randn(6, 45).softmax(-1),
    )


@cases.add
def fused_ce_tvd():
    teacher, labels = torch.randn(6, 45), torch.randint(0, 45, (6,))
    labels[3] = -100

    def reference(x):
        apart = (x.softmax(-1) - teacher.to(x.dtype).softmax(-1)).abs().sum(-1) / 2
        kept = labels != -100
        return F.cross_entropy(x, labels, reduction="none"), torch.where(kept, apart, torch.zeros_like(apart))

    return graded(lambda x: ops.LigerFusedCETVDFunction.apply(x, teacher, labels), reference, torch.randn(6, 45))


@cases.add
def rms_norm():
    told = []
    for shape in ((3, 5, 33), (2, 64), (1, 7)):
        told += graded(
            lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False), rms,
            torch.randn(shape), torch.randn(shape[-1]),
        )  # fmt: skip
    return told


@cases.add
def rms_norm_of_gemma_in_place():
    return graded(
        lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma", True),
        lambda x, w: rms(x, w, offset=1.0), torch.randn(4, 40), torch.randn(40),
    )  # fmt: skip


@cases.add
def rms_norm_by_blocks():
    """Many short rows: several of them to a program."""
    return graded(
        lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False, False), rms,
        torch.randn(4096 * 8 + 3, 9), torch.randn(9),
    )  # fmt: skip


@cases.add
def fused_add_rms_norm():
    def reference(x, r, w):
        return rms(x + r, w), x + r

    return graded(
        lambda x, r, w: ops.LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6), reference,
        torch.randn(2, 5, 33), torch.randn(2, 5, 33), torch.randn(33),
    )  # fmt: skip


@cases.add
def modulated_rms_norm():
    return graded(
        lambda x, w, s, t: ops.LigerModulatedRMSNormFunction.apply(x, w, s, t, 1e-6, 0.0, "llama", False),
        lambda x, w, s, t: rms(x, w) * (1 + s[:, None]) + t[:, None],
        torch.randn(2, 3, 33), torch.randn(33), torch.randn(2, 33), torch.randn(2, 33),
    )  # fmt: skip


@cases.add
def layer_norm():
    return graded(
        lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (77,), w, b, 1e-5),
        torch.randn(3, 4, 77), torch.randn(77), torch.randn(77),
    )  # fmt: skip


@cases.add
def group_norm():
    return graded(
        lambda x, w, b: ops.LigerGroupNormFunction.apply(x, w, b, 6, 2, 1e-5),
        lambda x, w, b: F.group_norm(x, 2, w, b, 1e-5),
        torch.randn(3, 6, 35), torch.randn(6), torch.randn(6),
    )  # fmt: skip


@cases.add
def poly_norm():
    def reference(x, w, b):
        def unit(y):
            return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)

        return w[0] * unit(x**3) + w[1] * unit(x**2) + w[2] * unit(x) + b

    return graded(
        lambda x, w, b: ops.LigerPolyNormFunction.apply(x, w, b, 1e-6, False), reference,
        torch.randn(5, 39), torch.randn(3), torch.randn(()),
    )  # fmt: skip


@cases.add
def dyt():
    return graded(
        ops.LigerDyTFunction.apply, lambda x, a, g, b: torch.tanh(a * x) * g + b,
        torch.randn(3, 5, 50), torch.randn(1), torch.randn(50), torch.randn(50),
    )  # fmt: skip


@cases.add
def dyt_without_beta():
    return graded(
        lambda x, a, g: ops.LigerDyTFunction.apply(x, a, g, None), lambda x, a, g: torch.tanh(a * x) * g,
        torch.randn(7, 50), torch.randn(1), torch.randn(50),
    )  # fmt: skip


@cases.add
def activations():
    def gelu(a, b):
        return F.gelu(a, approximate="tanh") * b

    def silu(a, b):
        return F.silu(a) * b

    told = []
    for shape in ((3, 5, 33), (1, 1), (0, 8)):
        a, b = torch.randn(shape), torch.randn(shape)
        told += graded(ops.LigerGELUMulFunction.apply, gelu, a, b)
        told += graded(ops.LigerSiLUMulFunction.apply, silu, a, b)
        told += graded(ops.LigerReLUSquaredFunction.apply, lambda x: F.relu(x).square(), a)
    return told


@cases.add
def silu_in_tiles_and_of_strided_halves():
    def silu(y):
        a, b = y.chunk(2, -1)
        return F.silu(a) * b

    whole = torch.randn(2, 2 * 9000)
    return graded(lambda y: ops.LigerSiLUMulFunction.apply(*y.chunk(2, -1)), silu, whole) + graded(
        ops.LigerFusedGateUpSiLUMulFunction.apply, silu, torch.randn(15, 66)
    )


@cases.add
def softmax():
    told = []
    for shape in ((4, 37), (2, 3, 128), (2, 5000)):
        told += graded(ops.LigerSoftmaxFunction.apply, lambda x: x.softmax(-1), torch.randn(shape))
    return told


@cases.add
def sparsemax():
    def reference(x):
        ordered = x.sort(-1, descending=True).values
        sums, k = ordered.cumsum(-1), torch.arange(1, x.shape[-1] + 1)
        support = ((1 + k * ordered) > sums).sum(-1, keepdim=True)
        return (x - (sums.gather(-1, support - 1) - 1) / support).clamp(min=0)

    return graded(lambda x: ops.LigerSparsemaxFunction.apply(x, -1), reference, torch.randn(5, 43))


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def waves(*shape):
    angles = torch.rand(*shape[:-1], shape[-1] // 2)
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


@cases.add
def rope():
    cos, sin = waves(1, 7, 24)

    def reference(q, k):
        return turned(q, cos[:, None].double(), sin[:, None].double()), turned(k, cos[:, None], sin[:, None])

    return graded(
        lambda q, k: ops.LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin), reference,
        torch.randn(2, 3, 7, 24), torch.randn(2, 1, 7, 24),
    )  # fmt: skip


@cases.add
def rope_of_a_part_in_transposed_heads():
    cos, sin = waves(2, 5, 8)

    def reference(q, k):
        c, s = cos[:, None].double(), sin[:, None].double()
        return tuple(torch.cat((turned(x[..., :8], c, s), x[..., 8:]), -1) for x in (q, k))

    return graded(
        lambda q, k: ops.LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin, None, 1, 8), reference,
        torch.randn(2, 5, 3, 20).transpose(1, 2), torch.randn(2, 5, 3, 20).transpose(1, 2),
    )  # fmt: skip


@cases.add
def qwen2vl_mrope():
    sections = [2, 3, 3]
    cos, sin = waves(3, 2, 6, 16)

    def mixed(x):
        return torch.cat([part[i % 3] for i, part in enumerate(x.double().split(sections * 2, -1))], -1)[:, None]

    return graded(
        lambda q, k: LigerQwen2VLMRopeFunction.apply(q.clone(), k.clone(), cos, sin, sections),
        lambda q, k: (turned(q, mixed(cos), mixed(sin)), turned(k, mixed(cos), mixed(sin))),
        torch.randn(2, 3, 6, 16), torch.randn(2, 1, 6, 16),
    )  # fmt: skip


@cases.add
def llama4_rope():
    angles = torch.rand(6, 10)
    freqs = torch.polar(torch.ones_like(angles), angles)

    def reference(*both):
        def turn(x):
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * freqs[None, :, None]).flatten(3)

        return tuple(turn(x) for x in both)

    return graded(
        lambda q, k: ops.LigerLlama4RopeFunction.apply(q, k, freqs), reference,
        torch.randn(2, 6, 3, 20), torch.randn(2, 6, 1, 20),
    )  # fmt: skip


@cases.add
def embedding():
    indices = torch.randint(0, 21, (3, 7))
    return graded(
        lambda w: LigerEmbeddingFunction.apply(w, indices), lambda w: F.embedding(indices, w), torch.randn(21, 50)
    )


@cases.add
def product_of_int8_and_int2():
    a = torch.randint(-128, 127, (17, 256), dtype=torch.int8)
    b = torch.randint(-1, 2, (256, 64), dtype=torch.int8)
    return [(matmul(a, pack_weights(b.clone())), a.to(torch.int32) @ b.to(torch.int32))]


@cases.add
def attn_res():
    def reference(v, q, w):
        scores = (rms(v, w) * q).sum(-1).softmax(0)
        return (scores[..., None] * v).sum(0)

    return graded(
        lambda v, q, w: ops.LigerAttnResFunction.apply(v, q, w, 1e-6), reference,
        torch.randn(5, 2, 7, 36), torch.randn(36), torch.randn(36),
    )  # fmt: skip


@cases.add
def neighborhood_attention():
    def reference(q, k, v):
        i = torch.arange(q.shape[2])
        near = (i[:, None] - i).abs() <= 2
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~near, -torch.inf)
        return scores.softmax(-1) @ v

    return graded(
        lambda q, k, v: ops.LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 5, 1), reference,
        *(torch.randn(2, 2, 21, 20) for _ in range(3)),
    )  # fmt: skip


@cases.add
def multi_token_attention():
    def reference(scores, weight):
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, -1e9).softmax(-1)
        return F.conv2d(shares, weight, padding=1).masked_fill(future, 0)

    return graded(
        lambda s, w: ops.LigerMultiTokenAttentionFunction.apply(s, w, None, 1, 1), reference,
        torch.randn(2, 3, 11, 11), torch.randn(3, 3, 3, 3),
    )  # fmt: skip


@cases.add
def grpo():
    ids, advantages = torch.randint(0, 23, (3, 5)), torch.randn(3)
    mask, old = torch.ones(3, 5, dtype=torch.int32), -torch.rand(3, 5) - 1
    mask[1, 3:] = 0
    old_first = old + 2 * torch.randn(3, 5)

    def reference(x):
        logp = (x[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        ratio = (logp - old_first).exp()
        kl = (old - logp).exp() - (old - logp) - 1
        gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        return (0.04 * kl - gain) * mask

    def loss(x):
        return ops.GrpoLossFunction.apply(
            x, old_first, old, ids, advantages, mask, 0.9, 0.04, 0.2, 0.2, False, "grpo", None, False
        )[0]

    return graded(loss, reference, torch.randn(3, 6, 23))


@cases.add
def mixture_of_experts():
    tokens, hidden, inner, experts, k = 13, 20, 12, 5, 2
    chosen = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).to(torch.int32)
    chosen[chosen == 3] = 4  # an expert without tokens

    def reference(x, up, down, weights):
        out = torch.zeros_like(x)
        for j in range(k):
            a, b = torch.einsum("th,tih->ti", x, up[chosen[:, j]]).chunk(2, -1)
            out = out + torch.einsum("ti,thi->th", F.silu(a) * b, down[chosen[:, j]]) * weights[:, j, None]
        return out

    return graded(
        lambda x, up, down, w: ops.LigerFusedMoEFunction.apply(x, up, down, chosen, w), reference,
        torch.randn(tokens, hidden), torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner),
        torch.rand(tokens, k),
    )  # fmt: skip


@cases.add
def mhc():
    """Both halves of manifold-constrained hyper-connections, and their coefficients' row and column sums."""
    told = graded(
        ops.LigerMHCPreFunction.apply, lambda x, h: torch.einsum("btsc,bts->btc", x, h),
        torch.randn(2, 5, 4, 37), torch.rand(2, 5, 4),
    )  # fmt: skip
    told += graded(
        ops.LigerMHCPostResFunction.apply,
        lambda x, f, post, res: torch.einsum("btij,btjc->btic", res, x) + post[..., None] * f[..., None, :],
        torch.randn(2, 5, 4, 37), torch.randn(2, 5, 37), torch.rand(2, 5, 4), torch.rand(2, 5, 4, 4),
    )  # fmt: skip
    return told


@cases.add
def mhc_coefficients():
    x, phi = torch.randn(3, 4, 24).requires_grad_(), (torch.randn(96, 24) / 10).requires_grad_()
    b, one = torch.randn(24).requires_grad_(), torch.ones(1)
    _, _, res = ops.LigerMHCCoeffsFunction.apply(x, phi, b, one, one, one, True, 20, 1e-6, 0.0, 1e-6, 2.0)
    res.square().sum().backward()
    return [(res.sum(-1), torch.ones(3, 4)), (res.sum(-2), torch.ones(3, 4))]


@cases.add
def fused_linear_cross_entropy_in_bfloat16():
    labels = torch.randint(0, 29, (9,))
    x, w = torch.randn(9, 24).bfloat16(), torch.randn(29, 24).bfloat16()
    return pairs(
        lambda x, w: ops.LigerFusedLinearCrossEntropyFunction.apply(x, w, labels)[0].float(),
        lambda x, w: F.cross_entropy(x @ w.T, labels), x, w,
    )  # fmt: skip
