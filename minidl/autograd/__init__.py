"""The engine: records operations in a graph, and computes gradients from it.

It imports no operation, no kernel and no class Tensor: it reads and writes a `Variable`, a value of the graph, and
wraps results in `Function.result_class`. An operation is a `Function` with a forward on torch tensors and a backward
from the gradients of its outputs to the gradients of its inputs. Read `function`, `graph`, then `backward_pass`;
`double_backward` is the same pass with recorded gradients, `deferred` the fusion of operations in forward.

## Beyond the textbook
Each of these saves launches or memory, or serves a feature that reverse mode alone lacks:

- `Function.seed_is_optional`: the pass starts with a gradient of 1. A loss that multiplies by it accepts None instead:
  two launches fewer, the fill and the product.
- `PendingSum`, `Function.accepts_pending_sums`: a value used twice has two gradients. Their sum is a launch that reads
  two tensors and writes a third, unless the operation adds them while it reads: batch norms, once per residual block.
- `Context.pending_gradient`: the same at the other end. A batch norm adds the gradient that its input has already
  received to its own, in the same kernel.
- `Node.tensor_ids`: with `create_graph` saved tensors must be variables of the graph again. An operation saves plain
  tensors, so inputs and outputs are known by `id`, valid while the context holds them.
- `Variable._recorded_grad`: `grad` is stored as a tensor or rows for optimizers; after `create_graph` also as a
  variable.
- `Variable._fused`: another operation computed the value in its kernel, so no gradient passes through it: hooks and
  `retain_grad` are refused.
- `Context.keep`: an in-place operation that wrote to new memory leaves saved results valid, though their version rises.
- `UnknownTensor`: operations on a placeholder without values return a placeholder, to trace shapes.
- `RowGrad` (in `minidl.sparse`): only leaves receive the rows of a table's gradient; no dense copy is made.
"""

from minidl.autograd import backward_pass as backward_pass
from minidl.autograd import double_backward as double_backward
from minidl.autograd.function import Function as Function
from minidl.autograd.gradients import Variable as Variable
from minidl.autograd.gradients import backward as backward
from minidl.autograd.gradients import grad as grad
from minidl.autograd.graph import Edge as Edge
from minidl.autograd.graph import Grad as Grad
from minidl.autograd.graph import Node as Node
from minidl.autograd.graph import PendingSum as PendingSum
from minidl.autograd.graph import RemovableHandle as RemovableHandle
from minidl.autograd.graph import UnknownTensor as UnknownTensor
from minidl.autograd.modes import detect_anomaly as detect_anomaly
from minidl.autograd.modes import enable_grad as enable_grad
from minidl.autograd.modes import is_anomaly_enabled as is_anomaly_enabled
from minidl.autograd.modes import is_grad_enabled as is_grad_enabled
from minidl.autograd.modes import no_grad as no_grad
from minidl.autograd.modes import set_grad_enabled as set_grad_enabled
from minidl.common import suggestions

inference_mode = no_grad


def __getattr__(name: str) -> object:
    raise suggestions.attribute("minidl.autograd", name, globals())
