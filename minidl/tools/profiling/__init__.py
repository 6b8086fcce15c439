"""Profile kernels: their times, and how close these are to the floor, as a table and as a trace for Chrome.

    with minidl.profile("trace.json") as profile:
        train_some_steps()
    print(profile)

On a GPU, CUPTI (through torch.profiler) measures the times, also of kernels in CUDA graphs. In the interpreter they are
the host's time for each launch. Profiling does not change results. Read `work` first (the bytes and operations of a
launch), then `recorder` and `table`; `bench.measure` has the rates of the floor.
"""

from minidl.tools.profiling.recorder import Profile as Profile
from minidl.tools.profiling.recorder import profile as profile
from minidl.tools.profiling.table import Row as Row
