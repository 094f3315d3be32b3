# SPDX-License-Identifier: Apache-2.0
"""`sporeloom launch-script`: the lines start what they say, on servers that stand-ins for ssh and Slurm play."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import CONFIGS, ROOT, TWO_LAYERS, in_process

from sporeloom.cli import launch_script, plan
from sporeloom.runtime.launch import free_port

TRAIN = ("train", "--data", "a corpus/text.txt", "--steps", "3")


def written(*words):
    outcome = in_process("tools/launch_script.py", *words)
    assert outcome.code == 0, outcome.output
    return outcome.output


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("# the rack\n10.0.0.1\nnode-b.example\n")
    return path


@pytest.fixture
def four(tmp_path):
    path = tmp_path / "four.yaml"
    path.write_text("mesh: {dp: 2, tp: 2}\nrules: decoder\n")
    return path


def test_a_line_for_each_server(four, hosts):
    said = written("--strategy", four, "--devices-per-server", 2, "--hosts", hosts, "--", *TRAIN)
    lines = said.splitlines()
    assert lines[0::2] == ["# server 0: 10.0.0.1", "# server 1: node-b.example"]
    for number, line in enumerate(lines[1::2]):
        assert line == (
            f"msrun --worker_num=4 --local_worker_num=2 --master_addr=10.0.0.1 --node_rank={number} --master_port=8118 "
            f"--join=True --log_dir=logs \"$(which sporeloom)\" train --data 'a corpus/text.txt' --steps 3 --strategy {four}"
        )


def test_one_server_needs_no_master(four):
    (line,) = written("--strategy", four, "--", *TRAIN).splitlines()
    assert line.startswith("msrun --worker_num=4 --local_worker_num=4 --master_port=8118 --join=True")


@pytest.mark.slow
def test_the_line_of_one_server_trains(tmp_path):
    strategy = tmp_path / "s.yaml"
    strategy.write_text("mesh: {tp: 2}\nrules: decoder\n")
    text = ROOT / "examples" / "small_town.txt"
    words = ("--data", text, "--config", TWO_LAYERS, "--seq-len", 32, "--steps", 2, "--output-dir", tmp_path / "out")
    line = written(
        "--strategy", strategy, "--log-dir", tmp_path / "l", "--master-port", free_port(), "--", "train", *words
    )
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GLOG_v": "3"}
    done = subprocess.run(["bash", "-c", line], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    logs = "".join(path.read_text() for path in (tmp_path / "l").glob("worker_*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert "loss 7." in logs


STAND_INS = {
    # Runs the command of another server on this one.
    "ssh": '#!/usr/bin/env bash\nshift\nhost=$1; shift\nHOST=$host bash -c "$*"\n',
    "msrun": """#!/usr/bin/env bash
printf "%s\\n" "$PWD" "$@" > "$RECORDS/$NODE_RANK.${HOST:-task}"
[ "$NODE_RANK" != "$FAILS" ]
""",
    "srun": '#!/usr/bin/env bash\nfor n in 0 1; do SLURM_NODEID=$n "${@:2}" || exit; done\n',
    "scontrol": '#!/usr/bin/env bash\nprintf "first\\nsecond\\n"\n',
    "sporeloom": "#!/usr/bin/env bash\n",
}


@pytest.fixture
def cluster(tmp_path):
    """Runs a script where the programs of a cluster are stand-ins; returns its exit code and what each msrun was given."""
    programs, records = tmp_path / "programs", tmp_path / "records"
    programs.mkdir()
    records.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def start(script, folder, **environment):
        env = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "RECORDS": str(records),
            "FAILS": "-",
            **environment,
        }
        folder.mkdir(exist_ok=True)
        done = subprocess.run(["bash", str(script)], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
        given = {path.name: path.read_text().splitlines() for path in sorted(records.iterdir())}
        return done.returncode, given

    return start


def arguments(number, four, programs):
    return [
        *("--worker_num=4", "--local_worker_num=2", f"--node_rank={number}"),
        *("--master_port=8118", "--join=True", "--log_dir=the logs"),
        *(f"{programs}/sporeloom", "train", "--data", "a corpus/text.txt", "--steps", "3", "--strategy", str(four)),
    ]


@pytest.mark.parametrize("scheduler", ["ssh", "slurm"])
def test_a_script_starts_every_server_with_its_number(tmp_path, four, hosts, cluster, scheduler):
    path = tmp_path / "job.sh"
    flags = ("--devices-per-server", 2, "--scheduler", scheduler, "--log-dir", "the logs", "--out", path)
    written("--strategy", four, "--hosts", hosts, *flags, "--", *TRAIN)
    assert os.access(path, os.X_OK)
    code, given = cluster(path, tmp_path / "a folder")
    assert code == 0
    master = "10.0.0.1" if scheduler == "ssh" else "first"
    names = ["0.10.0.0.1", "1.node-b.example"] if scheduler == "ssh" else ["0.task", "1.task"]
    assert list(given) == names
    for number, (folder, *words) in enumerate(given.values()):
        assert folder == str(tmp_path / "a folder")
        assert words.pop(2) == f"--master_addr={master}"
        assert words == arguments(number, four, tmp_path / "programs")


def test_a_server_that_fails_ends_the_job(tmp_path, four, hosts, cluster):
    path = tmp_path / "job.sh"
    written(
        "--strategy",
        four,
        "--hosts",
        hosts,
        "--devices-per-server",
        2,
        "--scheduler",
        "ssh",
        "--out",
        path,
        "--",
        *TRAIN,
    )
    assert cluster(path, tmp_path / "folder", FAILS="1")[0] == 1


def test_on_modelarts_the_environment_says_which_server(tmp_path, four, cluster):
    path = tmp_path / "job.sh"
    flags = ("--devices-per-server", 2, "--scheduler", "modelarts", "--log-dir", "the logs", "--out", path)
    written("--strategy", four, *flags, "--", *TRAIN)
    code, given = cluster(path, tmp_path / "folder", VC_WORKER_HOSTS="w0.job,w1.job", VC_TASK_INDEX="1")
    assert code == 0
    ((_, *words),) = given.values()
    assert words.pop(2) == "--master_addr=w0.job"
    assert words == arguments(1, four, tmp_path / "programs")


ELASTIC = {
    # One server of three is down. The controller does not answer every other time.
    "sinfo": """#!/usr/bin/env bash
mkdir "$RECORDS.asked" 2>/dev/null && echo "slurm_load_node: timed out" >&2 && exit 1
rmdir "$RECORDS.asked"
printf "%s\\n" "a alloc" "b down*" "c mix" "a alloc"
""",
    "srun": """#!/usr/bin/env bash
printf "%s\n" "$@" > "$RECORDS/srun"
for n in 0 1; do SLURM_NODEID=$n "${@:6}" || exit; done
""",
    "msrun": '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$RECORDS/${4#--node_rank=}"\n',
    "sporeloom": """#!/usr/bin/env bash
printf "%s\n" "$@" > "$RECORDS/launcher"
while [ $# -gt 0 ]; do
  case $1 in --launch-command) command=$2 ;; --devices-file) file=$2 ;; esac
  shift
done
cat "$file" > "$RECORDS/devices"
echo 0 > "$file"
for _ in {1..100}; do [ "$(cat "$file")" = 4 ] && break; sleep 0.05; done
cat "$file" >> "$RECORDS/devices"
command=${command//'{devices}'/4}
command=${command//'{port}'/8200}
eval "words=(${command//'{log_dir}'/logs})"
"${words[@]}" rank.py "two words"
""",
}


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_elastic_job_starts_on_the_servers_that_are_up(tmp_path, four, cluster, restarts):
    for name, text in ELASTIC.items():
        (tmp_path / "programs" / name).write_text(text)
        (tmp_path / "programs" / name).chmod(0o755)
    path, words = tmp_path / "job.sh", ("--elastic", "--save-every", "1", "--output-dir", "the out")
    written("--strategy", four, "--devices-per-server", 2, "--scheduler", "slurm", "--out", path, "--", *TRAIN, *words)
    (tmp_path / "folder" / "the out" / "checkpoints" / "step-00000001").mkdir(parents=True)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[a-c]", "SLURM_RESTART_COUNT": str(restarts)}
    code, given = cluster(path, tmp_path / "folder", LOOK_EVERY_S="0.1", **slurm)
    assert code == 0 and given["devices"] == ["4", "4"]
    assert not list((tmp_path / "folder").glob("devices.*"))
    assert given["launcher"][: len(TRAIN) + len(words)] == [*TRAIN, *words]
    assert ("--resume" in given["launcher"]) == bool(restarts)
    assert given["srun"][:5] == [
        *("--kill-on-bad-exit=1", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=a,c")
    ]
    for number in range(2):
        assert given[str(number)] == [
            *("--worker_num=4", "--local_worker_num=2", "--master_addr=a", f"--node_rank={number}"),
            *("--master_port=8200", "--join=True", "--log_dir=logs", "rank.py", "two words"),
        ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--devices-per-server", 3), "has 4 ranks, which do not divide into servers of --devices-per-server 3"),
        (("--hosts", "HOSTS"), "names 2 servers, and 4 ranks on 8 devices each take 1"),
        (("--devices-per-server", 2, "--scheduler", "ssh"), "--scheduler ssh needs --hosts"),
        (("--hosts", "BAD"), "'-oProxyCommand=x' is not a host name"),
        (("--master-port", 80), "--master-port must be at least 1024"),
        (("--scheduler", "slrum"), "did you mean slurm?"),
    ],
)
def test_what_does_not_go_together_is_reported(tmp_path, four, hosts, words, said):
    (tmp_path / "bad.txt").write_text("-oProxyCommand=x\n")
    words = [{"HOSTS": hosts, "BAD": tmp_path / "bad.txt"}.get(word, word) for word in words]
    outcome = in_process("tools/launch_script.py", "--strategy", four, *words, "--", *TRAIN)
    assert outcome.code == 2 and said in outcome.output


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("trian", "--data", "x"), "trian is not a command that takes a strategy; did you mean train?"),
        (("train", "--launch"), "--launch starts processes on one machine"),
        (("train", "--strategy=x.yaml"), "--strategy is added to the command"),
        (("train", "--elastic"), "--elastic: give --output-dir, a folder that all servers share"),
        (
            ("train", "--elastic", "--output-dir", "x"),
            "--elastic starts its processes itself: --scheduler slurm writes",
        ),
    ],
)
def test_a_command_that_servers_cannot_run_is_reported(four, command, said):
    outcome = in_process("tools/launch_script.py", "--strategy", four, "--", *command)
    assert outcome.code == 2 and said in outcome.output


def test_a_plan_is_headed_by_the_command_that_starts_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    size = ["--model", "pangu", "--size", "13b", "--cluster", "h100", "--devices", "64"]
    plan.main([*size, "--global-batch-size", "64", "--out", "p.yaml"])
    command = re.search(r"(?m)^# sporeloom launch-script (.*)$", (tmp_path / "p.yaml").read_text())[1]
    capsys.readouterr()
    launch_script.main([*command.split(), "--data", "corpus"])
    said = capsys.readouterr().out
    assert said.count("msrun --worker_num=64 --local_worker_num=8") == 8
    assert said.count("train --model pangu --size 13b") == 8 and said.count("--strategy p.yaml") == 8
    assert yaml.safe_load((tmp_path / "p.yaml").read_text())["rules"] and CONFIGS.is_dir()
