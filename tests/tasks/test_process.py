"""Children end when they should: with their parent, on cancellation with their group, and with their exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks import leash, process
from tasks.process import ChildFailed, ChildKilled

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the children's import path; write modules for them there."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    return tmp_path


def gone(pid: int, seconds: float = 10) -> bool:
    """Whether the process ends within this time (a zombie has ended)."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def wait_for(path: Path, seconds: float = 20) -> int:
    """The process id that a child writes to `path`."""
    limit = time.monotonic() + seconds
    while not path.exists() or not path.read_text():
        assert time.monotonic() < limit, f"no {path}"
        time.sleep(0.05)
    return int(path.read_text())


def test_a_job_that_torchrun_started_around_this_is_not_taken_for_the_childs(
    child: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    around |= {"TORCHELASTIC_RUN_ID": "job", "GROUP_WORLD_SIZE": "2", "PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:1"}
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    (child / "looker.py").write_text(
        "import os\nfrom tasks.process import emit, reporting\n"
        "with reporting() as request:\n"
        "    found = [name for name in request['names'] if name in os.environ]\n"
        "    emit('result', found=found)\n"
    )
    names = [*around, "SOMETHING_ELSE"]
    assert process.run("looker", {"names": names})["found"] == ["SOMETHING_ELSE"]


def test_processes_of_one_machine_need_neither_its_name_nor_its_networks(
    child: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (child / "sitecustomize.py").write_text("import socket\nsocket.gethostname = lambda: 'nowhere.invalid'\n")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    (child / "summer.py").write_text(
        "import torch\nimport torch.distributed as dist\nfrom tasks.process import emit, reporting\n"
        "with reporting() as request:\n"
        "    dist.init_process_group('gloo')\n"
        "    total = torch.tensor([1])\n"
        "    dist.all_reduce(total)\n"
        "    if dist.get_rank() == 0:\n"
        "        emit('result', total=int(total))\n"
        "    dist.destroy_process_group()\n"
    )
    assert process.run("summer", {}, processes=2)["total"] == 2


def test_whose_parent_is_gone_still_ends_its_work_whole(child: Path) -> None:
    (child / "worker.py").write_text(
        "import os, pathlib, signal, time\nfrom tasks.process import emit, reporting\n"
        "asked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "with reporting() as request:\n"
        "    pathlib.Path(request['pid']).write_text(str(os.getpid()))\n"
        "    while not asked:\n"
        "        time.sleep(0.01)\n"
        "    emit('step')\n"
        "    pathlib.Path(request['saved']).write_text('whole')\n"
    )
    pid, saved = child / "pid", child / "saved"
    asks = f"from tasks import process; process.run('worker', {{'pid': {str(pid)!r}, 'saved': {str(saved)!r}}})"
    parent = subprocess.Popen([sys.executable, "-c", asks], cwd=ROOT)
    worker = wait_for(pid)
    parent.kill()
    parent.wait()
    assert gone(worker) and saved.read_text() == "whole"


def test_events_arrive_in_order_and_stray_prints_do_not(child: Path) -> None:
    (child / "talker.py").write_text(
        "from tasks.process import emit, reporting\n"
        "with reporting() as request:\n"
        "    print('a library prints this')\n"
        "    emit('step', number=1)\n"
        "    emit('step', number=2)\n"
        "    emit('result', doubled=2 * request['n'])\n"
    )
    seen: list[process.Event] = []
    assert process.run("talker", {"n": 21}, seen.append)["doubled"] == 42
    assert [event.get("number") for event in seen] == [1, 2, None]


def test_an_error_keeps_its_message_and_exit_code(child: Path) -> None:
    (child / "refuser.py").write_text(
        "from storage.errors import Refused\nfrom tasks.process import reporting\n"
        "with reporting():\n    raise Refused('nothing to compare with')\n"
    )
    with pytest.raises(ChildFailed, match="nothing to compare with") as caught:
        process.run("refuser", {})
    assert caught.value.exit_code == 13


def test_a_killed_child_is_told_apart_from_a_failed_one(child: Path) -> None:
    (child / "victim.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(ChildKilled, match="SIGKILL"):
        process.run("victim", {})


def test_a_child_that_lost_a_process_says_itself_why(child: Path) -> None:
    (child / "bereft.py").write_text(
        "from storage.errors import RankLost\nfrom tasks.process import reporting\n"
        "with reporting():\n    raise RankLost('rank 1 is silent', cause='it was stopped', next_step='train again')\n"
    )
    with pytest.raises(ChildKilled, match="rank 1 is silent") as caught:
        process.run("bereft", {})
    assert str(caught.value).splitlines()[1:] == ["  likely cause: it was stopped", "  next: train again"]


def test_processes_that_end_before_a_result_are_not_said_to_have_got_a_signal(child: Path) -> None:
    (child / "quitter.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ChildKilled, match=r"quitter \(process \d+\) ended with exit code 1 and gave no result"):
        process.run("quitter", {}, processes=2)


def test_processes_share_the_cores_that_are_ours(child: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the machine's: in a container with a few of many, each process had a thread for all."""
    (child / "sharer.py").write_text(
        "import os\nfrom tasks.process import emit, reporting\n"
        "with reporting():\n    os.environ['RANK'] == '0' and emit('result', threads=os.environ['OMP_NUM_THREADS'])\n"
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert process.run("sharer", {}, processes=2)["threads"] == "3"


def test_a_child_killed_in_the_middle_of_a_report_is_a_killed_one(child: Path) -> None:
    (child / "cut.py").write_text(
        "import os, signal\nfrom tasks import process\n"
        "with process.reporting():\n"
        "    process.emit('step')\n"
        '    os.write(process._REPORT, b\'{"kind": "st\')\n'
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    seen: list[process.Event] = []
    with pytest.raises(ChildKilled, match="SIGKILL"):
        process.run("cut", {}, seen.append)
    assert seen == [{"kind": "step"}]


def test_an_interruption_ends_the_whole_group(child: Path) -> None:
    (child / "parent.py").write_text(
        "import subprocess, sys\nfrom tasks.process import emit, reporting\n"
        "with reporting() as request:\n"
        "    grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "    open(request['pid'], 'w').write(str(grandchild.pid))\n"
        "    emit('step')\n"
        "    grandchild.wait()\n"
    )

    def interrupt(event: process.Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.run("parent", {"pid": str(child / "pid")}, interrupt)
    assert gone(wait_for(child / "pid"))


def test_a_child_ends_when_its_parent_is_killed(child: Path) -> None:
    (child / "sleeper.py").write_text(
        f"import os, time\nopen({str(child / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    )
    starter = "import subprocess, time\nfrom tasks import leash\n"
    starter += "held = leash.start('sleeper', [], subprocess.DEVNULL, None)\ntime.sleep(100)\n"
    parent = subprocess.Popen([sys.executable, "-c", starter], cwd=ROOT)
    pid = wait_for(child / "pid")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(pid)


def test_stop_uses_force_where_asking_does_not_help(child: Path) -> None:
    (child / "stubborn.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(child / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    )
    started = leash.start("stubborn", [], subprocess.DEVNULL, None)
    pid = wait_for(child / "pid")
    assert leash.stop(started, patience=0.5) == -signal.SIGKILL
    assert gone(pid)
