"""What the numbers depend on."""

from __future__ import annotations

import torch

from firstlight.verify.environment import environment, unknown_variables


def test_environment_tells_what_runs_here() -> None:
    here = environment()
    # the build, such as +cu130, is in the module alone or in both
    installed = here.packages["torch"]
    assert installed is not None
    assert installed.partition("+")[0] == torch.__version__.partition("+")[0]
    assert here.torch_threads == torch.get_num_threads()
    assert here.devices[0] == "cpu"
    assert here.num_cpus >= 1
    assert here.memory_bytes is None or here.memory_bytes > 1 << 28


def test_only_our_own_unknown_variables_are_warned_of() -> None:
    found = unknown_variables({"FIRSTLIGHT_B": "1", "FIRSTLIGHT_A": "", "PATH": "/bin", "MY_FIRSTLIGHT_": "1"})
    assert [warning.split()[0] for warning in found] == ["FIRSTLIGHT_A", "FIRSTLIGHT_B"]
