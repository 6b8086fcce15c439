"""The reasons for differences from torch, and the names that torch's databases lack: read by `names` and its test."""

import re

# Functions with random or uninitialised values: only shape and dtype are compared.
UNCOMPARED = {
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "dropout", "dropout1d", "dropout2d", "dropout3d", "empty",
    "empty_like", "multinomial", "normal_", "rand", "rand_like", "randint", "randn", "randn_like", "uniform_",
}  # fmt: skip

# Reasons by (name, beginning of the difference), which are regular expressions.
REASONS = {
    (r"ops\.linear_cross_entropy", "RuntimeError: div"): "torch's chunks reject class weights that require a gradient",
    (r"ops\.triplet_margin_with_distance_loss", r"torch\.nn\.functional"): "the samples pass torch's own functions",
    (
        r"ops\.scaled_dot_product_attention",
        r"gradient \d",
    ): "rounding where p (dp - delta) cancels; bounded",
    (r"nn\.Transformer.*", r"torch\.nn\.functional"): "the samples pass torch's own functions",
    (r"ops\.(eq|ne|lt|le|gt|ge|maximum|minimum)", "accepted"): "either operand may be a number",
    (r"ops\.(amax|amin)", "accepted"): "65 dimensions; torch supports 64",
    (r"ops\.max_pool1d", "accepted"): "a sequence without channels",
    (r"ops\.max_pool3d", "accepted"): "a volume without channels",
}

# Names that only minidl has.
OWN = {
    "nn.MLP": "a network of Linear layers",
    "nn.SparseLinear": "`ops.sparse_linear` as a layer",
    "ops.add_rms_norm": "`rms_norm` of a sum, and the sum",
    "ops.bias_act": "a bias and an activation in one kernel",
    "ops.fold_batch_norm": "`torch.nn.utils.fuse_conv_bn_weights`",
    "ops.sparse_linear": "`linear` for a sparse input (CSR)",
    "ops.transposed": "`x.T`",
}

# Names that torch has without samples.
WITHOUT_DATA = {
    **{
        f"ops.{name}": f"another name of `{operation}`"
        for name, operation in {
            "absolute": "abs",
            "concat": "cat",
            "concatenate": "cat",
            "divide": "div",
            "greater": "gt",
            "greater_equal": "ge",
            "less": "lt",
            "less_equal": "le",
            "multiply": "mul",
            "negative": "neg",
            "not_equal": "ne",
            "subtract": "sub",
        }.items()
    },
    "nn.PairwiseDistance": "`ops.pairwise_distance` as a layer",
    "nn.TripletMarginLoss": "`ops.triplet_margin_loss` as a layer",
    "nn.TripletMarginWithDistanceLoss": "`ops.triplet_margin_with_distance_loss` as a layer",
    "nn.Module": "the base class of layers",
    "nn.Parameter": "a trainable leaf",
    "nn.ParameterDict": "parameters by name",
    "nn.ParameterList": "parameters in a list",
    "nn.SyncBatchNorm": "`nn.BatchNorm2d` if there is one shard",
    "ops.getitem": "see `Tensor.__getitem__`",
}

# Reasons why positional arguments have other names than torch's, or are missing.
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
    "nn.ConvTranspose3d.forward": "output_size is not built: give output_padding",
    "nn.Hardtanh.__init__": "min_value and max_value are torch's old names",
    "nn.PoissonNLLLoss.forward": "torch says log_input here, and input in the function",
    "nn.RMSNorm.forward": "torch says x here, and input everywhere else",
    "ops.normalize": "no out: results are new tensors",
    "ops.concatenate": "dim, as `ops.cat`",
    "ops.norm": "no dtype: convert before",
    "ops.rot90": "the comma in dims=(0, 1) of torch's documentation",
    "ops.true_divide": "input, as `ops.div`",
    "Tensor.true_divide": "other, as `Tensor.div`",
}
# Differences from the documentation of some versions of torch.
BY_VERSION = dict.fromkeys(
    ("Tensor.bmm", "ops.addmm", "ops.bmm", "ops.mm"), "no out_dtype, which torch 2.11 has by position: convert before"
)


def reason(label: str, how: str) -> str | None:
    """Return the documented reason for a difference, or None."""
    fits = (text for (name, begins), text in REASONS.items() if re.fullmatch(name, label) and re.match(begins, how))
    return next(fits, None)
