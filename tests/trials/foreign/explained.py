"""What reading the kernels and their launchers says of each finding.

bug       wrong on a GPU for these inputs
latent    wrong by Triton's language; right as long as a masked lane without `other` is 0, as Triton 3.7.1 makes it
contract  the package means it so: what is read is dropped, or lies in the same memory
hint      a hint that is not true, of which nothing here depends
"""

JUDGEMENTS = {
    # liger-kernel
    ("_moe_router_histogram_kernel", "write race"): "bug",
    ("_block_rms_norm_backward_kernel", "missing other"): "latent",
    # fla-core
    ("layer_norm_bwd_kernel", "missing other"): "latent",
    ("layer_norm_bwd_kernel_row", "missing other"): "latent",
    ("layer_norm_gated_bwd_kernel", "missing other"): "latent",
    ("layer_norm_gated_bwd_kernel_row", "missing other"): "latent",
    ("parallel_based_bwd_kernel", "missing other"): "latent",
    ("fused_chunk_based_bwd_kernel", "missing other"): "latent",
    ("parallel_rebased_bwd_kernel", "missing other"): "latent",
    ("chunk_dplr_fwd_kernel_h", "missing other"): "latent",
    ("chunk_dplr_bwd_kernel_dhu", "missing other"): "latent",
    ("chunk_dplr_bwd_kernel_intra", "wrong hint"): "hint",
    ("chunk_gla_fwd_kernel_o", "read of unwritten memory"): "contract",
    ("chunk_gla_bwd_kernel_dv", "read of unwritten memory"): "contract",
    ("chunk_kda_fwd_kernel_inter_solve_fused", "read of unwritten memory"): "contract",
    ("chunk_kda_bwd_kernel_dAv", "read of unwritten memory"): "contract",
    ("prepare_wy_repr_fwd_kernel_chunk32", "read of unwritten memory"): "contract",
    ("wu_fwd_kernel", "read of unwritten memory"): "contract",
    ("chunk_dplr_fwd_kernel_o", "read of unwritten memory"): "contract",
    ("fused_recurrent_rwkv4_backward_kernel", "out-of-bounds read"): "contract",
    # conch-triton-kernels
    ("_rms_norm_kernel", "missing other"): "latent",
    ("_gemma_rms_norm_inplace_kernel", "missing other"): "latent",
    ("_gemm_kernel", "out-of-bounds read", "zeros_ptr"): "contract",
    ("_gemm_kernel", "out-of-bounds read"): "bug",
    # mlstm-kernels
    ("recurrent_step_fw_kernel", "write race"): "bug",
    ("recurrent_step_fw_kernel", "out-of-bounds read"): "bug",
    ("recurrent_step_fw_kernel", "out-of-bounds write"): "bug",
    ("mlstm_parallel_bw_dKdV_kernel", "wrong hint"): "hint",
    # xformers
    ("_xformers_tiled_matmul_kernel", "wrong hint"): "hint",
    # flag-gems
    ("batch_norm_forward_kernel", "read race"): "bug",
    ("nll_loss_forward_kernel", "read race"): "bug",
    ("softmax_backward_kernel_inner", "missing other"): "latent",
    ("softmax_backward_kernel_non_inner", "missing other"): "latent",
    ("conv2d_forward_kernel", "missing other"): "latent",
    ("conv2d_backward_kernel_weight", "missing other"): "latent",
    ("bmm_kernel", "missing other"): "latent",
    ("mm_kernel_general", "wrong hint"): "hint",
    ("_gather_flaggems_jit_function", "out-of-bounds read"): "contract",
}

# Results that are not the reference's.
OFF = {
    "conch.scaled_product_of_odd_sizes": "its bug",
    "gems.batch_norm_without_running_statistics": "its bug",
    "liger.cross_entropy_of_each_in_strided_rows": "a copy of the logits no longer asks for a gradient",
}

# Cases whose kernels a CPU cannot run, and why.
NOT_RUN = {
    "gems.pointwise": "its StridedBuffer is no tensor, which Triton's interpreter needs",
    "gems.flip": "its StridedBuffer is no tensor",
    "gems.repeat_interleave": "its StridedBuffer is no tensor",
}


def judgement(finding):
    key = finding["kernel"], finding["kind"]
    return JUDGEMENTS.get((*key, finding["tensor"])) or JUDGEMENTS.get(key)
