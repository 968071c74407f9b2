"""Whether a process is the one it was."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

from worldline.process import Liveness, ProcessId

HERE = ProcessId.current()


def test_this_process_lives():
    assert HERE.liveness(HERE) is Liveness.ALIVE
    assert ProcessId.current() == HERE == pickle.loads(pickle.dumps(HERE))


def test_a_pid_that_is_used_again_is_another_process():
    assert replace(HERE, start=HERE.start - 1).liveness(HERE) is Liveness.GONE


def test_other_machines_cannot_be_seen():
    for machine in ("", "another-boot/pid:[1]"):
        assert replace(HERE, machine=machine).liveness(HERE) is Liveness.UNKNOWN
        assert HERE.liveness(replace(HERE, machine=machine)) is Liveness.UNKNOWN


def test_a_child_lives_then_is_a_zombie_then_is_none():
    code = "from worldline.process import ProcessId; print(ProcessId.current().start, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **pipes) as child:
        of_child = replace(HERE, pid=child.pid, start=int(child.stdout.readline()))
        assert of_child.liveness(HERE) is Liveness.ALIVE
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert of_child.liveness(HERE) is Liveness.GONE
        child.wait()
        assert of_child.liveness(HERE) is Liveness.GONE
