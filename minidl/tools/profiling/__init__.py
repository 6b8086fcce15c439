"""Which kernels ran, how long, and how near to what the device can do: a table, and a trace for Chrome.

    with minidl.profile("trace.json") as profile:
        train_some_steps()
    print(profile)

On a GPU times are those of the device (CUPTI through torch.profiler), also of kernels that CUDA graphs launch. In the
interpreter they are the host's time for each launch. `work` says what bytes and operations are counted,
`bench.measure` what they are compared with. Results are those without profiling, bit for bit.
"""

from minidl.tools.profiling.recorder import Profile as Profile
from minidl.tools.profiling.recorder import profile as profile
from minidl.tools.profiling.table import Row as Row
