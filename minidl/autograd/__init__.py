"""The engine: records operations in a graph, and computes gradients from it.

It imports no operation, no kernel and no class Tensor: it reads and writes a `Variable`, a value of the graph, and
wraps results in `Function.result_class`. An operation is a `Function` with a forward on torch tensors and a backward
from the gradients of its outputs to the gradients of its inputs. Read `function`, `graph`, then `backward_pass`.
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
from minidl.autograd.graph import OpenSum as OpenSum
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
