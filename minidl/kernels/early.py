"""Programs that start before the launch they depend on has ended (programmatic dependent launch, sm_90).

Starting programs takes as long as a short kernel runs. So kernels that often follow one another begin with `wait`: the
next launch may send its programs once all of this one's have started, and this one's go on when everything before it is
written. Kernels without `wait` are launched as ever, after the last program has ended. On an H200 1024^3 in bfloat16
takes 5.9 us in place of 6.2.
"""

import triton
import triton.language as tl

from minidl.kernels import launch


@triton.jit
def wait(EARLY: tl.constexpr):
    """To be called before anything is read or written."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


# Each program pays for its wait: on an H200 softmax of 65536 rows of 128 numbers takes 8.1 us in place of 9.0 in 2048
# programs, 8.1 in place of 8.7 in 4096, and 10.5 in place of 8.8 in 8192.
FEW = 4096


def options(programs: int = 1) -> dict[str, bool]:
    """What `launch.run` passes on for a kernel that begins with `wait`; `programs` tells how many, if they are short.

    Where they are more than FEW they start as ever.
    """
    early = launch.target() == "sm_90" and programs <= FEW
    return {"EARLY": early, "launch_pdl": early}
