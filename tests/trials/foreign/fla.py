"""Cases of fla-core: linear attention in chunks and step by step, delta rules, and the modules around them."""

import torch
import torch.nn.functional as F
from fla import ops
from fla.modules import activations, l2norm, layernorm, token_shift
from fla.modules.causal_conv1d import ops as conv
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_kl_div import fused_kl_div_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla.modules.grpo.ops import fused_grpo_loss, grpo_loss_torch
from fla.modules.norm import fused_norm_gate
from fla.modules.rotary import ops as rotary
from fla.ops import utils
from fla.ops.rebased import parallel_rebased as rebased
from fla.ops.rwkv4 import fused_recurrent_rwkv4

from tests.trials.foreign.case import Cases, graded, pairs

cases = Cases()
BATCH, LONG, HEADS, K, V = 2, 70, 2, 20, 24


def draw(*last, long=LONG, heads=HEADS):
    return torch.randn(BATCH, long, heads, *last)


def qkv(long=LONG):
    return draw(K, long=long), F.normalize(draw(K, long=long), dim=-1), draw(V, long=long)


def decays(*last, long=LONG):
    return F.logsigmoid(draw(*last, long=long))


def betas():
    return draw().sigmoid()


def recurrent(q, k, v, decay=None, beta=None, scale=None):
    """A state, decayed at each step by number or by row, that takes in what it lacks (with beta) or all of v."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        if decay is not None:
            d = decay[:, t].exp()
            state = state * (d[..., None] if d.dim() == 3 else d[..., None, None])
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * new[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * scale))
    return torch.stack(out, 1)


def attended(q, k, v, bias=0.0, near=None):
    """Softmax attention of [batch, time, heads, size], causal."""
    i = torch.arange(q.shape[1])
    unseen = i[None, :] > i[:, None]
    if near is not None:
        unseen = unseen | (i[:, None] - i[None, :] >= near)
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5 + bias
    return torch.einsum("bhij,bjhv->bihv", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)


def by_sequence(function, lengths, *inputs):
    """The function of each of the sequences that lie one after another."""
    parts = zip(*(x.split(lengths, 1) for x in inputs), strict=True)
    return torch.cat([function(*part) for part in parts], 1)


def first(function, **named):
    return lambda *inputs: function(*inputs, **named)[0]


@cases.add
def chunk_gla():
    return graded(lambda q, k, v, g: ops.gla.chunk_gla(q, k, v, g)[0], recurrent, *qkv(), decays(K))


@cases.add
def chunk_gla_of_sequences():
    lengths, bounds = [3, 64, 1, 33], torch.tensor([0, 3, 67, 68, 101])
    inputs = [x[:1, :101] for x in (*qkv(101), decays(K, long=101))]
    return graded(
        lambda q, k, v, g: ops.gla.chunk_gla(q, k, v, g, cu_seqlens=bounds)[0],
        lambda *x: by_sequence(recurrent, lengths, *x), *inputs,
    )  # fmt: skip


@cases.add
def recurrent_gla():
    return graded(
        lambda q, k, v, g: ops.gla.fused_recurrent_gla(q, k, v, gk=g)[0], recurrent, *qkv(17), decays(K, long=17)
    )


@cases.add
def chunk_simple_gla():
    return graded(lambda q, k, v, g: ops.simple_gla.chunk_simple_gla(q, k, v, g)[0], recurrent, *qkv(), decays())


@cases.add
def fused_chunk_simple_gla():
    return graded(lambda q, k, v, g: ops.simple_gla.fused_chunk_simple_gla(q, k, v, g)[0], recurrent, *qkv(), decays())


@cases.add
def parallel_simple_gla():
    return graded(lambda q, k, v, g: ops.simple_gla.parallel_simple_gla(q, k, v, g)[0], recurrent, *qkv(), decays())


@cases.add
def recurrent_simple_gla():
    return graded(
        lambda q, k, v, g: ops.simple_gla.fused_recurrent_simple_gla(q, k, v, g)[0],
        recurrent, *qkv(17), decays(long=17),
    )  # fmt: skip


def retained(q, k, v):
    decay = (1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=torch.float64))).log()
    return recurrent(q, k, v, decay.expand(q.shape[:3]))


@cases.add
def chunk_retention():
    return graded(first(ops.retention.chunk_retention), retained, *qkv())


@cases.add
def parallel_retention():
    return graded(first(ops.retention.parallel_retention), retained, *qkv())


@cases.add
def chunk_linear_attn():
    return graded(first(ops.linear_attn.chunk_linear_attn, normalize=False), recurrent, *qkv())


@cases.add
def fused_chunk_linear_attn():
    return graded(first(ops.linear_attn.fused_chunk_linear_attn, normalize=False), recurrent, *qkv())


@cases.add
def recurrent_linear_attn():
    return graded(first(ops.linear_attn.fused_recurrent_linear_attn, normalize=False), recurrent, *qkv(17))


@cases.add
def chunk_delta_rule():
    return graded(
        lambda q, k, v, b: ops.delta_rule.chunk_delta_rule(q, k, v, b)[0],
        lambda q, k, v, b: recurrent(q, k, v, None, b), *(x.bfloat16() for x in (*qkv(), betas())),
    )  # fmt: skip


@cases.add
def recurrent_delta_rule():
    return graded(
        lambda q, k, v, b: ops.delta_rule.fused_recurrent_delta_rule(q, k, v, b)[0],
        lambda q, k, v, b: recurrent(q, k, v, None, b), *qkv(17), betas()[:, :17].contiguous(),
    )  # fmt: skip


@cases.add
def chunk_gated_delta_rule():
    return graded(first(ops.gated_delta_rule.chunk_gated_delta_rule), recurrent, *qkv(), decays(), betas())


@cases.add
def chunk_gated_delta_rule_of_sequences():
    lengths, bounds = [3, 64, 1, 33], torch.tensor([0, 3, 67, 68, 101])
    inputs = [x[:1, :101] for x in (*qkv(101), decays(long=101), draw(long=101).sigmoid())]
    return graded(
        first(ops.gated_delta_rule.chunk_gated_delta_rule, cu_seqlens=bounds),
        lambda *x: by_sequence(recurrent, lengths, *x), *inputs,
    )  # fmt: skip


@cases.add
def recurrent_gated_delta_rule():
    inputs = (*qkv(17), decays(long=17), draw(long=17).sigmoid())
    return pairs(
        lambda q, k, v, g, b: ops.gated_delta_rule.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=b)[0],
        recurrent, *inputs,
    )  # fmt: skip


@cases.add
def chunk_kda():
    return graded(first(ops.kda.chunk_kda), recurrent, *qkv(), decays(K), betas())


@cases.add
def recurrent_kda():
    return pairs(first(ops.kda.fused_recurrent_kda), recurrent, *qkv(17), decays(K, long=17), draw(long=17).sigmoid())


def hgrn(x, g):
    out, h = [], torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


@cases.add
def chunk_hgrn():
    x, g = torch.randn(2, 2, 70, 40)
    return graded(first(ops.hgrn.chunk_hgrn), hgrn, x, F.logsigmoid(g))


@cases.add
def recurrent_hgrn():
    x, g = torch.randn(2, 2, 17, 40)
    return graded(first(ops.hgrn.fused_recurrent_hgrn), hgrn, x, F.logsigmoid(g))


@cases.add
def chunk_gsa():
    from fla.ops.gsa.naive import naive_recurrent_gsa

    return graded(
        lambda q, k, v, s, g: ops.gsa.chunk_gsa(q, k, v, s, g)[0],
        lambda q, k, v, s, g: naive_recurrent_gsa(q, k, v, s, g)[0], *qkv(), draw(12), decays(12),
    )  # fmt: skip


@cases.add
def chunk_abc():
    from fla.ops.abc.naive import naive_recurrent_abc

    return graded(
        first(ops.abc.chunk_abc),
        lambda *x: naive_recurrent_abc(*(y.transpose(1, 2) for y in x))[0].transpose(1, 2),
        *qkv(),
        draw(16).clamp(-5, 5),
    )


@cases.add
def chunk_rwkv6():
    def reference(r, k, v, w, u):
        state, out = r.new_zeros(BATCH, HEADS, K, V), []
        for t in range(r.shape[1]):
            new = k[:, t, :, :, None] * v[:, t, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state + u[..., None] * new, r[:, t]) * K**-0.5)
            state = state * w[:, t].exp()[..., None] + new
        return torch.stack(out, 1)

    return graded(first(ops.rwkv6.chunk_rwkv6), reference, *qkv(), decays(K), torch.randn(HEADS, K))


def general(q, k, v, a, b, gk):
    """The state decays by row, and takes in a product of two vectors with itself."""
    state, out = q.new_zeros(BATCH, HEADS, K, V), []
    for t in range(q.shape[1]):
        old = torch.einsum("bhkv,bhk->bhv", state, a[:, t])
        state = state * gk[:, t].exp()[..., None] + b[:, t, :, :, None] * old[:, :, None]
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * K**-0.5)
    return torch.stack(out, 1)


def low_rank(long=LONG):
    q, k, v = qkv(long)
    a = F.normalize(draw(K, long=long), dim=-1)
    return q, k, v, -a, a * draw(1, long=long).sigmoid(), decays(K, long=long)


@cases.add
def chunk_dplr_delta_rule():
    return graded(first(ops.generalized_delta_rule.chunk_dplr_delta_rule), general, *low_rank())


@cases.add
def recurrent_dplr_delta_rule():
    return pairs(first(ops.generalized_delta_rule.fused_recurrent_dplr_delta_rule), general, *low_rank(17))


@cases.add
def chunk_iplr_delta_rule():
    *inputs, _ = low_rank()
    return pairs(
        first(ops.generalized_delta_rule.chunk_iplr_delta_rule),
        lambda *x: general(*x, torch.zeros_like(x[0])), *inputs,
    )  # fmt: skip


@cases.add
def recurrent_iplr_delta_rule():
    *inputs, _ = low_rank(17)
    return graded(
        first(ops.generalized_delta_rule.fused_recurrent_iplr_delta_rule),
        lambda *x: general(*x, torch.zeros_like(x[0])), *inputs,
    )  # fmt: skip


@cases.add
def chunk_comba():
    def reference(q, k, v, p, g, b):
        state, out = q.new_zeros(BATCH, HEADS, K, V), []
        for t in range(q.shape[1]):
            new = b[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, p[:, t]))
            state = state * g[:, t].exp()[..., None, None] + k[:, t, :, :, None] * new[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * K**-0.5)
        return torch.stack(out, 1)

    q, k, v = qkv()
    return graded(first(ops.comba.chunk_comba), reference, q, k, v, 0.8 * k, decays(), betas())


@cases.add
def parallel_attn():
    return graded(ops.attn.parallel_attn, attended, draw(K, heads=4), draw(K), draw(V))


@cases.add
def parallel_attn_in_a_window():
    return graded(
        lambda q, k, v: ops.attn.parallel_attn(q, k, v, window_size=9),
        lambda q, k, v: attended(q, k, v, near=9), *qkv(),
    )  # fmt: skip


@cases.add
def parallel_forgetting_attn():
    def reference(q, k, v, g):
        sums = g.cumsum(1).transpose(1, 2)
        return attended(q, k, v, sums[..., :, None] - sums[..., None, :])

    return graded(ops.forgetting_attn.parallel_forgetting_attn, reference, *qkv(), decays())


@cases.add
def parallel_stickbreaking_attn():
    from fla.ops.stickbreaking_attn.naive import naive_stickbreaking_attn

    return graded(
        lambda *x: ops.stickbreaking_attn.parallel_stickbreaking_attn(*x)[0],
        lambda *x: naive_stickbreaking_attn(*x)[0], *qkv(),
    )  # fmt: skip


@cases.add
def parallel_path_attn():
    from fla.ops.path_attn.naive import naive_path_attn

    q, k, v = draw(16), draw(16), draw(16)
    return graded(
        lambda *x: ops.path_attn.parallel_path_attn(*x)[0],
        lambda *x: naive_path_attn(*x, scale=16**-0.5), q, k, v, F.normalize(draw(16), dim=-1), betas(), decays(),
    )  # fmt: skip


@cases.add
def parallel_nsa():
    from fla.ops.nsa.naive import naive_nsa

    q, k, v = draw(K, heads=16), draw(K, heads=1), draw(V, heads=1)
    gates = [draw(heads=16).sigmoid() for _ in range(2)]

    def run(function):
        return lambda *x: function(*x, block_counts=4, block_size=16)

    return graded(run(ops.nsa.parallel_nsa), run(naive_nsa), q, k, v, *gates)


@cases.add
def parallel_based():
    def reference(q, k, v):
        s = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
        s = (1 + s + s * s / 2).tril()
        return torch.einsum("bhij,bjhv->bihv", s / (s.sum(-1, keepdim=True) + 1e-6), v)

    q, k, v = draw(16), draw(16), draw(32)
    return graded(ops.based.parallel_based, reference, q, k, v) + graded(
        ops.based.fused_chunk_based, reference, q, k, v
    )


@cases.add
def parallel_rebased():
    def reference(q, k, v):
        s = (torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5).square().tril()
        return torch.einsum("bhij,bjhv->bihv", s / (s.sum(-1, keepdim=True) + 1e-5), v)

    return graded(rebased, reference, draw(16), draw(16), draw(V))


@cases.add
def chunk_ttt_linear():
    from fla.ops.ttt.naive import chunk_ttt_linear_ref

    w, b, eta = torch.randn(HEADS, V), torch.randn(HEADS, V), draw(1, long=48) * 5e-3
    q, k, v = (F.normalize(draw(V, long=48), dim=-1) for _ in range(3))
    return graded(
        first(ops.ttt.chunk_ttt_linear, chunk_size=16),
        lambda *x: chunk_ttt_linear_ref(*x, mini_batch_size=16)[0], q, k, v, w, b, eta,
    )  # fmt: skip


@cases.add
def recurrent_rwkv4():
    def reference(w, u, k, v):
        top, bottom, out = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
        for t in range(k.shape[1]):
            now, here = k[:, t].exp(), (u + k[:, t]).exp()
            out.append((top + here * v[:, t]) / (bottom + here))
            top, bottom = top * (-w.exp()).exp() + now * v[:, t], bottom * (-w.exp()).exp() + now
        return torch.stack(out, 1)

    state = torch.zeros(2, 3, 1, 40)
    state[:, 2] = -1e38
    w, u, k, v = -torch.rand(40), torch.randn(40), torch.randn(2, 13, 40), torch.randn(2, 13, 40)
    return graded(lambda *x: fused_recurrent_rwkv4(*x, state)[0], reference, w, u, k, v)


@cases.add
def sums_along_time():
    g, wide = decays(), decays(K)

    def chunked(x, reverse):
        parts = [p.flip(1).cumsum(1).flip(1) if reverse else p.cumsum(1) for p in x.split(32, 1)]
        return torch.cat(parts, 1)

    told = []
    for x in (g, wide):
        for reverse in (False, True):
            told += pairs(
                lambda x, r=reverse: utils.chunk_local_cumsum(x, 32, reverse=r),
                lambda x, r=reverse: chunked(x, r), x,
            )  # fmt: skip
            told += pairs(
                lambda x, r=reverse: utils.chunk_global_cumsum(x, reverse=r),
                lambda x, r=reverse: x.flip(1).cumsum(1).flip(1) if r else x.cumsum(1), x,
            )  # fmt: skip
    return told


@cases.add
def solve_tril():
    told = []
    for size in (16, 32, 64):
        a = draw(size) / size
        lower = torch.arange(size)
        for start in range(0, LONG, size):
            rows = torch.arange(min(size, LONG - start))
            a[:, start : start + size] *= (lower < rows[:, None])[None, :, None]

        def reference(a, size=size):
            out = torch.zeros_like(a)
            for start in range(0, LONG, size):
                part = a[:, start : start + size].transpose(1, 2)[..., : min(size, LONG - start)]
                n = part.shape[-1]
                inverse = torch.linalg.inv(part.tril(-1) + torch.eye(n, dtype=a.dtype))
                out[:, start : start + size, :, :n] = inverse.transpose(1, 2)
            return out

        told += pairs(utils.solve_tril, reference, a)
    return told


@cases.add
def rows():
    x = torch.randn(5, 37)
    told = pairs(utils.softmax_fwd, lambda x: x.softmax(-1), x)
    told += pairs(utils.logsumexp_fwd, lambda x: x.logsumexp(-1), x)
    bounds, padded = torch.tensor([0, 5, 6, 20]), torch.randn(3, 14, 8)

    def packed(x):
        return torch.cat([x[i, 14 - n :] for i, n in enumerate((5, 1, 14))])

    return told + graded(lambda x: utils.pack_sequence(x, bounds), packed, padded)


@cases.add
def mean_pooling():
    return graded(
        lambda x: utils.mean_pooling(x, 16),
        lambda x: torch.stack([part.mean(1) for part in x.split(16, 1)], 1), draw(V),
    )  # fmt: skip


@cases.add
def matmul():
    return pairs(utils.matmul, lambda a, b: a @ b, torch.randn(37, 41), torch.randn(41, 29))


@cases.add
def l2norm_of_rows():
    told = []
    for width in (33, 600):
        told += graded(
            l2norm.l2norm, lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6), torch.randn(3, 7, width)
        )
    return told


@cases.add
def layer_norms():
    w, b = torch.randn(33), torch.randn(33)
    told = graded(layernorm.layer_norm, lambda x, w, b: F.layer_norm(x, (33,), w, b), torch.randn(3, 7, 33), w, b)
    told += graded(
        lambda x, w, b: layernorm.group_norm(x, w, b, num_groups=3),
        lambda x, w, b: F.group_norm(x.flatten(0, 1), 3, w, b).view(x.shape), torch.randn(3, 7, 33), w, b,
    )  # fmt: skip
    told += graded(
        lambda x, w, r: layernorm.rms_norm(x, w, None, residual=r, prenorm=True),
        lambda x, w, r: (F.rms_norm(x + r, (33,), w, 1e-5), x + r),
        torch.randn(3, 7, 33), w, torch.randn(3, 7, 33),
    )  # fmt: skip
    return told


@cases.add
def wide_layer_norm():
    return graded(
        layernorm.layer_norm, lambda x, w, b: F.layer_norm(x, (700,), w, b),
        torch.randn(5, 700), torch.randn(700), torch.randn(700),
    )  # fmt: skip


@cases.add
def gated_norms():
    def rms(x, g, w):
        return F.rms_norm(x, x.shape[-1:], w, 1e-6) * F.silu(g)

    def layer(x, g, w, b):
        return F.layer_norm(x, x.shape[-1:], w, b, 1e-6) * g.sigmoid()

    told = []
    for width in (33, 600):
        x, g, w, b = torch.randn(3, 7, width), torch.randn(3, 7, width), torch.randn(width), torch.randn(width)
        told += graded(lambda x, g, w: fused_norm_gate.rms_norm_gated(x, g, w, None), rms, x, g, w)
        told += graded(lambda *x: fused_norm_gate.layer_norm_gated(*x, activation="sigmoid"), layer, x, g, w, b)
    return told


@cases.add
def causal_conv1d():
    def reference(x, w, b):
        y = F.conv1d(F.pad(x.transpose(1, 2), (w.shape[1] - 1, 0)), w[:, None], b, groups=w.shape[0])
        return F.silu(y).transpose(1, 2)

    x, w, b = torch.randn(2, 37, 40), torch.randn(40, 4), torch.randn(40)
    told = graded(lambda *i: conv.causal_conv1d(*i, activation="silu")[0], reference, x, w, b)
    bounds, lengths = torch.tensor([0, 3, 20, 21, 37]), [3, 17, 1, 16]
    return told + graded(
        lambda *i: conv.causal_conv1d(*i, activation="silu", cu_seqlens=bounds)[0],
        lambda x, w, b: by_sequence(lambda x: reference(x, w, b), lengths, x), x[:1], w, b,
    )  # fmt: skip


@cases.add
def causal_conv1d_step_by_step():
    x, w, cache = torch.randn(2, 1, 40), torch.randn(40, 4), torch.randn(2, 40, 4)

    def reference(x, w, cache):
        return (torch.cat((cache[..., 1:], x.transpose(1, 2)), -1) * w).sum(-1)[:, None]

    return pairs(lambda x, w, c: conv.causal_conv1d_update(x, c.clone(), weight=w)[0], reference, x, w, cache)


@cases.add
def token_shifts():
    def reference(x):
        return F.pad(x, (0, 0, 1, 0))[:, :-1] - x

    bounds = torch.tensor([0, 3, 20, 21, 37])
    return graded(token_shift.token_shift, reference, torch.randn(2, 37, 40)) + graded(
        lambda x: token_shift.token_shift(x, bounds),
        lambda x: by_sequence(reference, [3, 17, 1, 16], x), torch.randn(1, 37, 40),
    )  # fmt: skip


@cases.add
def rotary_embedding():
    angles = torch.rand(40, 8)

    def reference(x):
        cos, sin = (f(angles[: x.shape[1]].double())[:, None] for f in (torch.cos, torch.sin))
        a, b, rest = x[..., :8], x[..., 8:16], x[..., 16:]
        return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)

    return graded(lambda x: rotary.rotary_embedding(x, angles.cos(), angles.sin()), reference, draw(K, long=37))


@cases.add
def activation_functions():
    x, y = torch.randn(3, 7, 33), torch.randn(3, 7, 33)
    told = graded(activations.swish, F.silu, x)
    told += graded(activations.logsigmoid, F.logsigmoid, x)
    told += graded(activations.sigmoid, torch.sigmoid, x.transpose(0, 1))
    told += graded(activations.swiglu, lambda x, y: F.silu(x) * y, x, y)
    told += graded(
        activations.swiglu_linear, lambda x, y, w, b: F.linear(F.silu(x) * y, w, b), x, y,
        torch.randn(5, 33), torch.randn(5),
    )  # fmt: skip
    return told


@cases.add
def fused_cross_entropy():
    labels = torch.randint(0, 91, (9,))
    labels[2] = -100
    return graded(
        lambda x: cross_entropy_loss(x, labels, label_smoothing=0.1)[0],
        lambda x: F.cross_entropy(x, labels, label_smoothing=0.1, reduction="none"), torch.randn(9, 91),
    )  # fmt: skip


@cases.add
def fused_linear_cross_entropy():
    labels = torch.randint(0, 91, (9,))
    labels[2] = -100
    return graded(
        lambda x, w, b: fused_linear_cross_entropy_loss(x, labels, w, b),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), labels),
        torch.randn(9, 24), torch.randn(91, 24), torch.randn(91),
    )  # fmt: skip


@cases.add
def fused_kl_div():
    def reference(x, t, w, u):
        return F.kl_div((x @ w.T).log_softmax(-1), (t @ u.T).softmax(-1), reduction="batchmean")

    t, u = torch.randn(9, 24), torch.randn(91, 24)
    return graded(
        lambda x, w: fused_kl_div_loss(x, t, w, u), lambda x, w: reference(x, t.double(), w, u.double()),
        torch.randn(9, 24), torch.randn(91, 24),
    )  # fmt: skip


@cases.add
def grpo():
    ids, advantages = torch.randint(0, 23, (3, 5)), torch.randn(3)
    mask, old = torch.ones(3, 5, dtype=torch.int32), -torch.rand(3, 5) - 1
    mask[1, 3:] = 0
    return graded(
        lambda x: fused_grpo_loss(x, old, ids, advantages, 0.1, mask, inplace=False),
        lambda x: grpo_loss_torch(x, old, ids, advantages, 0.1, mask), torch.randn(3, 6, 23),
    )  # fmt: skip
