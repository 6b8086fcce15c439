"""Replace the function that launches kernels, in tests that look at launches."""

from minidl.runtime import kernel_launch, launch


def replace_run(monkeypatch, run):
    """Let kernels and prepared launches call `run` in place of `launch.run`."""
    for module in (launch, kernel_launch):
        monkeypatch.setattr(module, "run", run)
