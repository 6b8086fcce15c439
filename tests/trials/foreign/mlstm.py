"""Cases of mlstm-kernels: a matrix memory with exponential gates, in chunks, in parallel and step by step."""

import torch
from mlstm_kernels.torch.chunkwise.triton_limit_chunk.fwbw import mlstm_chunkwise__limit_chunk
from mlstm_kernels.torch.chunkwise.triton_xl_chunk.fwbw import mlstm_chunkwise__xl_chunk
from mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging.fwbw import mlstm_siging_chunkwise__xl_chunk
from mlstm_kernels.torch.parallel.native_siging.fwbw import mlstm_siging_parallel__native_custbw
from mlstm_kernels.torch.parallel.native_stablef.fwbw import mlstm_parallel__native_stablef_custbw
from mlstm_kernels.torch.parallel.triton_limit_headdim.fwbw import mlstm_parallel__limit_headdim
from mlstm_kernels.torch.recurrent.native_step import mlstm_recurrent_step__native
from mlstm_kernels.torch.recurrent.triton_step import mlstm_recurrent_step__triton

from tests.trials.foreign.case import Cases, graded, pairs

cases = Cases()


def inputs(long=64, keys=32, values=32):
    sizes = (keys, keys, values)
    return *(torch.randn(1, 2, long, size) for size in sizes), torch.randn(1, 2, long), 3 + torch.randn(1, 2, long)


def single(function, **named):
    def run(*x):
        out = function(*x, **named)
        return out[0] if isinstance(out, tuple) else out

    return run


@cases.add
def limit_chunk():
    told = []
    for sizes in ({}, {"long": 96, "keys": 16, "values": 64}):
        told += graded(
            single(mlstm_chunkwise__limit_chunk, chunk_size=32), single(mlstm_parallel__native_stablef_custbw),
            *inputs(**sizes),
        )  # fmt: skip
    return told


@cases.add
def xl_chunk():
    return graded(
        single(mlstm_chunkwise__xl_chunk, chunk_size=32, autocast_kernel_dtype=torch.float32),
        single(mlstm_parallel__native_stablef_custbw), *inputs(),
    )  # fmt: skip


@cases.add
def xl_chunk_with_sigmoid_gates():
    return graded(
        single(mlstm_siging_chunkwise__xl_chunk, chunk_size=32, autocast_kernel_dtype=torch.float32),
        single(mlstm_siging_parallel__native_custbw), *inputs(),
    )  # fmt: skip


@cases.add
def in_parallel():
    return graded(single(mlstm_parallel__limit_headdim), single(mlstm_parallel__native_stablef_custbw), *inputs(128))


def step(values):
    q, k, v = (torch.randn(2, 3, size) for size in (64, 64, values))
    gates = torch.randn(2, 3, 1), torch.randn(2, 3, 1)
    state = torch.randn(2, 3, 64, values), torch.randn(2, 3, 64), torch.randn(2, 3, 1)

    def flat(function):
        def run(*x):
            h, state = function(*x)
            return h, *state

        return run

    return pairs(flat(mlstm_recurrent_step__triton), flat(mlstm_recurrent_step__native), q, k, v, *gates, *state)


@cases.add
def step_by_step():
    return step(64) + step(128)


@cases.add
def step_by_step_with_heads_of_48():
    return step(48)
