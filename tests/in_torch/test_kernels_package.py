"""The operators as a package of Hugging Face's kernels."""

import subprocess
import sys

from minidl.tools import kernels_package

LOAD = """
import importlib.util, sys
path = sys.argv[1]
spec = importlib.util.spec_from_file_location("kernels_1f", path + "/__init__.py", submodule_search_locations=[path])
loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loaded)
import torch
x = torch.randn(2, 3, 5, 5, device=sys.argv[2])
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).to(x.device)
expected = model(x)
torch.testing.assert_close(loaded.accelerate(model)(x), expected, rtol=1e-4, atol=1e-4)
assert type(model[0]).__module__ == "kernels_1f.torch.layers"
assert torch.ops.kernels_1f.convolution
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_it_is_loaded_from_a_folder_by_any_name_without_minidl(tmp_path, device):
    kernels_package.main([str(tmp_path)])
    assert "universal = true" in (tmp_path / "build.toml").read_text()
    command = [sys.executable, "-c", LOAD, str(tmp_path / "torch-ext" / "minidl_kernels"), device.type]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = set(done.stdout.split())
    assert {"kernels_1f", "torch", "triton"} <= names
    assert "minidl" not in names
