"""Why what differs from torch differs, and what torch's databases do not have: read by `names` and its test."""

import re

# Functions whose values are drawn, or whatever is in memory: shape and dtype are compared.
UNCOMPARED = {
    "Dropout", "Dropout2d", "dropout", "dropout2d", "empty", "empty_like", "normal_", "rand", "rand_like", "randint",
    "randn", "randn_like", "uniform_",
}  # fmt: skip

# (name, beginning of how it differs) as regular expressions: why.
REASONS = {
    (r"ops\.linear_cross_entropy", "RuntimeError: div"): "torch's chunks refuse class weights that want a gradient",
    (r"ops\.(eq|ne|lt|le|gt|ge|maximum|minimum)", "accepted"): "a number may stand for either operand",
    (r"ops\.(amax|amin)", "accepted"): "65 dimensions, of which torch has 64 at most",
    (r"ops\.max_pool1d", "accepted"): "one sequence of no channels",
}

# Names of minidl's own.
OWN = {
    "nn.MLP": "a network of Linear layers",
    "nn.SparseLinear": "`ops.sparse_linear` as a layer",
    "ops.bias_act": "a bias and an activation in one kernel",
    "ops.fold_batch_norm": "`torch.nn.utils.fuse_conv_bn_weights`",
    "ops.sparse_linear": "`linear` of a sparse input, a CSR",
    "ops.transposed": "`x.T`",
}

# Names that torch has, but no samples of.
WITHOUT_DATA = {
    "nn.Module": "the base of layers",
    "nn.Parameter": "a leaf that is trained",
    "nn.SyncBatchNorm": "`nn.BatchNorm2d` where no shards are joined",
    "ops.getitem": "see `Tensor.__getitem__`",
}

# Functions whose arguments by position have other names than torch's, or lack some: why.
SIGNATURES = {
    "Tensor.backward": "gradients of some leaves only: `autograd.grad`",
    "Tensor.cpu": "memory_format: convolutions choose it themselves",
    "Tensor.cuda": "the current device; another by `to`",
    "Tensor.norm": "no dtype: convert before",
    "Tensor.type_as": "other, as everywhere else",
    "Tensor.uniform_": "from is a word of Python",
    "minidl.load": "nothing is pickled",
    "minidl.save": "nothing is pickled",
    "nn.ConvTranspose1d.forward": "output_size is not built: give output_padding",
    "nn.ConvTranspose2d.forward": "output_size is not built: give output_padding",
    "nn.Hardtanh.__init__": "min_value and max_value are torch's old names",
    "nn.RMSNorm.forward": "torch says x here, and input everywhere else",
    "ops.normalize": "no out: results are new tensors",
    "ops.norm": "no dtype: convert before",
}
# The same, in the documentation of some of torch's versions.
BY_VERSION = dict.fromkeys(
    ("Tensor.bmm", "ops.addmm", "ops.bmm", "ops.mm"), "no out_dtype, which torch 2.11 has by position: convert before"
)


def reason(label: str, how: str) -> str | None:
    """Why a name differs in this way, if that is written down."""
    fits = (text for (name, begins), text in REASONS.items() if re.fullmatch(name, label) and re.match(begins, how))
    return next(fits, None)
