"""Which launches start early."""

import pytest

from minidl.runtime import dependent_launch, launch


@pytest.mark.parametrize(
    ("target", "programs", "starts_early"),
    [
        ("sm_90", 1, True),
        ("sm_90", dependent_launch.FEW, True),
        ("sm_90", dependent_launch.FEW + 1, False),
        ("sm_80", 1, False),
    ],
)
def test_few_programs_start_early_where_the_device_can(target, programs, starts_early):
    with launch.record(lambda *_: None, target):
        assert dependent_launch.options(programs) == {"EARLY": starts_early, "launch_pdl": starts_early}
        assert dependent_launch.options()["EARLY"] is (target == "sm_90")
