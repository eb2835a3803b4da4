"""A batch script is understood before it is submitted; tests/golden has what stands against each, with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_ones.cli.check import examine
from slurm_ones.cli.template import templates
from tests.commands import call

GOOD = """#!/bin/bash
#SBATCH --nodes=1 --gres=gpu:1
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --comment="ones: gpus=1-16 batch=32-1024"
exec ones-run "$@"
"""
BLOCKS = (
    GOOD.replace("1024", "1024 array=blocks")
    .replace("--nodes=1", "--array=0-7%1 --nodes=1")
    .replace("ones-run", "ones-run --blocks")
)


def faults(text: str) -> list[tuple[int, str]]:
    return [(one.line, one.text) for one in examine(text).findings if one.weight == "error"]


TYPED = GOOD.replace("gpu:1", "gpu:2080ti:1").replace("1024", "1024 kinds=2080ti,a100")


@pytest.mark.parametrize("text", [GOOD, BLOCKS, TYPED])
def test_a_good_script_has_no_finding(text: str) -> None:
    verdict = examine(text)
    assert verdict.elastic
    assert verdict.findings == ()
    assert verdict.shape == (1, 1)


def test_our_own_templates_have_no_fault() -> None:
    scripts = {name: text for name, text in templates().items() if "#SBATCH" in text and "gres" in text}
    assert scripts
    for text in scripts.values():
        assert faults(text) == []


def test_json_names_line_and_weight(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(GOOD.replace("--nodes=1", "--nodes=1 --ntasks=4"))
    done = call("check", str(tmp_path / "job.sbatch"), "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["elastic"], found["findings"][0]["line"]) == (1, False, 2)


def test_a_comment_may_be_longer_than_a_files_name() -> None:
    kinds = ",".join(f"nvidia_a100-sxm4-{number}gb" for number in range(10, 26))
    done = call("check", f"ones: gpus=1-16 batch=32-1024 kinds={kinds}")
    assert done.exit_code == 0 and "elastic" in done.stdout


ORDINARY = GOOD.replace("32-1024", "32-256").replace("1-16", "1-4")
EXEC = 'exec ones-run "$@"'
DIES = "kills the batch shell"
SIZE = "outside its gpus=1-4"
FORMS = [
    # what sbatch 26.05 takes, as scontrol shows it
    ("gpu:1", "gpu:8,tmpfs:100G", SIZE, (1, 8)),
    ("gpu:1", "gpu", "", (1, 1)),
    ("gpu:1", "gpu:a100", "", (1, 1)),
    ("gpu:1", "gpu=2", "", (1, 2)),
    ("gpu:1", "gres/gpu:2", "", (1, 2)),
    ("gpu:1", "gpu:a100:1,gpu:v100:2", "", (1, 3)),
    ("gpu:1", "gpumem:40", "", (1, 0)),
    ("--gres=gpu:1", "--gpus-per-node=a100", "", (1, 1)),
    ("--gres=gpu:1", "--gpus-per-n=2", "", (1, 2)),
    ("--gres=gpu:1", "--gre=gpu:1", "sbatch refuses --gre, which may be --gres or --gres-flags", (1, 0)),
    ("--nodes=1", "--nodes=1 --tasks-per-node=4", "--ntasks-per-node: Slurm does not let", (1, 1)),
    ("--nodes=1", "-kN2", "", (2, 1)),
    ("--requeue --open-mode=append", "--req --open=append", "", (1, 1)),
    ("#SBATCH --signal", "#SBATCH--signal", "", (1, 1)),
    ("#SBATCH --signal", " #SBATCH --signal", "Slurm does not read", (1, 1)),
    ("--signal=B:USR2@120", "--sig=B:USR2@120", "", (1, 1)),
    ("B:USR2@120", "B:SIGUSR2@120", "", (1, 1)),
    ("B:USR2@120", "b:12", "", (1, 1)),
    ("B:USR2@120", "USR2@120", "no --signal=B:USR2@120", (1, 1)),
    ("B:USR2@120", "B:USR1@120", "no --signal=B:USR2@120", (1, 1)),
    ("\n", "\r\n", "lines end as in Windows", None),
    ("#!/bin/bash\n", "", "the first line must be #!/bin/bash", (1, 1)),
    ("exec", "#SBATCH hetjob\n#SBATCH -N1\nexec", "a heterogeneous job", (1, 1)),
    # what the shell makes of its commands
    (EXEC, "ones-run train.py", DIES, (1, 1)),
    (EXEC, "ones-run train.py 2>&1 | tee log", "in place of a pipe", (1, 1)),
    (EXEC, "exec ones-run train.py > >(tee log) 2>&1", "", (1, 1)),
    (EXEC, "exec timeout 3500 ones-run train.py", "without timeout before it", (1, 1)),
    (EXEC, "exec nice ones-run train.py", "", (1, 1)),
    (EXEC, "ones-run train.py &\ntrap 'kill -USR2 $!' USR2\nwait\nwait", "", (1, 1)),
    (EXEC, "trap 'scontrol requeue $SLURM_JOB_ID' USR2\nones-run train.py &\nwait", "submits itself", (1, 1)),
    (EXEC, "sbatch --dependency=afterany:$SLURM_JOB_ID $0\n" + EXEC, "submits itself", (1, 1)),
    (EXEC, "if [ -f x ]; then\n  exec ones-run a.py\nelse\n  exec ones-run b.py\nfi", "", (1, 1)),
    (EXEC, "ones-run pretrain.py\nones-run finetune.py", "two trainings in one directory", (1, 1)),
    (EXEC, "for s in 1 2; do\n ones-run train.py $s\ndone", "two trainings in one directory", (1, 1)),
    (EXEC, "srun --cpu-bind=none \\\n  ones-run train.py", "without srun", (1, 1)),
    (EXEC, "NCCL_DEBUG=INFO srun ones-run train.py", "without srun", (1, 1)),
    (EXEC, 'CMD="ones-run train.py"\nsrun bash -c "$CMD"', "without srun", (1, 1)),
    (EXEC, "torchrun --nproc_per_node=4 \\\n --no-python ones-run train.py", "without torchrun", (1, 1)),
    (EXEC, "exec apptainer exec --nv a.sif ones-run train.py", "--container 'apptainer exec --nv a.sif'", (1, 1)),
    (EXEC, 'echo "no ones-run today"\ntorchrun train.py', "it does not call ones-run", (1, 1)),
    (EXEC, "cat <<END\nones-run train.py\nEND", "it does not call ones-run", (1, 1)),
    (EXEC, "exec ones-run --version", "it does not call ones-run", (1, 1)),
    (EXEC, "command -v ones-run || exit 1\n" + EXEC, "", (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "words", "shape"), FORMS, ids=lambda value: str(value)[:40])
def test_forms_of_public_scripts(before: str, after: str, words: str, shape: tuple[int, int] | None) -> None:
    """Protects whoever writes a script in another form than ours, from a false alarm and from none."""
    assert before in ORDINARY
    verdict = examine(ORDINARY.replace(before, after))
    texts = [one.text for one in verdict.findings]
    assert any(words in text for text in texts) if words else texts == []
    assert shape is None or verdict.shape == shape


def test_arguments_of_blocks_may_go_on_below() -> None:
    assert examine(BLOCKS.replace('--blocks "$@"', "\\\n  --blocks train.py \\\n  --lr 0.1")).findings == ()
