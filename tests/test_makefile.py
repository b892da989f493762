"""How many ranks the quickstart starts, by what nvidia-smi lists and which GPUs a process is to see."""

import os
import re
import subprocess

import pytest

from tests.ranks import ROOT

UUIDS = [f"GPU-5f0e7a8c-1111-2222-3333-00000000000{i}" for i in range(8)]
MIGS = [f"MIG-9e6d5c4b-1111-2222-3333-00000000000{i}" for i in range(7)]
WHOLE = {f"{n} GPUs": [f"GPU {i}: NVIDIA H200 (UUID: {UUIDS[i]})" for i in range(n)] for n in (1, 2, 8)}
SLICED = [
    line for gpu in WHOLE["2 GPUs"] for line in (gpu, *(f"  MIG 1g.18gb Device 0: (UUID: {m})" for m in MIGS[:2]))
]
CASES = [
    ("1 GPUs", {None: 1, "": 2, "0": 1, "0,1": 1, UUIDS[0]: 1, MIGS[0]: 1, "-1": 2}),
    ("2 GPUs", {None: 2, "": 2, "0": 1, "1": 1, "0,1": 2, UUIDS[1]: 1, ",".join(UUIDS[:2]): 2, "0,-1,1": 1}),
    ("8 GPUs", {None: 2, "": 2, "0": 1, "0,1": 2, "0,1,2,3,4,5,6,7": 2, UUIDS[7]: 1, ",".join(UUIDS): 2}),
    ("slices", {None: 1, "": 2, "0": 1, "0,1": 1, MIGS[0]: 1, ",".join(MIGS[:2]): 1, "MIG-GPU-5f0e/1/0": 1}),
    ("none", {None: 2, "0": 1, "0,1": 2}),
]


@pytest.mark.parametrize(("there", "visible", "expected"), [(t, v, n) for t, rows in CASES for v, n in rows.items()])
def test_the_quickstart_starts_a_rank_for_each_gpu_that_it_sees_and_two_at_most(tmp_path, there, visible, expected):
    """An empty list hides all GPUs, as CUDA reads it: then 2, as on a machine without one."""
    lines = {**WHOLE, "slices": SLICED}.get(there)
    body = "exit 9" if lines is None else "cat <<'END'\n" + "\n".join(lines) + "\nEND"
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/bash\n[ "$1" = --list-gpus ] || exit 7\n{body}\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "RANKS")}
    env |= {"PATH": f"{tmp_path}:{env['PATH']}"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    done = subprocess.run(["make", "-n", "quickstart"], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert set(re.findall(r"--nproc_per_node=(\S+)", done.stdout)) == {str(expected)}
    assert "requirements.txt" in done.stdout
