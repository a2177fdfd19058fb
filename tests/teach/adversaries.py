"""Submissions of the kinds that stop graders or fool them, and what each has to score.

The test course asks for `double(x)` in 1.1: 6 points for double(1), then 2 for double(1000), then
2 for double(-3), in this order. So a fault at 1000 leaves 6 points where it ends the process, and 8
where it is only an exception. In 1.2 `talk(rank)` runs on two ranks.
"""

TOML = """
[lesson]
title = "Doubling"
minutes = 1
builds_on = []

[[task]]
id = "1.1"
title = "Twice"
name = "double"
points = 10
limit = 6
hints = ["a secret hint", "b", "c"]

[[task]]
id = "1.2"
title = "Talk"
name = "talk"
points = 5
limit = 20
hints = ["a", "b", "c"]
"""

TESTS = '''
import minipipe as mp
from minipipe.teach.testing import expect, part

@part("1.1", "small", 60)
def test_small(answer, sizes):
    for (x,) in sizes((1,), (5,)):
        expect(answer(x), 2 * x, f"x={x}")

@part("1.1", "large", 20)
def test_large(answer):
    expect(answer(1000), 2000, "x=1000")

@part("1.1", "negative", 20)
def test_negative(answer):
    expect(answer(-3), -6, "x=-3")

def run(rank, answer):
    return answer(rank)

@part("1.2", "talk", 100)
def test_talk(answer):
    expect(mp.launch(run, answer, ranks=2, timeout=3), [1, 0], "two ranks")
'''

RIGHT = "def double(x):\n    return 2 * x\n"


def at_1000(statements: str, head: str = "") -> str:
    """A right answer but for what it does at 1000."""
    body = "".join(f"        {line}\n" for line in statements.splitlines())
    return f"{head}\ndef double(x):\n    if x == 1000:\n{body}    return 2 * x\n"


DAEMONS = """
for _ in range(200):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "98765"])
        os._exit(0)
"""
LONE = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "98765"])
    os._exit(0)
"""
JUNK = """
for end in range(3, 60):
    try:
        if os.readlink(f"/proc/self/fd/{end}").startswith("pipe"):
            os.write(end, b"\\x00\\x7f\\xff\\xff rubbish")
    except OSError:
        pass
"""

# name: answer to 1.1, points, status
ANSWERS = {
    "right": (RIGHT, 10, "passed"),
    "starter": ("def double(x):\n    raise NotImplementedError('1.1 is not written yet')\n", 0,
                "not written"),
    "wrong": ("def double(x):\n    return x\n", 0, "failed"),
    "endless loop": (at_1000("while True: pass"), 6, "timeout"),
    "endless at import": ("while True: pass\n" + RIGHT, 0, "timeout"),
    "stopped": (at_1000("os.kill(os.getpid(), signal.SIGSTOP)", "import os, signal"), 6, "timeout"),
    "exit at import": ("import os\nos._exit(0)\n" + RIGHT, 0, "error"),
    "exit": (at_1000("os._exit(0)", "import os"), 6, "error"),
    "sys.exit": (at_1000("sys.exit(0)", "import sys"), 8, "failed"),
    "sys.exit at import": ("import sys\nsys.exit(0)\n" + RIGHT, 0, "failed"),
    "interrupt": (at_1000("raise KeyboardInterrupt"), 8, "failed"),
    "pytest.exit": (at_1000("pytest.exit('all passed', 0)", "import pytest"), 8, "failed"),
    "skip": ("import pytest\npytest.skip(allow_module_level=True)\n" + RIGHT, 0, "failed"),
    "syntax": ("def double(x:\n", 0, "failed"),
    "null byte": ("\0" + RIGHT, 0, "failed"),
    "no function": ("twice = 2\n", 0, "failed"),
    "returns None": ("def double(x): return None\n", 0, "failed"),
    "returns text": ("def double(x): return 'xx'\n", 0, "failed"),
    "no callable": ("double = 7\n", 0, "failed"),
    "recursion": ("def double(x): return double(x)\n", 0, "failed"),
    "50 GB": (at_1000("return bytearray(50 << 30)"), 8, "failed"),
    "50 GB of torch": (at_1000("torch.ones(50 << 28)", "import torch"), 8, "failed"),
    "100 MB printed": (at_1000("for _ in range(100): print('9' * 1_000_000)"), 10, "passed"),
    "prints without end": (at_1000("while True: print('9' * 1_000_000)"), 6, "timeout"),
    "printed passed": ("print('3 passed in 0.01s')\nimport json\n"
                       "print(json.dumps(['', 'test', {'name': 'test_small', 'status': 'passed'}]))"
                       "\ndef double(x): return x\n", 0, "failed"),
    "forged file": ("open('result.json', 'w').write('{\"points\": 10, \"version\": 1}')\n"
                    "open('junit.xml', 'w').write('<testsuite/>')\ndef double(x): return x\n",
                    0, "failed"),
    # They wait there until the grader has looked, on a fast machine too.
    "200 processes": (at_1000("for _ in range(200): subprocess.Popen(['sleep', '98765'])\n"
                              "time.sleep(9)", "import subprocess, time"), 6, "error"),
    "200 daemons": (at_1000(f"{DAEMONS}time.sleep(9)", "import os, time"), 6, "error"),
    "fork bomb": (at_1000("while True: os.fork()", "import os"), 6, "error or timeout"),
    "one daemon": (at_1000(LONE, "import os"), 10, "passed"),
    "forked at import": ("import os\nos.fork()\n" + RIGHT, 10, "passed"),
    "endless thread": ("import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
                       + RIGHT, 10, "passed"),
    "pytest is a number": ("pytest = AssertionError = isinstance = 3\n" + RIGHT, 10, "passed"),
    "print is gone": ("import builtins\nbuiltins.print = None\n" + RIGHT, 10, "passed"),
    "alarm": (at_1000("signal.alarm(1)\ntime.sleep(9)", "import signal, time"), 6, "error"),
    "crash": (at_1000("ctypes.string_at(0)", "import ctypes"), 6, "error"),
    "closed output": ("import os\nos.closerange(0, 3)\n" + RIGHT, 10, "passed"),
    "closed all": (at_1000("os.closerange(0, 999)", "import os"), 6, "error"),
    "rubbish in pipes": (at_1000(JUNK, "import os"), 6, "error"),
    "moved": ("import os\nos.chdir('/')\n" + RIGHT, 10, "passed"),
    "deleted": ("import os, shutil\nshutil.rmtree(os.getcwd())\n" + RIGHT, 10, "passed"),
    "reads": (at_1000("assert not sys.stdin.read() and not os.read(0, 9)", "import os, sys"),
              10, "passed"),
    "input": (at_1000("input('x? ')"), 8, "failed"),
    "torch's own": ("from torch.distributed import pipelining\n" + RIGHT, 0, "failed"),
    "long message": (at_1000("raise ValueError('x' * 50_000_000)"), 8, "failed"),
    "odd message": (at_1000("raise ValueError('\\ud800\\x00\\x1b]]><script>&')"), 8, "failed"),
    "message raises": (at_1000("raise Odd", "class Odd(Exception):\n    __str__ = None"), 8,
                       "failed"),
    "fork server killed": (at_1000("os.kill(os.getppid(), 9)\ntime.sleep(9)", "import os, time"), 6,
                           "error"),
    "worker killed": ("import psutil\npsutil.Process().parent().parent().kill()\n"
                      "import time\ntime.sleep(99)\n" + RIGHT, 0, "error"),
}  # fmt: skip

TALK = """
import os, time
import torch, torch.distributed as dist

def talk(rank):
    {}
    got = torch.zeros(1)
    if rank: dist.send(torch.ones(1) * rank, 0); dist.recv(got, 0)
    else: dist.recv(got, 1); dist.send(torch.zeros(1), 1)
    return int(got)
"""

TALKS = {
    "right talk": (TALK.format("pass"), 5, "passed"),
    "deadlock": (TALK.format("dist.recv(torch.zeros(1), 1 - rank)"), 0, "failed"),
    "a rank dies": (TALK.format("rank == 1 and os._exit(0)"), 0, "failed"),
    "ranks print": (TALK.format("print('1 passed' * 1_000_000)"), 5, "passed"),
    "talk is text": ("talk = 'talk'\n", 0, "failed"),
}
