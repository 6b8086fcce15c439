"""Launches without Triton's own path: the compiled kernel is the one that Triton takes, or Triton is asked."""

from pathlib import Path

import pytest
import torch
import triton

from minidl.runtime import kernel_launch, launch
from minidl.runtime.launch_cache import fast_launch
from minidl.tensors import default_device
from tests.kernels import probes

NAMES = [probe.name for probe in probes.launches("cpu")]
ROOT = Path(__file__).parents[2]


def test_this_version_of_triton_is_known(seen):
    assert seen["known"], triton.__version__


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_launched_is_the_one_that_triton_launches(seen, name):
    assert seen["specialisations"][name] == {
        "known": next(probe.same for probe in probes.launches("cpu") if probe.name == name) is not None,
        "known_right": True, "kernel_right": True, "arguments_right": True, "alone": True, "shared": True,
        "found_again": True,
    }  # fmt: skip


def test_what_is_unusual_is_left_to_triton(seen):
    assert len(seen["refusals"]) == 18
    assert [name for name, left in seen["refusals"].items() if not left] == []


def test_every_kernel_is_launched_in_the_form_that_goes_directly(seen):
    assert seen["left"] == []


def test_the_interpreter_never_launches_directly():
    if not launch.INTERPRETED:
        pytest.skip("for processes that interpret")
    probe = probes.launches("cpu")[0]
    probe = probe._replace(args=(*probe.args[:-1], 0))  # the interpreter takes no bool
    for _ in range(2):
        assert not fast_launch.launch(probe.kernel, probe.grid, probe.args, probe.meta)
        launch.run(probe.kernel, probe.grid, *probe.args, **probe.meta)
    assert torch.equal(probe.args[2][:48], torch.arange(48) * 2 * 0.5 + torch.arange(48) + 5 + 1 + 3)


@pytest.fixture
def no_triton(monkeypatch):
    """A function after which a launch that is not direct is an error."""

    def forbid(kernel, *args):
        raise AssertionError(f"{kernel.__name__} was left to Triton")

    return lambda: monkeypatch.setattr(kernel_launch, "_run_by_triton", forbid)


def result(probe):
    return probe.args[2 if probe.kernel is probes.probe_kernel else 1]


@pytest.mark.gpu
def test_results_are_the_same_both_ways(no_triton):
    found = probes.launches(default_device())
    expected = []
    for probe in found:
        probe.kernel[probe.grid](*probe.args, **probe.meta)
        expected.append(result(probe).clone())
        launch.run(probe.kernel, probe.grid, *probe.args, **probe.meta)
    no_triton()
    for _ in range(2):
        for probe, y in zip(found, expected, strict=True):
            result(probe).fill_(torch.nan)
            launch.run(probe.kernel, probe.grid, *probe.args, **probe.meta)
            torch.testing.assert_close(result(probe), y, rtol=0, atol=0, equal_nan=True, msg=probe.name)
        found.reverse()
        expected.reverse()


@pytest.mark.gpu
def test_a_direct_launch_is_captured_and_follows_the_current_stream(no_triton):
    probe = probes.launches(default_device())[0]
    launch.run(probe.kernel, probe.grid, *probe.args, **probe.meta)
    expected = result(probe).clone()
    no_triton()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run(probe.kernel, probe.grid, *probe.args, **probe.meta)
    result(probe).fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(result(probe), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_a_tensor_on_the_cpu_is_refused_after_a_direct_launch():
    probe = probes.launches(default_device())[0]
    for _ in range(2):
        launch.run(probe.kernel, probe.grid, *probe.args, **probe.meta)
    with pytest.raises(TypeError, match=r"got a tensor on cpu.*move it with"):
        launch.run(probe.kernel, probe.grid, probe.args[0].cpu(), *probe.args[1:], **probe.meta)
