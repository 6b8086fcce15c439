"""All arithmetic of minidl: Triton kernels and their launchers on plain torch tensors, a chapter per file or folder."""

import minidl.runtime  # noqa: F401 (decides where kernels run, before Triton is imported)
